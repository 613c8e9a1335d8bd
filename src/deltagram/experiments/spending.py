"""Alpha spending: how much error each planned look may use, and the boundary that uses exactly that.

Under no effect the standardised sums at looks 1..K behave as a Brownian motion W seen at the information fractions
t_k = n_k / N. A spending function alpha*(t) fixes how much two-sided error may be used by t; the boundary c_k solves

    P(|W(t_j)| < c_j sqrt(t_j) for j < k, |W(t_k)| >= c_k sqrt(t_k)) = alpha*(t_k) - alpha*(t_{k-1})

by integrating the density of the paths still running from look to look (Armitage, McPherson and Rowe 1969; Lan and
DeMets 1983). A look at n_k blocks then compares a two-sided t p-value with `2 (1 - Phi(c_k))`: the significance-level
approach (Jennison and Turnbull 1999, section 4.4), which carries the normal boundary over to few blocks.
"""

from functools import lru_cache
from math import e, exp, log, log1p, sqrt

import numpy as np
from scipy.optimize import brentq
from scipy.stats import norm

SPENDINGS = ("obrien-fleming", "pocock")
_POINTS = 201  # Simpson points across the region still running: boundary error below 1e-6
_SIMPSON = np.where(np.arange(_POINTS) % 2, 4.0, 2.0) / 3.0
_SIMPSON[[0, -1]] = 1.0 / 3.0


def spent(fraction: float, alpha: float, spending: str) -> float:
    """Two-sided error that may be used by information `fraction` in (0, 1]; equals `alpha` at 1."""
    if spending == "obrien-fleming":
        return float(4.0 * norm.sf(norm.isf(alpha / 4.0) / sqrt(fraction)))
    return alpha * log1p((e - 1.0) * fraction)


@lru_cache(maxsize=4096)
def nominal_levels(looks: tuple[int, ...], alpha: float, spending: str) -> tuple[float, ...]:
    """Two-sided significance level of each look such that all looks together use `alpha`.

    looks: block counts, increasing; the last one is the planned total. One look gives `(alpha,)`.
    """
    assert spending in SPENDINGS and list(looks) == sorted(set(looks)) and 0.0 < alpha < 1.0
    fractions = [n / looks[-1] for n in looks]
    levels: list[float] = []
    used = previous = 0.0
    points, mass = np.zeros(1), np.ones(1)  # where the paths still running stand, and with what probability
    for fraction in fractions:
        increment = spent(fraction, alpha, spending) - used
        step = sqrt(fraction - previous)
        bound = float(brentq(_excess, 1e-9, 40.0, args=(points, mass, step, increment), xtol=1e-12))
        grid = np.linspace(-bound, bound, _POINTS)
        mass = (norm.pdf(grid[:, None] - points[None, :], scale=step) @ mass) * _SIMPSON * (grid[1] - grid[0])
        levels.append(float(2.0 * norm.sf(bound / sqrt(fraction))))
        points, used, previous = grid, used + increment, fraction
    return tuple(levels)


def repeated_p_value(p_value: float, looks: tuple[int, ...], look: int, spending: str) -> float:
    """The smallest total alpha at which look number `look` (from 0) with this nominal `p_value` would stop.

    Small at any look with probability at most that alpha, so it may be compared with a level at every look
    (and stepped down over cells by Holm). With one look it is `p_value` itself.
    """
    if len(looks) == 1 or p_value >= 1.0:
        return p_value

    target = log(max(p_value, 1e-300))

    def gap(log_alpha: float) -> float:
        return log(nominal_levels(looks, exp(log_alpha), spending)[look]) - target

    low, high = log(1e-12), log(0.999)
    if gap(low) >= 0.0:
        return exp(low)
    if gap(high) <= 0.0:
        return 1.0
    return exp(brentq(gap, low, high, xtol=1e-6))


def _excess(bound: float, points: np.ndarray, mass: np.ndarray, step: float, increment: float) -> float:
    """Probability that a running path ends beyond +-bound after a normal step, less the increment wanted."""
    return float(mass @ (norm.sf((bound - points) / step) + norm.cdf((-bound - points) / step))) - increment
