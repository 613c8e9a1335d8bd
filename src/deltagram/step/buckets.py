"""Which bucket a step is padded to."""

from bisect import bisect_left
from dataclasses import dataclass

from deltagram.kernels._gates import FEW_ROWS, ROWS_IN_PARTS, SOME_ROWS
from deltagram.step.plan import Bucket

GROWTH = 1.25  # of a rung over the last: a step that lies anywhere between two is padded by 11 % on average
TOKENS = 8  # a rung of a mixed step is a multiple of this, the least that tensor cores take rows by


@dataclass(frozen=True, slots=True)
class ExactBuckets:
    """A bucket of the step's own size: nothing is padded. What an uncaptured step on a CPU wants."""

    max_draft: int = 0

    def fit(
        self, tokens: int, sequences: int, mixed: bool, samples: int | None = None, drafting: bool = True
    ) -> Bucket:
        """`drafting`: whether there are drafts, or some that the last step left."""
        return Bucket(tokens, sequences, mixed, self.max_draft if drafting else 0, samples)


@dataclass(frozen=True, slots=True)
class Ladder:
    """The smallest bucket of a fixed ladder that holds the step: the captured sizes, or those that test padding.

    A tokens-only bucket has a sequence for each token, up to the most there can be, so that one number is its size; a
    mixed one has them all. `decode` are the rungs of the former, `mixed` of the latter.
    """

    decode: tuple[int, ...]
    mixed: tuple[int, ...]
    sequences: int
    max_draft: int = 0

    def __post_init__(self) -> None:
        for name, rungs in (("decode", self.decode), ("mixed", self.mixed)):
            if not rungs or list(rungs) != sorted(set(rungs)) or rungs[0] < 1:
                raise ValueError(f"a ladder's {name} must be increasing and positive, got {rungs}")

    @classmethod
    def of(cls, max_tokens: int, sequences: int, max_draft: int = 0) -> "Ladder":
        """Rungs for every step of up to `max_tokens` tokens, fine enough that little of a step is padding; and one
        where a kernel gives way to another, past which no step should be padded."""
        most = sequences * (1 + max_draft)
        decode = {*_rungs(most, 1), *(gate for gate in (FEW_ROWS, SOME_ROWS, ROWS_IN_PARTS) if gate < most)}
        return cls(tuple(sorted(decode)), _rungs(max_tokens, TOKENS), sequences, max_draft)

    @property
    def buckets(self) -> list[Bucket]:
        """All there are, the largest first."""
        sizes = [(tokens, True) for tokens in self.mixed] + [(tokens, False) for tokens in self.decode]
        return [self._bucket(tokens, mixed) for tokens, mixed in sorted(sizes, reverse=True)]

    def fit(
        self, tokens: int, sequences: int, mixed: bool, samples: int | None = None, drafting: bool = True
    ) -> Bucket:
        """`samples` and `drafting` are not needed: a bucket has room for all that its sequences can have."""
        rungs = self.mixed if mixed else self.decode
        rung = bisect_left(rungs, tokens)
        if rung == len(rungs) or sequences > self.sequences:
            most = f"of {rungs[-1]} tokens and {self.sequences} sequences"
            raise ValueError(f"a step of {tokens} tokens and {sequences} sequences is larger than the largest, {most}")
        return self._bucket(rungs[rung], mixed)

    def _bucket(self, tokens: int, mixed: bool) -> Bucket:
        return Bucket(tokens, min(tokens, self.sequences), mixed, self.max_draft)


def _rungs(most: int, step: int) -> tuple[int, ...]:
    """Multiples of `step` up to the first that is at least `most`, each at most GROWTH times the last where it can."""
    rungs, size = [], 0
    while size < most:
        size = min(max(size + step, int(size * GROWTH) // step * step), -(-most // step) * step)
        rungs.append(size)
    return tuple(rungs)
