"""The paired test: block log-ratios, their t interval, an exact sign-flip test, Holm over cells, and the verdict.

One launch gives one number, one block (ABBA or BAAB) one log-ratio

    y = mean(log A) - mean(log B)   when lower is better (a time),   the negative when higher is better (a throughput)

so y > 0 says B is faster, `exp(y) - 1` is by how much, and what a block has in common cancels. The interval is
`mean(y) +- t(n - 1) s / sqrt(n)` over n blocks; steps are never pooled, since the launch is what is repeated. A cell is

    faster, slower    its interval excludes 0
    equivalent        otherwise, and its interval lies inside +-log(1 + margin)
    unresolved        otherwise: the half-width of the interval is the resolution reached

With several looks the interval is a repeated confidence interval (Jennison and Turnbull 1989), so it may be read at
every planned look; with several cells its level is the one at which Holm's step-down (1979) judged the cell. The
verdict is read off the printed interval, so the two cannot disagree. The sign-flip p-value stands beside it as a check
that assumes symmetry instead of normality; it cannot go below 2^(1-n).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import expm1, inf, log, sqrt

import numpy as np
from scipy.optimize import brentq
from scipy.stats import chi2, norm
from scipy.stats import t as student

from deltagram.experiments.spending import SPENDINGS, nominal_levels, repeated_p_value

Block = tuple[float | Sequence[float], float | Sequence[float]]  # what arm A gave, what arm B gave
SIGN_FLIP_BLOCKS = 40  # exact up to here: 2^20 half sums
_QUANTILES = (np.arange(4000) + 0.5) / 4000


def t_interval(log_ratios: np.ndarray, level: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, half-width at two-sided `level` (0.05 gives 95 %) and p-value over the last axis of [..., n], n >= 2."""
    n = log_ratios.shape[-1]
    mean = log_ratios.mean(-1)
    error = log_ratios.std(-1, ddof=1) / sqrt(n)
    # Blocks that agree to the last bit leave no error: any mean but 0 is then certain.
    statistic = np.divide(np.abs(mean), error, out=np.where(mean == 0.0, 0.0, np.inf), where=error > 0.0)
    return mean, student.isf(level / 2.0, n - 1) * error, 2.0 * student.sf(statistic, n - 1)


