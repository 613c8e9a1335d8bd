"""Which requests a step runs, and how much of each: continuous batching over mixed steps.

Every running request that decodes gets its token; what is left of the step's tokens goes to prefill chunks, oldest
request first. A chunk that is not a prompt's last ends on an absolute multiple of 64 tokens. When pages run out, the
youngest running request gives all it owns back and waits, to be computed anew: so the oldest always gets on, and
everything ends.

A step may be planned while the last one runs, whose tokens the host has not seen. Then a request that decodes is
planned on: if that token turns out to end it, what the next step does for it is in vain, and harmless. A request that
cannot go on without its token is left out, and nothing is taken from a request.

Drafts take what is there: a request's drafts never pass its length limit, and nothing is pushed out for them. While
they are unverified the request counts as if all were accepted, so that its pages are there whatever comes; those stay
its own when drafts are rejected.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from deltagram.attention.cache import PagePool
from deltagram.engine.prefix import Checkpoint, PrefixCache
from deltagram.engine.request import FinishReason, Request, Status
from deltagram.engine.speculate import Speculation
from deltagram.gdn.state import SlotPool
from deltagram.step.buckets import ExactBuckets, Ladder
from deltagram.step.plan import CHUNK, Entry, Kind, PageGrant, StepPlan


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A plan, with the requests of its entries, and those that were given a slot for it.

    restored: checkpoints whose states go to requests' slots before the step; saved: states that go to checkpoints after
    it, which count once the step has ended well.
    """

    plan: StepPlan
    requests: tuple[Request, ...]
    admitted: tuple[Request, ...]
    restored: tuple[tuple[Request, Checkpoint], ...] = ()
    saved: tuple[tuple[Request, Checkpoint], ...] = ()


