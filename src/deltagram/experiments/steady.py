"""The steady-state rule: which steps of a launch count, decided from that launch alone and before any comparison.

The first `warmup` steps go, and then as many more as make the mean of the rest most certain: the truncation point that
minimises var(rest) / len(rest) (the marginal standard error rule, White 1997), taken on medians of 5 consecutive steps
so that one slow step does not move it, and never past half of the steps. What only happens while one arm warms up is
then no part of that arm's number, which is the median of what is left.
"""

from dataclasses import dataclass

import numpy as np

GROUP = 5


@dataclass(frozen=True)
class Steady:
    """One launch's number and what stands beside it; milliseconds, over the steps kept."""

    median: float
    mean: float
    p95: float
    first: int  # index of the first step kept
    kept: int
    drift: float  # median of the later half of the kept steps over that of the earlier half, less 1


def truncation(steps: np.ndarray, warmup: int = 0) -> np.ndarray:
    """Index of the first steady step along the last axis of [..., T]: [...] int64, at most (T + warmup) / 2."""
    rest = steps[..., warmup:]
    groups = rest.shape[-1] // GROUP
    if groups < 4:
        return np.full(steps.shape[:-1], warmup)
    medians = np.median(rest[..., : groups * GROUP].reshape(*rest.shape[:-1], groups, GROUP), axis=-1)
    medians = medians - medians[..., -1:]  # the sums of squares below lose no digits to a large common part
    tail = np.cumsum(medians[..., ::-1], axis=-1)[..., ::-1]  # sums over groups d..
    tail_of_squares = np.cumsum(medians[..., ::-1] ** 2, axis=-1)[..., ::-1]
    count = np.arange(groups, 0, -1)
    certainty = (tail_of_squares - tail**2 / count) / count**2
    return warmup + GROUP * np.argmin(certainty[..., : groups // 2 + 1], axis=-1)


def steady_state(steps: np.ndarray, warmup: int = 0) -> Steady:
    """Summarise the steps [T] of one launch, in milliseconds. Raises ValueError when fewer than 2 remain."""
    if len(steps) - warmup < 2:
        raise ValueError(f"{len(steps)} steps with a warm-up of {warmup}; expected at least 2 steps after it")
    first = int(truncation(steps, warmup))
    kept = steps[first:]
    early, late = np.array_split(kept, 2)
    return Steady(
        median=float(np.median(kept)),
        mean=float(kept.mean()),
        p95=float(np.percentile(kept, 95)),
        first=first,
        kept=len(kept),
        drift=float(np.median(late) / np.median(early)) - 1.0,
    )