def sign_flip_p_value(log_ratios: np.ndarray) -> float | None:
    """Exact two-sided p-value of the mean of [n] under random signs; None beyond 40 blocks.

    All 2^n sums are counted by meeting in the middle: each sum is one of the left half plus one of the right half.
    """
    n = len(log_ratios)
    if n > SIGN_FLIP_BLOCKS:
        return None
    halves = []
    for half in (log_ratios[: n // 2], log_ratios[n // 2 :]):
        sums = np.zeros(1)
        for value in half:
            sums = np.concatenate([sums + value, sums - value])
        halves.append(np.sort(sums))
    left, right = halves
    bound = abs(log_ratios.sum()) - 1e-12 * np.abs(log_ratios).sum()  # ties count, whatever the order of addition
    upper = len(right) - np.searchsorted(right, bound - left, side="left")
    lower = np.searchsorted(right, -bound - left, side="right")
    return min(1.0, float((upper + lower).sum()) / 2.0**n)


def half_width(blocks: int, block_sd: float, level: float = 0.05) -> float:
    """Expected-size half-width, in log-ratio, of the interval over `blocks` blocks with that standard deviation."""
    return float(student.isf(level / 2.0, blocks - 1)) * block_sd / sqrt(blocks)


def power(effect: float, blocks: int, block_sd: float, level: float = 0.05) -> float:
    """Probability that the two-sided t-test over `blocks` finds a true log-ratio `effect`.

    The noncentral t probability, as the normal one averaged over the chi-square of the estimated standard deviation.
    """
    if block_sd == 0.0:
        return float(effect != 0.0)
    shift = effect / block_sd * sqrt(blocks)
    bounds = student.isf(level / 2.0, blocks - 1) * np.sqrt(chi2.ppf(_QUANTILES, blocks - 1) / (blocks - 1))
    return float((norm.sf(bounds - shift) + norm.cdf(-bounds - shift)).mean())


def detectable(blocks: int, block_sd: float, level: float = 0.05, at_power: float = 0.8) -> float:
    """The log-ratio that `blocks` blocks find with probability `at_power`."""
    most = 4.0 * half_width(blocks, block_sd, level) + 4.0 * block_sd  # at the largest estimate of the deviation
    return float(brentq(lambda effect: power(effect, blocks, block_sd, level) - at_power, 0.0, most)) if most else 0.0


@dataclass(frozen=True)
class PairedResult:
    """What one cell's blocks say. Effects are fractions of A's time: 0.02 says B is 2 % faster."""

    verdict: str  # faster, slower, equivalent or unresolved
    log_ratios: tuple[float, ...]  # one per block; above 0 where B was faster
    mean: float  # of the log-ratios
    half: float  # half-width of the interval, in log-ratio
    level: float  # two-sided level of the interval over all looks and cells: 0.05 gives 95 %
    nominal_level: float  # what this look may use of it
    p_value: float  # of the t-test at this look; repeated over the looks when there are several
    sign_flip_p_value: float | None
    margin: float

    @property
    def blocks(self) -> int:
        return len(self.log_ratios)

    @property
    def block_sd(self) -> float:
        """Standard deviation of the block log-ratios."""
        return float(np.std(self.log_ratios, ddof=1))

    @property
    def speedup(self) -> float:
        return fraction(self.mean)

    @property
    def interval(self) -> tuple[float, float]:
        return fraction(self.mean - self.half), fraction(self.mean + self.half)

    @property
    def resolution(self) -> float:
        """Half-width of the interval: what this many blocks can tell from nothing."""
        return fraction(self.half)

    @property
    def below_margin(self) -> bool:
        """The whole interval lies inside the margin (a difference may be real and still too small to matter)."""
        return abs(self.mean) + self.half < log(1.0 + self.margin)

    @cached_property
    def detectable(self) -> float:
        """Effect that this many blocks with this spread find four times in five."""
        return fraction(detectable(self.blocks, self.block_sd, self.nominal_level))

    @cached_property
    def power_at_margin(self) -> float:
        """Chance that this many blocks with this spread find an effect as large as the margin."""
        return power(log(1.0 + self.margin), self.blocks, self.block_sd, self.nominal_level)

    def blocks_to_tell(self, limit: int = 10_000) -> tuple[int | None, int | None]:
        """Blocks of a fresh run with one look that would show (a difference, equivalence), mean and spread staying so.

        None: not within `limit` blocks; for equivalence also when the mean lies outside the margin.
        """
        counts = np.arange(2, limit + 1)
        widths = student.isf(self.level / 2.0, counts - 1) * self.block_sd / np.sqrt(counts)
        answers: list[int | None] = []
        for enough in (widths < abs(self.mean), widths < log(1.0 + self.margin) - abs(self.mean)):
            answers.append(int(counts[np.argmax(enough)]) if enough.any() else None)
        return answers[0], answers[1]


def paired_test(
    blocks: Iterable[Block],
    margin: float,
    *,
    better: str = "lower",
    alpha: float = 0.05,
    looks: Sequence[int] | None = None,
    spending: str = "obrien-fleming",
) -> PairedResult:
    """Decide from paired blocks whether B is faster than A.

    blocks: one (A, B) per block, each a number or the numbers of its launches, all above 0. margin: the smallest
    relative difference that matters (0.01 is 1 %). looks: the block counts planned for looking, when there were
    several; the number of blocks must be one of them. Raises ValueError with every problem found.
    """
    return paired_tests({"": blocks}, margin, better=better, alpha=alpha, looks=looks, spending=spending)[""]


def paired_tests(
    cells: Mapping[str, Iterable[Block]],
    margin: float,
    *,
    better: str = "lower",
    alpha: float = 0.05,
    looks: Sequence[int] | None = None,
    spending: str = "obrien-fleming",
) -> dict[str, PairedResult]:
    """`paired_test` for several cells at once, Holm's step-down keeping the error over all of them at `alpha`."""
    listed = {name: list(blocks) for name, blocks in cells.items()}
    _check(listed, margin, better, alpha, looks, spending)
    sign = 1.0 if better == "lower" else -1.0
    ratios = {name: sign * log_ratios(blocks) for name, blocks in listed.items()}
    plans = {name: tuple(looks) if looks else (len(y),) for name, y in ratios.items()}
    p_values = {}
    for name, y in ratios.items():
        look = plans[name].index(len(y))
        p_values[name] = repeated_p_value(float(t_interval(y, alpha)[2]), plans[name], look, spending)
    results: dict[str, PairedResult] = {}
    left = len(ratios)
    for name in sorted(p_values, key=lambda name: p_values[name]):
        y, level = ratios[name], alpha / left
        nominal = nominal_levels(plans[name], level, spending)[plans[name].index(len(y))]
        mean, half, _ = (float(value) for value in t_interval(y, nominal))
        results[name] = PairedResult(
            verdict(mean, half, margin), tuple(y.tolist()), mean, half, level, nominal, p_values[name],
            sign_flip_p_value(y), margin,
        )  # fmt: skip
        if abs(mean) > half:  # rejected: the cells after it share alpha among fewer
            left -= 1
    return {name: results[name] for name in listed}


def verdict(mean: float, half: float, margin: float) -> str:
    """The word for the interval `mean +- half`, in log-ratio."""
    if abs(mean) > half:
        return "faster" if mean > 0.0 else "slower"
    return "equivalent" if abs(mean) + half < log(1.0 + margin) else "unresolved"


def fraction(log_ratio: float) -> float:
    """The relative difference of a log-ratio; infinite where an early look with hardly any alpha has no bound."""
    return expm1(log_ratio) if log_ratio < 700.0 else inf


def log_ratios(blocks: Sequence[Block]) -> np.ndarray:
    """mean(log A) - mean(log B) of each block: [n] float64."""
    return np.array([np.log(np.atleast_1d(a)).mean() - np.log(np.atleast_1d(b)).mean() for a, b in blocks])


def _check(
    cells: Mapping[str, Sequence[Block]],
    margin: float,
    better: str,
    alpha: float,
    looks: Sequence[int] | None,
    spending: str,
) -> None:
    problems = []
    if not 0.0 < margin < 1.0:
        problems.append(f"margin is {margin!r}; expected a fraction between 0 and 1, such as 0.01 for 1 %")
    if better not in ("lower", "higher"):
        problems.append(f"better is {better!r}; expected 'lower' or 'higher'")
    if not 0.0 < alpha < 0.5:
        problems.append(f"alpha is {alpha!r}; expected a fraction between 0 and 0.5")
    if spending not in SPENDINGS:
        problems.append(f"spending is {spending!r}; expected one of {', '.join(SPENDINGS)}")
    if not cells:
        problems.append("there are no cells; expected at least one")
    if looks is not None and (not looks or list(looks) != sorted(set(looks)) or looks[0] < 2):
        problems.append(f"looks is {list(looks)!r}; expected increasing block counts from 2 up")
    for name, blocks in cells.items():
        where = f"cell {name!r}: " if name else ""
        if len(blocks) < 2:
            problems.append(f"{where}{len(blocks)} blocks; an interval needs at least 2")
        elif looks and len(blocks) not in looks:
            problems.append(f"{where}{len(blocks)} blocks, which is none of the planned looks {list(looks)}")
        for index, block in enumerate(blocks):
            values = np.concatenate([np.atleast_1d(np.asarray(side, dtype=float)) for side in block])
            if len(block) != 2 or not len(values) or not (np.isfinite(values).all() and (values > 0.0).all()):
                problems.append(f"{where}block {index} is {block!r}; expected (A, B), all numbers finite and above 0")
    if problems:
        raise ValueError("cannot test these blocks:\n  " + "\n  ".join(problems))
