"""The paired test against published boundaries, brute force, scipy, and itself."""

from itertools import product

import numpy as np
import pytest
from scipy import stats

from deltagram.experiments import paired_test, paired_tests
from deltagram.experiments.spending import nominal_levels, repeated_p_value
from deltagram.experiments.stats import detectable, half_width, log_ratios, power, sign_flip_p_value, t_interval

RNG = np.random.default_rng


def blocks_of(ratios):
    """Blocks whose log-ratios are `ratios`, whatever the block has in common."""
    return [(np.exp([0.5 * i + r, 0.5 * i + r]), np.exp([0.5 * i, 0.5 * i])) for i, r in enumerate(ratios)]


@pytest.mark.parametrize(
    ("spending", "bounds"),
    [
        # Lan and DeMets (1983) two-sided 0.05 boundaries at equal fractions, as tabulated for group sequential designs.
        ("obrien-fleming", {2: (2.963, 1.969), 5: (4.877, 3.357, 2.680, 2.290, 2.031)}),
        ("pocock", {2: (2.157, 2.201), 5: (2.438, 2.427, 2.410, 2.397, 2.386)}),
    ],
)
def test_boundaries_are_the_published_ones(spending, bounds):
    for looks, expected in bounds.items():
        levels = nominal_levels(tuple(range(1, looks + 1)), 0.05, spending)
        assert stats.norm.isf(np.array(levels) / 2) == pytest.approx(expected, abs=1.5e-3)


def test_one_look_spends_everything():
    assert nominal_levels((6,), 0.05, "pocock") == pytest.approx((0.05,), abs=1e-9)
    assert repeated_p_value(0.0123, (6,), 0, "obrien-fleming") == 0.0123


@pytest.mark.parametrize("spending", ["obrien-fleming", "pocock"])
def test_a_repeated_p_value_is_the_alpha_that_would_just_stop(spending):
    looks = (4, 6, 9)
    for look in range(3):
        for p in (1e-5, 0.003, 0.04, 0.3):
            alpha = repeated_p_value(p, looks, look, spending)
            assert nominal_levels(looks, alpha, spending)[look] == pytest.approx(p, rel=1e-4)


def test_the_t_interval_is_scipys():
    y = RNG(1).normal(0.01, 0.02, (50, 7))
    mean, half, p = t_interval(y, 0.05)
    for row, m, h, q in zip(y, mean, half, p, strict=True):
        expected = stats.ttest_1samp(row, 0.0)
        assert q == pytest.approx(expected.pvalue)
        assert (m - h, m + h) == pytest.approx(tuple(expected.confidence_interval(0.95)))


@pytest.mark.parametrize("n", [1, 2, 5, 8, 11])
def test_sign_flips_are_counted_exactly(n):
    y = RNG(n).normal(0.3, 1.0, n)
    sums = np.array([np.dot(signs, y) for signs in product((1, -1), repeat=n)])
    assert sign_flip_p_value(y) == pytest.approx(np.mean(np.abs(sums) >= abs(y.sum()) - 1e-12))


def test_sign_flip_needs_six_blocks_for_five_percent_and_gives_up_past_forty():
    assert sign_flip_p_value(np.arange(1.0, 6.0)) == 2 / 2**5 > 0.05
    assert sign_flip_p_value(np.arange(1.0, 7.0)) == 2 / 2**6 < 0.05
    assert sign_flip_p_value(np.full(40, 1.0)) == pytest.approx(2 / 2**40, rel=1e-9)
    assert sign_flip_p_value(np.zeros(8)) == 1.0
    assert sign_flip_p_value(np.ones(41)) is None


def test_power_is_the_noncentral_t_and_its_inverse_is_detectable():
    for n, effect in product((3, 6, 10), (0.004, 0.01, 0.02)):
        critical, shift = stats.t.isf(0.025, n - 1), effect / 0.01 * np.sqrt(n)
        expected = stats.nct.sf(critical, n - 1, shift) + stats.nct.cdf(-critical, n - 1, shift)
        assert power(effect, n, 0.01) == pytest.approx(expected, abs=1e-4)
    # Spread of 1 %: 2.1, 1.4 and 1.0 % are found four times in five with 4, 6 and 10 blocks.
    assert [round(100 * detectable(n, 0.01), 1) for n in (4, 6, 10)] == [2.1, 1.4, 1.0]
    assert power(detectable(6, 0.013, 0.003), 6, 0.013, 0.003) == pytest.approx(0.8, abs=1e-6)
    assert half_width(6, 0.01) == pytest.approx(stats.t.isf(0.025, 5) * 0.01 / np.sqrt(6))


def test_a_block_is_a_log_ratio_and_direction_follows_better():
    assert log_ratios([(2.0, 1.0), ([1.0, 4.0], [2.0, 2.0])]) == pytest.approx([np.log(2), 0.0])
    times = [(10.0, 9.8), (10.4, 10.1), (9.9, 9.75), (10.1, 9.9)]
    faster = paired_test(times, 0.01)
    assert faster.verdict == "faster" and 0.015 < faster.speedup < 0.03
    rates = paired_test([(1 / a, 1 / b) for a, b in times], 0.01, better="higher")
    assert rates.interval == pytest.approx(faster.interval) and rates.verdict == "faster"
    assert paired_test([(b, a) for a, b in times], 0.01).verdict == "slower"


