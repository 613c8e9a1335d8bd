"""The error rates that the tool promises, by simulation: launch sd 1 %, block sd 1.5 %, step sd 3 %.

Each trial is an experiment from its steps on, through the steady-state rule, to the interval that gives the verdict.
Bands are those of the claim; seeds are fixed, and 2,000 trials have a standard error of 0.5 % at 5 %.
"""

import numpy as np
import pytest
from scipy import stats

from deltagram.experiments import paired_test
from deltagram.experiments.spending import nominal_levels
from deltagram.experiments.stats import power, t_interval
from deltagram.experiments.steady import steady_state, truncation

LAUNCH, BLOCK, STEP = 0.01, 0.015, 0.03
ARMS = np.array([0, 1, 1, 0])  # ABBA: what is drawn is exchangeable, so the order does not matter here


def steps_of(rng, trials, blocks, steps=500, effect=0.0, warm_up=None):
    """ms [trials, blocks, 4, steps] of launches in ABBA; `effect` makes B faster, `warm_up` [steps] only slows B."""
    log_ms = rng.normal(0.0, BLOCK, (trials, blocks, 1, 1)) + rng.normal(0.0, LAUNCH, (trials, blocks, 4, 1))
    log_ms = log_ms - effect * ARMS[:, None]
    ms = np.exp(log_ms.astype(np.float32) + STEP * rng.standard_normal((trials, blocks, 4, steps), dtype=np.float32))
    if warm_up is not None:
        ms[:, :, ARMS == 1] *= warm_up.astype(np.float32)
    return ms


def numbers_of(ms):
    """One number per launch: the median of its steady steps."""
    first = truncation(ms)
    kept = np.arange(ms.shape[-1]) >= first[..., None]
    return np.nanmedian(np.where(kept, ms, np.nan), axis=-1).astype(float)


def log_ratios_of(rng, trials, blocks, number=numbers_of, **how):
    parts = []
    for at in range(0, trials, 250):  # 250 trials of 6 blocks are 48 MB of steps
        logs = np.log(number(steps_of(rng, min(250, trials - at), blocks, **how)))
        parts.append(logs[..., ARMS == 0].mean(-1) - logs[..., ARMS == 1].mean(-1))
    return np.concatenate(parts)


@pytest.fixture(scope="module")
def null_ratios():
    """2,000 A/A experiments of 10 blocks: [2000, 10]."""
    return log_ratios_of(np.random.default_rng(20), 2000, 10)


def test_the_vectorised_number_is_the_one_of_a_launch():
    ms = steps_of(np.random.default_rng(0), 2, 2, warm_up=1 + 0.3 * np.exp(-np.arange(500) / 40))
    numbers = numbers_of(ms)
    for index in np.ndindex(2, 2, 4):
        assert steady_state(ms[index].astype(float)).median == pytest.approx(numbers[index], rel=1e-6)


@pytest.mark.parametrize("blocks", [4, 6, 10])
def test_false_positives_and_coverage(null_ratios, blocks):
    mean, half, p = t_interval(null_ratios[:, :blocks], 0.05)
    winners = float(np.mean(p <= 0.05))
    assert 0.03 <= winners <= 0.07
    assert 0.93 <= float(np.mean(np.abs(mean) <= half)) <= 0.97
    # What the simulation counts is what the tool says.
    for row, wins in zip(null_ratios[:25, :blocks], p[:25] <= 0.05, strict=True):
        said = paired_test([(float(np.exp(y)), 1.0) for y in row], 0.01).verdict
        assert (said in ("faster", "slower")) == wins


@pytest.mark.parametrize("spending", ["obrien-fleming", "pocock"])
@pytest.mark.parametrize("looks", [(4, 6), (4, 6, 8, 10)])
def test_false_positives_with_looks(null_ratios, looks, spending):
    stopped = np.zeros(len(null_ratios), dtype=bool)
    outside = np.zeros(len(null_ratios), dtype=bool)
    for blocks, level in zip(looks, nominal_levels(looks, 0.05, spending), strict=True):
        mean, half, p = t_interval(null_ratios[:, :blocks], level)
        stopped |= p <= level
        outside |= np.abs(mean) > half
    assert stopped.mean() <= 0.07
    assert outside.mean() <= 0.07  # the repeated intervals hold at all looks together


@pytest.mark.parametrize("looks", [(6,), (4, 6, 8, 10)])
def test_false_positives_over_three_cells(null_ratios, looks):
    """Holm rejects something exactly when its first step does: the smallest p-value at a third of alpha."""
    cells = null_ratios[:1998].reshape(666, 3, 10)
    rejected = np.zeros(666, dtype=bool)
    for blocks, level in zip(looks, nominal_levels(looks, 0.05 / 3, "obrien-fleming"), strict=True):
        rejected |= (t_interval(cells[:, :, :blocks], level)[2] <= level).any(axis=1)
    assert 0.02 <= rejected.mean() <= 0.07


def test_looking_without_spending_would_fail(null_ratios):
    stopped = np.zeros(len(null_ratios), dtype=bool)
    for blocks in range(2, 11):
        stopped |= t_interval(null_ratios[:, :blocks], 0.05)[2] <= 0.05
    assert stopped.mean() > 0.1


def test_a_two_percent_effect_is_found_as_often_as_the_power_formula_says():
    ratios = log_ratios_of(np.random.default_rng(21), 2000, 6, effect=np.log(1.02))
    found = float(np.mean(t_interval(ratios, 0.05)[2] <= 0.05))
    # Two launches of each arm: the variances of the launch and of its median step, halved, twice.
    spread = np.sqrt(LAUNCH**2 + np.pi / 2 * STEP**2 / 500)
    assert found == pytest.approx(power(np.log(1.02), 6, float(spread)), abs=0.02)
    assert found > 0.9


WARM_UPS = {
    "decays over 40 steps from +30 %": 1 + 0.3 * np.exp(-np.arange(500) / 40),
    "+10 % for 100 steps": 1 + 0.1 * (np.arange(500) < 100),
    "+5 % for 150 steps": 1 + 0.05 * (np.arange(500) < 150),
}


@pytest.mark.parametrize("warm_up", WARM_UPS.values(), ids=WARM_UPS)
def test_an_effect_of_the_warm_up_alone_is_no_effect(warm_up):
    ratios = log_ratios_of(np.random.default_rng(22), 1000, 6, warm_up=warm_up)
    assert np.mean(t_interval(ratios, 0.05)[2] <= 0.05) <= 0.07
    assert abs(ratios.mean()) < 0.0025
    # And it would have been one without the rule.
    plain = log_ratios_of(np.random.default_rng(22), 250, 6, number=lambda ms: np.median(ms, axis=-1), warm_up=warm_up)
    assert np.mean(t_interval(plain, 0.05)[2] <= 0.05) > 0.3


def test_pooling_steps_would_fail():
    ms = np.log(steps_of(np.random.default_rng(23), 200, 6)).astype(float)
    a, b = (ms[:, :, ARMS == arm].reshape(200, -1) for arm in (0, 1))
    assert np.mean(stats.ttest_ind(a, b, axis=1).pvalue <= 0.05) > 0.6
