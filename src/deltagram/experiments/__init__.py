"""Speed claims as experiments: paired launches, a test, a verdict. See docs/experiments.md.

    from deltagram.experiments import paired_test

    result = paired_test([(10.2, 9.9), (10.1, 9.9), ...], margin=0.01)   # (A, B) of each block, in any unit of time
    result.verdict, result.speedup, result.interval

The names are imported on first use: what a launch runs from this folder needs no scipy.
"""

from typing import TYPE_CHECKING, Any

__all__ = ["PairedResult", "paired_test", "paired_tests"]

if TYPE_CHECKING:
    from deltagram.experiments.stats import PairedResult, paired_test, paired_tests


def __getattr__(name: str) -> Any:
    if name in __all__:
        from deltagram.experiments import stats

        return getattr(stats, name)
    raise AttributeError(f"module 'deltagram.experiments' has no attribute {name!r}")