@pytest.mark.parametrize(
    ("ratios", "margin", "verdict"),
    [
        ([0.03, 0.031, 0.029, 0.03], 0.01, "faster"),
        ([-0.03, -0.031, -0.029, -0.03], 0.01, "slower"),
        ([0.001, -0.001, 0.0005, -0.0006], 0.01, "equivalent"),
        ([0.02, -0.02, 0.01, 0.005], 0.01, "unresolved"),
        ([0.0, 0.0, 0.0], 0.01, "equivalent"),
        ([0.002, 0.002, 0.002], 0.01, "faster"),  # no spread at all: certain, and still below the margin
    ],
)
def test_verdicts(ratios, margin, verdict):
    result = paired_test(blocks_of(ratios), margin)
    assert result.verdict == verdict
    if verdict == "faster":
        assert result.below_margin == (result.interval[1] < margin)


def test_the_verdict_can_be_read_off_the_printed_interval():
    rng = RNG(5)
    for _ in range(60):
        looks = [(6,), (4, 6), (3, 6, 9)][rng.integers(3)]
        n = int(rng.choice(looks))
        cells = {f"c{i}": blocks_of(rng.normal(rng.choice([0.0, 0.01]), 0.008, n)) for i in range(rng.integers(1, 4))}
        for result in paired_tests(cells, 0.012, looks=looks).values():
            low, high = result.interval
            if result.verdict in ("faster", "slower"):
                assert low > 0 if result.verdict == "faster" else high < 0
            else:
                assert low <= 0 <= high
                assert (result.verdict == "equivalent") == (
                    np.log1p(high) < np.log1p(0.012) and np.log1p(low) > -np.log1p(0.012)
                )


def test_holm_is_the_textbook_step_down():
    rng = RNG(7)
    for _ in range(40):
        cells = {f"c{i}": blocks_of(rng.normal(rng.choice([0.0, 0.01]), 0.008, 6)) for i in range(5)}
        p = {name: stats.ttest_1samp(log_ratios(blocks), 0.0).pvalue for name, blocks in cells.items()}
        rejected = set()
        for i, name in enumerate(sorted(p, key=p.get)):
            if p[name] > 0.05 / (5 - i):
                break
            rejected.add(name)
        results = paired_tests(cells, 0.001)
        assert {name for name, result in results.items() if result.verdict in ("faster", "slower")} == rejected
        for name, result in results.items():  # the cells left over are judged where the step-down stopped
            if name not in rejected:
                assert result.level == pytest.approx(0.05 / (5 - len(rejected)))


def test_an_early_look_is_wider_and_the_last_one_hardly():
    ratios = RNG(3).normal(0.0, 0.01, 8)
    early = paired_test(blocks_of(ratios[:4]), 0.01, looks=(4, 8))
    last = paired_test(blocks_of(ratios), 0.01, looks=(4, 8))
    assert early.half > 1.5 * paired_test(blocks_of(ratios[:4]), 0.01).half
    assert 1.0 < last.half / paired_test(blocks_of(ratios), 0.01).half < 1.05


def test_what_would_resolve_an_unresolved_cell():
    ratios = [0.02, -0.012, 0.01, 0.002]
    result = paired_test(blocks_of(ratios), 0.01)
    difference, equivalence = result.blocks_to_tell()
    mean, sd = np.mean(ratios), np.std(ratios, ddof=1)

    def width(n):
        return stats.t.isf(0.025, n - 1) * sd / np.sqrt(n)

    assert width(difference) < mean <= width(difference - 1)
    assert width(equivalence) + mean < np.log(1.01) <= width(equivalence - 1) + mean
    assert paired_test(blocks_of(np.array(ratios) + 0.01), 0.01).blocks_to_tell()[1] is None  # outside the margin


def test_an_interval_without_bounds_does_not_overflow():
    result = paired_test(blocks_of([0.3, -0.2]), 0.01, looks=(2, 12))
    assert result.verdict == "unresolved" and result.interval[1] == np.inf and result.detectable == np.inf


def test_every_problem_is_named_at_once():
    with pytest.raises(ValueError) as error:
        paired_tests(
            {"a": [(1.0, 2.0)], "b": [(1.0, -2.0), (1.0, float("nan")), (1.0, 1.0)]},
            1.5, better="sideways", alpha=0.7, looks=(6, 4), spending="all",
        )  # fmt: skip
    for part in ("margin is 1.5", "better is 'sideways'", "alpha is 0.7", "looks is [6, 4]", "spending is 'all'",
                 "cell 'a': 1 blocks", "cell 'b': block 0", "cell 'b': block 1"):  # fmt: skip
        assert part in str(error.value)
    with pytest.raises(ValueError, match="none of the planned looks"):
        paired_test([(1.0, 2.0)] * 5, 0.01, looks=(4, 6))
    with pytest.raises(ValueError, match="no cells"):
        paired_tests({}, 0.01)
