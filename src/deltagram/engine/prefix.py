"""The prefix cache: what was computed for the beginning of one request serves others that begin alike.

A checkpoint is all that a request has after `position` tokens: its pages, which others share and only read, and a copy
of its recurrent states and rings, in a pool of `num_checkpoints` on the device (engine/runner.py). It is used whole or
not at all. Positions are absolute multiples of `unit`, a page, which is 64 tokens or a multiple of 64: so who goes on
from one computes chunks that begin where those of a cold run do. At least one token is left to compute.

A checkpoint is made where a prefill chunk ends, so prefill is cut there: at the longest beginning that an earlier
request had too, and at a prompt's last multiple, where the same prompt again, or a conversation's next turn, goes on.

Beginnings are known by a chain of hashes, a unit at a time, beside the request's salt. Only requests of one salt share.

Eviction: the checkpoint whose last use (a hit, or its making) is longest ago goes first, when the pool is full or a
request needs pages. A page is free once no checkpoint and no request holds it.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from deltagram.attention.cache import PagePool

if TYPE_CHECKING:
    from deltagram.engine.request import Request

MAX_SEEN = 1 << 16  # beginnings that are remembered
Key = tuple[str, bytes]  # the salt, and the hash of all tokens up to a multiple of the unit


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The first `position` tokens of a text: `pages`, and states at `index` of the pool."""

    key: Key
    position: int
    pages: tuple[int, ...]
    index: int

    @property
    def holder(self) -> int:
        """Who holds the pages, for the page pool; requests are not negative."""
        return -1 - self.index


class PrefixCache:
    """Which checkpoints there are. Decides from host state alone; the copies are the runner's.

    hits, restored (tokens), evictions and misses (by reason) count requests as they are admitted. Reasons: "too_short"
    (no whole unit before its last token), "no_entry" (nobody began so), "no_checkpoint" (somebody did, but it was not
    kept), "evicted", "salt" (kept for another salt), "prompt_logits" (asked for, so all is computed).
    """

    def __init__(self, num_checkpoints: int, unit: int, pages: PagePool) -> None:
        self.num_checkpoints, self.unit, self.pages = num_checkpoints, unit, pages
        self._seen: OrderedDict[Key, bool] = OrderedDict()  # whether a checkpoint there was evicted
        self.hits = self.restored = self.evictions = 0
        self.misses: Counter[str] = Counter()
        self.clear()

    def clear(self) -> None:
        """Keep nothing any more. The pages are to be cleared too."""
        self._free = list(range(self.num_checkpoints - 1, -1, -1))
        self._kept: OrderedDict[Key, Checkpoint] = OrderedDict()  # least recently used first
        self._pending: dict[Key, Checkpoint] = {}  # whose step has not ended
        self._digests: Counter[bytes] = Counter()  # of those kept, whatever their salt

    @property
    def num_used(self) -> int:
        """Checkpoints in use."""
        return self.num_checkpoints - len(self._free)

    @property
    def num_evictable_pages(self) -> int:
        """Pages that eviction would free."""
        return 0 if self._pending else self.pages.num_idle

    def find(self, request: Request) -> Checkpoint | None:
        """The longest checkpoint that the request can go on from, to which nothing happens yet."""
        if request.wants_prompt_logits:
            return None
        if request.chain_length != len(request.tokens):
            request.chain = chain(request.tokens[:-1], request.salt, self.unit)
            request.chain_length = len(request.tokens)
        found = (self._kept[key] for key in reversed(request.chain) if key in self._kept)
        return next(found, None)

    def admit(self, request: Request, found: Checkpoint | None) -> None:
        """The request, just admitted, goes on from `found`: it holds the pages now. Without one it begins at 0. Says
        where its prefill is to be cut."""
        if found is not None:
            self._kept.move_to_end(found.key)
            self.pages.share(found.pages, request.id)
            request.pages, request.computed = list(found.pages), found.position
            self.hits += 1
            self.restored += found.position
        else:
            self.misses[self._reason(request)] += 1
        request.cuts = ()
        if request.num_preemptions or request.wants_prompt_logits:  # it is no other's beginning that is seen again
            return
        units = len(request.chain)
        common = next((n for n in range(units, 0, -1) if request.chain[n - 1] in self._seen), 0)
        wanted = {n * self.unit for n in (common, units) if n and request.chain[n - 1] not in self._kept}
        request.cuts = tuple(sorted(position for position in wanted if position > request.computed))
        for key in request.chain:
            self._seen[key] = self._seen.pop(key, False)
        while len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)

    def reserve(self, request: Request) -> tuple[Checkpoint | None, list[int]]:
        """A checkpoint of what the request has computed once the step that is planned has ended, if there is room and
        none yet; and pages freed for it."""
        units, freed = request.computed // self.unit, []
        key = request.chain[units - 1]
        if key in self._kept or key in self._pending:
            return None, []
        if not self._free and self._kept:
            freed = self.evict()
        if not self._free:
            return None, []
        made = Checkpoint(key, request.computed, tuple(request.pages[:units]), self._free.pop())
        self.pages.share(made.pages, made.holder)
        self._pending[key] = made
        return made, freed

    def keep(self, made: Checkpoint) -> None:
        """The step that makes it has ended well: others may use it."""
        del self._pending[made.key]
        self._kept[made.key] = made
        self._digests[made.key[1]] += 1
        self._seen[made.key] = False

    def drop(self, made: Checkpoint) -> list[int]:
        """Its request ended before the step that was to make it; pages that are free now."""
        del self._pending[made.key]
        self._free.append(made.index)
        return self.pages.give_back(made.pages, made.holder)

    def evict(self) -> list[int]:
        """Let the least recently used one go; pages that are free now."""
        key, gone = self._kept.popitem(last=False)
        self._digests -= Counter([key[1]])
        if key in self._seen:
            self._seen[key] = True
        self.evictions += 1
        self._free.append(gone.index)
        return self.pages.give_back(gone.pages, gone.holder)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to evict."""
        return not self._kept

    def check(self) -> None:
        """No checkpoint is half made, and each is in use or free."""
        assert not self._pending, "checkpoints are pending"
        indices = [each.index for each in self._kept.values()] + self._free
        assert sorted(indices) == list(range(self.num_checkpoints)), "checkpoints leaked"
        held = {page for each in self._kept.values() for page in each.pages}
        assert len(held) == self.pages.num_idle == self.pages.num_pages - self.pages.num_free, "pages leaked"

    def _reason(self, request: Request) -> str:
        if request.wants_prompt_logits:
            return "prompt_logits"
        if not request.chain:
            return "too_short"
        known = [self._seen[key] for key in request.chain if key in self._seen]
        if known:
            return "evicted" if any(known) else "no_checkpoint"
        return "salt" if any(self._digests[digest] for _, digest in request.chain) else "no_entry"


def chain(tokens: Sequence[int], salt: str, unit: int) -> list[Key]:
    """The key of each whole number of units that `tokens` begins with."""
    keys: list[Key] = []
    digest = b""
    for end in range(unit, len(tokens) + 1, unit):
        part = np.array(tokens[end - unit : end], np.int32).tobytes()
        digest = hashlib.blake2b(digest + part, digest_size=16).digest()
        keys.append((salt, digest))
    return keys
