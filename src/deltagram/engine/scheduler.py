"""Which requests a step runs, and how much of each: continuous batching over mixed steps.

Every running request that decodes gets its token; what is left of the step's tokens goes to prefill chunks, oldest
request first. A chunk that is not a prompt's last ends on an absolute multiple of 64 tokens. When pages run out, the
youngest running request gives all it owns back and waits, to be computed anew: so the oldest always gets on, and
everything ends.

A step may be planned while the last one runs, whose tokens the host has not seen. Then a request that decodes is
planned on: if that token turns out to end it, what the next step does for it is in vain, and harmless. A request that
cannot go on without its token is left out, and nothing is taken from a request.
"""

from collections import deque
from dataclasses import dataclass

from deltagram.attention.cache import PagePool
from deltagram.engine.request import FinishReason, Request, Status
from deltagram.gdn.state import SlotPool
from deltagram.step.buckets import ExactBuckets, Ladder
from deltagram.step.plan import CHUNK, Entry, Kind, PageGrant, StepPlan


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A plan, with the requests of its entries, and those that were given a slot for it."""

    plan: StepPlan
    requests: tuple[Request, ...]
    admitted: tuple[Request, ...]


class Scheduler:
    """Owns the queue, the slots and the pages. Decides from host state alone."""

    def __init__(
        self, slots: SlotPool, pages: PagePool, page_size: int, max_num_tokens: int, buckets: ExactBuckets | Ladder
    ) -> None:
        assert max_num_tokens >= CHUNK - 1 + slots.num_slots, "a chunk must fit beside every other request's token"
        buckets.fit(max_num_tokens, slots.num_slots, mixed=True)  # refuses a ladder that is too short
        self.slots, self.pages, self.page_size = slots, pages, page_size
        self.max_num_tokens, self.buckets = max_num_tokens, buckets
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
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
        request.status = Status.WAITING
        self.waiting.append(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request that waits or runs, and free what it owns."""
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            assert request.status is Status.RUNNING
            self.running.remove(request)
            self._release(request)
        request.status, request.finish_reason = Status.FINISHED, reason

    def preempt(self, request: Request) -> None:
        """Take back all that a running request owns; it waits, first in line, and is computed anew."""
        assert request.status is Status.RUNNING
        self.running.remove(request)
        self._release(request)
        assert request.in_flight == 0, "a token that is on its way would be lost"
        request.status, request.computed = Status.WAITING, 0
        request.prompt_logits.clear()
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def schedule(self, ahead: bool = False) -> Scheduled | None:
        """The next step, or None when there is nothing to run. What it schedules counts as computed from here on.

        `ahead` says that a step still runs: then None means that its tokens are needed first.
        """
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
                budget -= run(request, 1)
        for request in list(self.running):
            if request.status is Status.RUNNING and request.is_prefilling:
                size = self._chunk(request, request.prefill_target, budget)
                budget -= run(request, size) if size else 0
        admitted = []
        while self.waiting and self.slots.num_free:
            request = self.waiting[0]
            size = self._chunk(request, len(request.tokens), budget)
            owed = sum(self._pages_for(len(r.tokens) + r.in_flight + 1) - len(r.pages) for r in self.running)
            crowded = self.running and self._pages_for(len(request.tokens) + 1) > self.pages.num_free - owed
            if not size or crowded:  # others would soon push it out of a crowded pool; it may be one just pushed out
                break
            self.waiting.popleft()
            self._admit(request)
            admitted.append(request)
            budget -= run(request, size)
        if not chosen:
            return None
        return self._plan(list(chosen.values()), grants, tuple(admitted))

    def _plan(
        self, chosen: list[tuple[Request, int]], grants: dict[int, list[PageGrant]], admitted: tuple[Request, ...]
    ) -> Scheduled:
        chosen.sort(key=lambda pair: pair[0].is_prefilling)
        entries = tuple(self._entry(request, size) for request, size in chosen)
        samples = sum(entry.num_samples for entry in entries)
        mixed = entries[-1].kind is Kind.PREFILL
        bucket = self.buckets.fit(sum(size for _, size in chosen), len(chosen), mixed, samples)
        requests = tuple(request for request, _ in chosen)
        granted = tuple(grant for request in requests for grant in grants[request.id])
        plan = StepPlan(self._next_step, bucket, entries, granted)
        self._next_step += 1
        return Scheduled(plan, requests, admitted)

    def retire(self, scheduled: Scheduled) -> None:
        """A step has ended, well or not: nothing of it is on its way any more."""
        for entry, request in zip(scheduled.plan.entries, scheduled.requests, strict=True):
            request.in_flight -= entry.samples

    def undo(self, scheduled: Scheduled) -> None:
        """Of a step that was broken off, and retired, nothing counts as computed: its requests are computed anew."""
        for request in reversed(self.running.copy()):  # the youngest first, so that the oldest is first in line
            if request in scheduled.requests:
                self.preempt(request)

    def take_freed(self) -> tuple[list[int], list[int]]:
        """Slots and pages freed since the last call."""
        freed = self.freed_slots, self.freed_pages
        self.freed_slots, self.freed_pages = [], []
        return freed

    def check_empty(self) -> None:
        """Nothing runs or waits, and every slot and page is free."""
        assert not self.has_work
        self.slots.check_empty()
        self.pages.check_empty()

    def _entry(self, request: Request, size: int) -> Entry:
        start = request.computed
        kind = Kind.PREFILL if request.is_prefilling else Kind.DECODE
        request.computed += size
        last = request.computed >= request.prefill_target
        request.in_flight += last
        slot = request.slot
        return Entry(slot, request.generation, slot, kind, size, start, is_last_chunk=last)

    def _must_wait(self, request: Request) -> bool:
        """Whether a request that decodes has nothing to run before the host has seen the token that is on its way."""
        return request.needs_last_token or len(request.tokens) + request.in_flight >= request.max_length

    def _chunk(self, request: Request, target: int, budget: int) -> int:
        """Tokens of the request's next chunk on its way to `target` computed ones, within `budget`; 0 if none fits."""
        start = request.computed
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
        """Pages for the request's first `num_tokens`, taken from the youngest requests if need be and they may; False
        if there are none, or it lost its own."""
        while self._pages_for(num_tokens) - len(request.pages) > self.pages.num_free:
            if not may_preempt:
                return False
            youngest = self.running[-1]
            chosen.pop(youngest.id, None)
            self.preempt(youngest)
            if youngest is request:
                return False
        granted = grants[request.id] = []
        while len(request.pages) < self._pages_for(num_tokens):
            page = self.pages.take(request.id)
            granted.append(PageGrant(request.slot, len(request.pages), page))
            request.pages.append(page)
        return True

    def _admit(self, request: Request) -> None:
        request.slot = self.slots.take(request.id)
        request.generation = self.slots.generation[request.slot]
        request.prefill_target = len(request.tokens)
        request.status = Status.RUNNING
        self.running.append(request)

    def _release(self, request: Request) -> None:
        self.slots.give_back(request.slot, request.id)
        self.pages.give_back(request.pages, request.id)
        self.freed_slots.append(request.slot)
        self.freed_pages += request.pages
        request.slot, request.pages = -1, []