class Scheduler:
    """Owns the queue, the slots and the pages, and says which `prefixes` are kept. Decides from host state alone."""

    def __init__(
        self,
        slots: SlotPool,
        pages: PagePool,
        page_size: int,
        max_num_tokens: int,
        buckets: ExactBuckets | Ladder,
        speculation: Speculation | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        least = CHUNK - 1 + slots.num_slots * (1 + buckets.max_draft)
        assert max_num_tokens >= least, "a chunk must fit beside every other request's tokens"
        self.speculation, self.prefixes = speculation, prefixes
        buckets.fit(max_num_tokens, slots.num_slots, mixed=True)  # refuses a ladder that is too short
        self.slots, self.pages, self.page_size = slots, pages, page_size
        self.max_num_tokens, self.buckets = max_num_tokens, buckets
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.at_hand: list[Request] = []  # whom the step is for that is planned, launched or looked at
        self.freed_pages: list[int] = []  # since the last `take_freed`, for poisoning
        self.freed_slots: list[int] = []
        self.num_preemptions = 0
        self._next_step = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a new request. It must fit the pages when it runs alone: the engine has checked."""
        assert request.status is Status.NEW and self._pages_for(request.max_length) <= self.pages.num_pages
        self.waiting.append(request)
        request.status = Status.WAITING

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request that waits or runs, and free what it owns."""
        waited = request.status is Status.WAITING
        assert waited or request.status is Status.RUNNING
        request.status, request.finish_reason = Status.FINISHED, reason
        if waited:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self._release(request)

    def preempt(self, request: Request) -> None:
        """Take back all that a running request owns; it waits, first in line, and is computed anew."""
        assert request.status is Status.RUNNING
        assert request.in_flight == 0, "a token that is on its way would be lost"
        self._release(request)
        self._forget(request)
        self.waiting.appendleft(request)
        self.running.remove(request)

    def start_over(self) -> None:
        """After a fault, whatever it has left half done: nobody owns anything and nothing is kept for prefixes. Who has
        not ended waits, in the old order, to be computed anew: at every moment such a request is in `waiting` or in
        `running`, or for a moment in both."""
        self.slots.clear()
        self.pages.clear()
        if self.prefixes is not None:
            self.prefixes.clear()
        self.freed_slots, self.freed_pages = list(range(self.slots.num_slots)), list(range(self.pages.num_pages))
        for request in self.running:
            if request.status is not Status.FINISHED:
                self._forget(request)
        everyone = dict.fromkeys((*self.running, *self.waiting))
        self.waiting = deque(request for request in everyone if request.status is not Status.FINISHED)
        self.running.clear()

    def schedule(self, ahead: bool = False) -> Scheduled | None:
        """The next step, or None when there is nothing to run. What it schedules counts as computed from here on.

        `ahead` says that a step still runs: then None means that its tokens are needed first.
        """
        self.at_hand = self.running.copy()
        budget = self.max_num_tokens
        chosen: dict[int, tuple[Request, int]] = {}  # by request id, so that a preempted one drops out
        grants: dict[int, list[PageGrant]] = {}

        def run(request: Request, size: int) -> int:
            """Make room for the request's next `size` tokens and choose it; the tokens taken from the budget."""
            if not self._grow(request, request.computed + size, chosen, grants, may_preempt=not ahead):
                return 0
            chosen[request.id] = request, size
            return size

        for request in list(self.running):
            if request.status is Status.RUNNING and not request.is_prefilling and not self._must_wait(request):
                budget -= run(request, 1 + self._num_drafts(request))
        for request in list(self.running):
            if request.status is Status.RUNNING and request.is_prefilling:
                size = self._chunk(request.computed, self._goal(request), budget)
                budget -= run(request, size) if size else 0
        admitted: list[Request] = []
        restored: list[tuple[Request, Checkpoint]] = []
        while self.waiting and self.slots.num_free:
            request = self.waiting[0]
            self.at_hand.append(request)
            found = self.prefixes.find(request) if self.prefixes else None
            start = found.position if found else 0
            size = self._chunk(start, len(request.tokens), budget)
            if not size or ((self.running or ahead) and self._is_crowded(request, found)):
                break  # others would soon push it out of a crowded pool; it may be one just pushed out
            self.running.append(request)
            self.waiting.popleft()
            self._admit(request, found)
            admitted.append(request)
            if found:
                restored.append((request, found))
            budget -= run(request, self._chunk(start, self._goal(request), budget))
            assert request.id in chosen, "what is admitted has a step"
        if not chosen:
            return None
        return self._plan(list(chosen.values()), grants, tuple(admitted), tuple(restored))

    def _plan(
        self,
        chosen: list[tuple[Request, int]],
        grants: dict[int, list[PageGrant]],
        admitted: tuple[Request, ...],
        restored: tuple[tuple[Request, Checkpoint], ...],
    ) -> Scheduled:
        chosen.sort(key=lambda pair: self._kind(*pair))
        drafting = any(request.drafted for request, _ in chosen)  # what its last step drafted may be pending
        entries = []
        for request, size in chosen:
            entry = self._entry(request, size, len(chosen))
            if entry.wanted:
                grants[request.id] += self._take_pages(request, request.computed + entry.wanted)
            drafting |= entry.num_draft + entry.wanted > 0
            entries.append(entry)
        samples = sum(entry.num_samples for entry in entries)
        mixed = entries[-1].kind is Kind.PREFILL
        bucket = self.buckets.fit(sum(size for _, size in chosen), len(chosen), mixed, samples, drafting)
        requests = tuple(request for request, _ in chosen)
        granted = tuple(chain.from_iterable(grants[request.id] for request in requests))
        plan = StepPlan(self._next_step, bucket, tuple(entries), granted)
        self._next_step += 1
        return Scheduled(plan, requests, admitted, restored, self._saved(requests))

    def retire(self, scheduled: Scheduled, added: Mapping[int, int]) -> None:
        """A step has ended well. `added` has how many tokens it brought each request that it sampled for, by id."""
        for entry, request in zip(scheduled.plan.entries, scheduled.requests, strict=True):
            request.in_flight -= entry.samples
            if request.status is Status.RUNNING and entry.samples:
                request.uncertain -= entry.num_draft
                request.computed -= 1 + entry.num_draft - added[request.id]
                if self.speculation is not None:
                    self.speculation.learn(request, entry.num_draft, added[request.id], len(scheduled.requests))
        for request, checkpoint in scheduled.saved:
            assert self.prefixes is not None
            if request.status is Status.RUNNING:
                self.prefixes.keep(checkpoint)
            else:
                self.freed_pages += self.prefixes.drop(checkpoint)

    def take_freed(self) -> tuple[list[int], list[int]]:
        """Slots and pages freed since the last call."""
        freed = self.freed_slots, self.freed_pages
        self.freed_slots, self.freed_pages = [], []
        return freed

    def check_empty(self) -> None:
        """Nothing runs or waits, and every slot, page and checkpoint is free, or becomes so with the prefix cache."""
        assert not self.has_work
        self.slots.check_empty()
        if self.prefixes is not None:
            self.prefixes.check()
            while not self.prefixes.is_empty:
                self.freed_pages += self.prefixes.evict()
            self.prefixes.check()
        self.pages.check_empty()

    @staticmethod
    def _kind(request: Request, size: int) -> Kind:
        return Kind.PREFILL if request.is_prefilling else Kind.VERIFY if size > 1 else Kind.DECODE

    def _entry(self, request: Request, size: int, sequences: int) -> Entry:
        start, slot, kind, uncertain = request.computed, request.slot, self._kind(request, size), request.uncertain
        drafts = 0 if kind is Kind.PREFILL else size - 1
        given, request.drafts = request.drafts[:drafts], ()
        request.computed += size
        request.uncertain += drafts
        request.drafted = drafts
        last = request.computed >= request.prefill_target
        request.in_flight += last
        wanted = request.num_draft = self._wanted(request, sequences) if last else 0
        return Entry(slot, request.generation, slot, kind, size, start, drafts, last, uncertain, given, wanted)

    def _num_drafts(self, request: Request) -> int:
        """Drafts that the next step of a request that decodes verifies."""
        drafts = max(len(request.drafts), request.num_draft)
        return self._drafts_that_fit(request, drafts, request.computed + 1) if drafts else 0

    def _wanted(self, request: Request, sequences: int) -> int:
        """Drafts that a draft head leaves for the step after the one that `computed` counts already."""
        if self.speculation is None or self.speculation.drafter is not None:
            return 0
        return self._drafts_that_fit(request, self.speculation.num_wanted(request, sequences), request.computed + 1)

    def _drafts_that_fit(self, request: Request, drafts: int, known: int) -> int:
        """As many of the drafts after `known` tokens as the length limit and the free pages allow."""
        drafts = min(drafts, request.max_length - known - 1)
        if self._pages_for(known + drafts) - len(request.pages) > self.pages.num_free:
            drafts = min(drafts, (len(request.pages) + self.pages.num_free) * self.page_size - known)
        return max(drafts, 0)

    def _saved(self, requests: tuple[Request, ...]) -> tuple[tuple[Request, Checkpoint], ...]:
        saved = []
        for request in requests:
            if self.prefixes is not None and request.computed in request.cuts:
                checkpoint, freed = self.prefixes.reserve(request)
                self.freed_pages += freed
                if checkpoint is not None:
                    saved.append((request, checkpoint))
        return tuple(saved)

    def _must_wait(self, request: Request) -> bool:
        """Whether a request that decodes has nothing to run before the host has seen the token that is on its way."""
        return request.needs_last_token or request.computed + 1 >= request.max_length

    def _goal(self, request: Request) -> int:
        """Where the request's next chunk ends, if it fits: its prefill's end, or a place where it is to be cut."""
        return next((cut for cut in request.cuts if cut > request.computed), request.prefill_target)

    def _chunk(self, start: int, target: int, budget: int) -> int:
        """Tokens of the next chunk after `start`, on the way to `target`, within `budget`; 0 if none fits."""
        if target - start <= budget:
            return target - start
        return max((start + budget) // CHUNK * CHUNK - start, 0)

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _grow(
        self,
        request: Request,
        num_tokens: int,
        chosen: dict[int, tuple[Request, int]],
        grants: dict[int, list[PageGrant]],
        may_preempt: bool,
    ) -> bool:
        """Pages for the request's first `num_tokens`, taken from the prefix cache and then, if they may be, from the
        youngest requests; False if there are none, or it lost its own."""
        while self._pages_for(num_tokens) - len(request.pages) > self.pages.num_free:
            if self.prefixes is not None and not self.prefixes.is_empty:
                self.freed_pages += self.prefixes.evict()
                continue
            if not may_preempt:
                return False
            youngest = self.running[-1]
            chosen.pop(youngest.id, None)
            self.preempt(youngest)
            if youngest is request:
                return False
        grants[request.id] = self._take_pages(request, num_tokens)
        return True

    def _take_pages(self, request: Request, num_tokens: int) -> list[PageGrant]:
        granted = []
        while len(request.pages) < self._pages_for(num_tokens):
            page = self.pages.take(request.id)
            granted.append(PageGrant(request.slot, len(request.pages), page))
            request.pages.append(page)
        return granted

    def _is_crowded(self, request: Request, found: Checkpoint | None) -> bool:
        """Whether the waiting request, which goes on from `found`, would want pages that the running ones will, or that
        checkpoints hold which are not made yet."""
        free = self.pages.num_free + (self.prefixes.num_evictable_pages if self.prefixes else 0)
        owed = sum(max(self._pages_for(max(len(r.tokens), r.computed + 1) + 1) - len(r.pages), 0) for r in self.running)
        shared = sum(not self.pages.is_idle(page) for page in found.pages) if found else 0
        return self._pages_for(len(request.tokens) + 1) - shared > free - owed

    def _admit(self, request: Request, found: Checkpoint | None) -> None:
        request.slot = self.slots.take(request.id, found.position if found else 0)
        request.generation = self.slots.generation[request.slot]
        request.prefill_target = len(request.tokens)
        request.status = Status.RUNNING
        if self.prefixes is not None:
            self.prefixes.admit(request, found)
        if self.speculation is not None:
            self.speculation.begin(request)

    def _release(self, request: Request) -> None:
        self.slots.give_back(request.slot, request.id)
        self.freed_pages += self.pages.give_back(request.pages, request.id)
        self.freed_slots.append(request.slot)
        request.slot, request.pages = -1, []

    def _forget(self, request: Request) -> None:
        """It waits, and nothing of it is computed."""
        request.slot, request.pages = -1, []
        request.status, request.computed, request.uncertain, request.in_flight = Status.WAITING, 0, 0, 0
        request.drafts, request.drafted, request.num_draft = (), 0, 0
        request.prompt_logits.clear()
        request.num_preemptions += 1
        self.num_preemptions += 1
