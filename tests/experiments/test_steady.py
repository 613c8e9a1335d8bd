"""The steady-state rule on launches where the answer is known."""

import numpy as np
import pytest

from deltagram.experiments.steady import steady_state, truncation


def brute_force(steps, warmup):
    medians = np.median(steps[warmup:][: (len(steps) - warmup) // 5 * 5].reshape(-1, 5), axis=1)
    scores = [np.var(medians[d:]) / len(medians[d:]) for d in range(len(medians) // 2 + 1)]
    return warmup + 5 * int(np.argmin(scores))


@pytest.mark.parametrize("warmup", [0, 7, 30])
def test_the_truncation_minimises_the_marginal_standard_error(warmup):
    rng = np.random.default_rng(warmup)
    for _ in range(20):
        steps = 10 + 0.3 * rng.standard_normal(203) + 4 * np.exp(-np.arange(203) / rng.uniform(2, 40))
        assert truncation(steps, warmup) == brute_force(steps, warmup)


def test_a_step_of_the_level_is_found_and_the_median_is_of_the_rest():
    steps = np.full(200, 10.0) + 0.01 * np.sin(np.arange(200))
    steps[:60] += 5.0
    steady = steady_state(steps)
    assert 60 <= steady.first <= 65 and steady.kept == 200 - steady.first
    assert steady.median == pytest.approx(10.0, abs=0.01) and steady.drift == pytest.approx(0.0, abs=0.01)


def test_one_slow_step_moves_nothing():
    steps = 10 + 0.1 * np.random.default_rng(0).standard_normal(200)
    spiked = steps.copy()
    spiked[90] = 500.0
    assert abs(int(truncation(spiked)) - int(truncation(steps))) <= 5


def test_never_past_half_and_the_drift_tells():
    steps = np.linspace(10.0, 20.0, 200)
    steady = steady_state(steps)
    assert steady.first == 100
    assert steady.drift == pytest.approx(18.75 / 16.25 - 1, abs=0.01)


def test_short_launches_keep_what_the_warm_up_leaves():
    assert steady_state(np.array([9.0, 1.0, 3.0, 2.0]), warmup=1).median == 2.0
    with pytest.raises(ValueError, match="3 steps with a warm-up of 2"):
        steady_state(np.ones(3), warmup=2)
