"""Which bucket a step is padded to."""

from dataclasses import dataclass

from deltagram.step.plan import Bucket


@dataclass(frozen=True, slots=True)
class ExactBuckets:
    """A bucket of the step's own size: nothing is padded. What an uncaptured step on a CPU wants."""

    def fit(self, tokens: int, sequences: int, mixed: bool) -> Bucket:
        return Bucket(tokens, sequences, mixed)


@dataclass(frozen=True, slots=True)
class Ladder:
    """The smallest bucket of a fixed ladder that holds the step: the captured sizes, or those that test padding."""

    tokens: tuple[int, ...]
    sequences: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, rungs in (("tokens", self.tokens), ("sequences", self.sequences)):
            if not rungs or list(rungs) != sorted(set(rungs)) or rungs[0] < 1:
                raise ValueError(f"a ladder's {name} must be increasing and positive, got {rungs}")

    def fit(self, tokens: int, sequences: int, mixed: bool) -> Bucket:
        return Bucket(_rung(self.tokens, tokens, "tokens"), _rung(self.sequences, sequences, "sequences"), mixed)


def _rung(rungs: tuple[int, ...], size: int, name: str) -> int:
    for rung in rungs:
        if size <= rung:
            return rung
    raise ValueError(f"a step of {size} {name} is larger than the largest bucket, {rungs[-1]}")
