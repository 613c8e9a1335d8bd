"""Speed claims as experiments: paired launches, a test, a verdict. See docs/experiments.md.

from deltagram.experiments import paired_test

result = paired_test([(10.2, 9.9), (10.1, 9.9), ...], margin=0.01)   # (A, B) of each block, in any unit of time
result.verdict, result.speedup, result.interval
"""

from deltagram.experiments.stats import PairedResult, paired_test, paired_tests

__all__ = ["PairedResult", "paired_test", "paired_tests"]
