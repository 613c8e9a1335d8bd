"""Speculation: drafts of the tokens to come, which the next step verifies all at once.

A token is a function of the text before it, the seed and its position (engine/sampler.py), so a step samples after
every draft and keeps the drafts that were sampled: what comes out is what would have come without drafts, token by
token, at any temperature. A drafter decides how many steps that takes, and nothing else.

Who drafts:
- prompt lookup: what followed the last tokens where they stood before, in the request's own text;
- a callable of the user's;
- a draft head of the checkpoint's (models/mtp.py), on the device, at the end of each step: the host says how many.

The first two need a request's last token on the host before its next step is planned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from deltagram.engine.request import Request

MAX_DRAFT = 5
PROBE_AFTER = 32  # tokens after which a request that does not draft tries again
SHORTEST, LONGEST = 3, 5  # tokens that prompt lookup compares


class Drafter(Protocol):
    """A user's own drafter."""

    def __call__(self, tokens: Sequence[int], num_draft: int, /) -> Sequence[int]:
        """Up to `num_draft` token ids that may follow `tokens`, a request's prompt and output; none is fine. They may
        be what Python takes for integers (`__index__`), such as numpy's, and lie in an array."""
        ...


class PromptLookup:
    """Where each run of SHORTEST to LONGEST tokens of one text stood last, kept up as the text grows."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._done = SHORTEST

    def __call__(self, tokens: Sequence[int], num_draft: int, /) -> list[int]:
        """What followed the longest run that the text ends with; a period that ends the text goes on and on."""
        for end in range(self._done, len(tokens)):
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                self._ends[tuple(tokens[end - size : end])] = end
        self._done = max(self._done, len(tokens))
        for size in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
            end = self._ends.get(tuple(tokens[-size:]), 0)
            if end:
                period = len(tokens) - end
                return [tokens[end + i % period] for i in range(num_draft)]
        return []


@dataclass(slots=True)
class Gain:
    """What drafts have brought one request: the chance that a draft is accepted if those before it are."""

    chance: float = 0.6  # until it is known better
    quiet: int = 0  # tokens since it drafted

    def learn(self, drafted: int, added: int) -> None:
        """A step verified `drafted` drafts and added `added` tokens. Of drafts after a rejected one nothing is
        learnt."""
        if not drafted:
            self.quiet += added
            return
        self.quiet = 0
        self.chance = _faded(self.chance, 0.9, drafted, added - 1)

    def worth(self, most: int, price: float) -> int:
        """Drafts that gain more than they cost, of at most `most`. `price` is a draft's time, in times of a token
        without drafts. Now and then one is tried all the same."""
        chance = min(max(self.chance, 0.001), 0.999)
        worth = min(most, int(math.log(price) / math.log(chance)))
        return 1 if worth == 0 and self.quiet >= PROBE_AFTER else worth


def _faded(chance: float, keep: float, drafted: int, accepted: int) -> float:
    tried = min(accepted + 1, drafted)
    kept = keep**tried
    return kept * chance + (1 - kept) * accepted / tried


class StepCost:
    """Seconds of a step without prefill by its size: near the fastest that was seen of late, as a step that something
    else on the machine held up says nothing about its size."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def learn(self, tokens: int, seconds: float) -> None:
        known = self._seconds.setdefault(tokens, seconds)
        self._seconds[tokens] += (seconds - known) * (0.5 if seconds < known else 0.03)

    def price(self, sequences: int) -> float:
        """One more token, in times of what a token of a step of `sequences` tokens costs."""
        if len(self._seconds) < 2:
            return 0.2
        least = min(self._seconds)
        known = self._seconds[least]
        more = sum(seconds - known for seconds in self._seconds.values())
        slope = max(more / sum(tokens - least for tokens in self._seconds), 0.0)
        token = max(known - slope * (least - sequences), slope * sequences) / sequences
        return min(max(slope / token, 0.05), 0.95)


class Speculation:
    """Who drafts how much, for the requests of one engine.

    num_draft: the most a step; adaptive: what pays for each request, which may be nothing; drafter: the host's, which
    is PromptLookup or a user's; None for a draft head. What requests have gained is what a new one starts from.
    """

    def __init__(self, num_draft: int, adaptive: bool, drafter: Drafter | type[PromptLookup] | None) -> None:
        self.num_draft, self.adaptive, self.drafter = num_draft, adaptive, drafter
        self.cost = StepCost()
        self.chance = Gain().chance

    def num_wanted(self, request: Request, sequences: int) -> int:
        """Drafts that the request's next step should verify, as one of `sequences`."""
        if request.constraint is not None:  # what may follow a draft is not known before it is the text
            return 0
        return request.gain.worth(self.num_draft, self.cost.price(sequences)) if self.adaptive else self.num_draft

    def propose(self, request: Request, sequences: int, vocab_size: int) -> None:
        """Have the host's drafter set `request.drafts`. Raises what it raises, or ValueError for what are no tokens."""
        request.drafts = ()
        wanted = self.num_wanted(request, sequences)
        if not wanted or self.drafter is None:
            return
        if self.drafter is PromptLookup:
            request.lookup = request.lookup or PromptLookup()
            drafts: Sequence[int] = request.lookup(request.tokens, wanted)
        else:
            assert not isinstance(self.drafter, type)
            drafts = self.drafter(tuple(request.tokens), wanted)
            if hasattr(drafts, "tolist"):  # an array or a tensor, wherever it lies
                drafts = drafts.tolist()
            if not isinstance(drafts, Sequence):  # an iterator may never end
                raise ValueError(f"a drafter must return a sequence of token ids, such as a list, got {drafts!r:.200}")
            drafts = [_token(draft, vocab_size) for draft in drafts]
        request.drafts = _cut(tuple(drafts)[:wanted], request.end_token_ids)

    def learn(self, request: Request, drafted: int, added: int, sequences: int) -> None:
        """A step of `sequences` has verified `drafted` drafts of the request, and added `added` tokens."""
        request.gain.learn(drafted, added)
        if drafted:
            self.chance = _faded(self.chance, 0.98, drafted, added - 1)
        self.follow(request, sequences)

    def begin(self, request: Request) -> None:
        """The request is admitted."""
        if request.num_preemptions == 0:
            request.gain = Gain(self.chance)
        self.follow(request)

    def follow(self, request: Request, sequences: int = 1) -> None:
        """Say whether the host is to see the request's last token before its next step is planned."""
        request.drafts_on_host = self.drafter is not None and self.num_wanted(request, sequences) > 0


def _token(draft: Any, vocab_size: int) -> int:
    token = -1
    if not isinstance(draft, bool):
        with suppress(TypeError):
            token = index(draft)
    if not 0 <= token < vocab_size:
        raise ValueError(f"drafts must be token ids from 0 to {vocab_size - 1}, got {draft!r:.200}")
    return token


def _cut(drafts: tuple[int, ...], end_token_ids: frozenset[int]) -> tuple[int, ...]:
    """Drafts up to the first that would end the request, itself included."""
    ends = (i + 1 for i, token in enumerate(drafts) if token in end_token_ids)
    return drafts[: next(ends, len(drafts))]
