"""Scheduling alone, without a model: any sequence of events keeps the books straight, and everything ends."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltagram.attention.cache import PagePool
from deltagram.engine.params import SamplingParams
from deltagram.engine.request import FinishReason, Request, Status
from deltagram.engine.scheduler import Scheduled, Scheduler
from deltagram.gdn.state import SlotPool
from deltagram.step.buckets import ExactBuckets, Ladder
from deltagram.step.plan import CHUNK, Kind, StepPlan

PAGE = 64


def make_request(number: int, prompt: int, max_tokens: int = 4) -> Request:
    return Request(
        id=number,
        prompt=tuple(range(1, prompt + 1)),
        params=SamplingParams(max_tokens=max_tokens),
        seed=0,
        max_length=prompt + max_tokens,
        end_token_ids=frozenset(),
    )


@dataclass
class Host:
    """A scheduler, and what a runner knows of its steps; `run` stands for the model: every sampled token is a 7."""

    num_slots: int = 3
    num_pages: int = 8
    max_num_tokens: int = 128
    buckets: ExactBuckets | Ladder = field(default_factory=ExactBuckets)
    page_table: dict[tuple[int, int], int] = field(default_factory=dict)
    holders: dict[int, Request] = field(default_factory=dict)  # of each slot, as of its last step

    def __post_init__(self) -> None:
        self.slots, self.pages = SlotPool(self.num_slots), PagePool(self.num_pages)
        self.scheduler = Scheduler(self.slots, self.pages, PAGE, self.max_num_tokens, self.buckets)

    def add(self, request: Request) -> Request:
        self.scheduler.add(request)
        return request

    def step(self) -> Scheduled | None:
        oldest = self.scheduler.running[0] if self.scheduler.running else None
        scheduled = self.scheduler.schedule()
        if scheduled is None:
            return None
        self.check(scheduled)
        assert oldest is None or oldest in scheduled.requests, "the oldest request always gets on"
        return scheduled

    def ahead(self) -> Scheduled | None:
        """A step planned while another runs."""
        scheduled = self.scheduler.schedule(ahead=True)
        for entry, request in zip(scheduled.plan.entries, scheduled.requests, strict=True) if scheduled else ():
            self.slots.advance(entry.slot, entry.generation, request.id, entry.start, entry.num_new)
        return scheduled

    def check(self, scheduled: Scheduled) -> None:
        plan, requests = scheduled.plan, scheduled.requests
        assert plan.num_tokens <= self.max_num_tokens and len(requests) == len(plan.entries) <= self.num_slots
        assert set(scheduled.admitted) <= set(requests)
        for grant in plan.grants:
            self.page_table[grant.row, grant.index] = grant.page
        owned: list[int] = []
        for entry, request in zip(plan.entries, requests, strict=True):
            assert request.status is Status.RUNNING and request.slot == entry.row == entry.slot
            end = entry.start + entry.num_new
            assert request.computed == end <= len(request.tokens)
            # The kind follows from the history: what was known when the request was admitted is prefilled.
            assert entry.kind is (Kind.PREFILL if entry.start < request.prefill_target else Kind.DECODE)
            assert entry.is_last_chunk == (end == len(request.tokens)) and (entry.is_last_chunk or end % CHUNK == 0)
            assert (entry.start == 0) == (request in scheduled.admitted)
            self.slots.advance(entry.slot, entry.generation, request.id, entry.start, entry.num_new)
            pages = [self.page_table[entry.row, index] for index in range(-(-end // PAGE))]
            assert pages == request.pages, "the device's page table is the host's"
        for request in self.scheduler.running:
            owned += request.pages
        assert len(owned) == len(set(owned)) == self.num_pages - self.pages.num_free

    def run(self, scheduled: Scheduled) -> None:
        self.scheduler.retire(scheduled, dict.fromkeys((request.id for request in scheduled.requests), 1))
        for entry, request in zip(scheduled.plan.entries, scheduled.requests, strict=True):
            if entry.samples:
                request.tokens.append(7)
                if len(request.tokens) == request.max_length:
                    self.scheduler.finish(request, FinishReason.LENGTH)

    def go(self) -> Scheduled:
        scheduled = self.step()
        assert scheduled is not None
        self.run(scheduled)
        return scheduled

    def finish(self, at_most: int) -> int:
        """Steps until nothing is left."""
        for steps in range(at_most):
            if not self.scheduler.has_work:
                self.scheduler.check_empty()
                return steps
            self.go()
        raise AssertionError(f"not done after {at_most} steps")


def kinds(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(entry.kind.name, entry.start, entry.num_new) for entry in plan.entries]


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 200), st.integers(1, 70)),
        st.tuples(st.sampled_from(["step"] * 3 + ["abort", "preempt", "fault"]), st.integers(0, 9), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=400, deadline=None)
@given(EVENTS, st.integers(1, 4), st.integers(5, 9), st.integers(0, 100), st.booleans())
def test_any_sequence_of_events_leaves_nothing_behind(
    events: list[tuple[str, int, int]], num_slots: int, num_pages: int, more: int, padded: bool
) -> None:
    size = CHUNK - 1 + num_slots + more
    buckets = Ladder(tuple(range(1, num_slots + 1)), (1, 2, 4, 16, size), num_slots) if padded else ExactBuckets()
    host, twin = (Host(num_slots, num_pages, size, buckets) for _ in range(2))
    requests: list[tuple[Request, Request]] = []
    for event, number, tokens in events:
        if event == "add":
            requests.append(tuple(each.add(make_request(len(requests), number, tokens)) for each in (host, twin)))  # type: ignore[arg-type]
        elif event in ("step", "fault"):
            scheduled, same = host.step(), twin.step()
            if scheduled is None or same is None:
                assert scheduled is same is None and not host.scheduler.has_work
            else:
                assert scheduled.plan.digest() == same.plan.digest(), "ranks would part"
                for each, done in ((host, scheduled), (twin, same)):
                    if event == "step":
                        each.run(done)
                    else:
                        each.scheduler.start_over()
        elif event == "abort" and requests:
            for each, request in zip((host, twin), requests[number % len(requests)], strict=True):
                if request.status is not Status.FINISHED:
                    each.scheduler.finish(request, FinishReason.ABORT)
        elif event == "preempt" and (running := len(host.scheduler.running)):
            for each in (host, twin):
                each.scheduler.preempt(each.scheduler.running[number % running])
    # Alone in the pools a request needs at most prompt + output steps, and the oldest is never held up.
    host.finish(at_most=sum(request.max_length for request, _ in requests) + 1)
    freed_slots, freed_pages = host.scheduler.take_freed()
    assert set(freed_slots) <= set(range(num_slots)) and set(freed_pages) <= set(range(num_pages))


def test_a_step_is_planned_while_another_runs() -> None:
    """What decodes goes on; who must see its token first waits, as does one whose token on its way is its last."""
    host = Host(num_slots=3, num_pages=8)
    goes_on, last, bound = (host.add(make_request(number, 3, 9 if number != 1 else 1)) for number in range(3))
    bound.constraint = object()  # type: ignore[assignment]
    first = host.step()
    assert first is not None and len(first.requests) == 3
    second = host.ahead()
    assert second is not None and second.requests == (goes_on,)
    assert kinds(second.plan) == [("DECODE", 3, 1)]
    host.run(first)
    assert last.status is Status.FINISHED and not bound.in_flight and goes_on.in_flight == 1
    third = host.ahead()
    assert third is not None and third.requests == (goes_on, bound) and third.plan.entries[0].start == 4
    host.run(second)
    host.run(third)
    host.finish(at_most=20)


def test_nothing_is_taken_from_anybody_while_a_step_runs() -> None:
    host = Host(num_slots=2, num_pages=2)
    old, young = (host.add(make_request(number, 63, 60)) for number in range(2))
    scheduled = [host.step(), host.ahead()]
    assert [each and each.requests for each in scheduled] == [(old, young)] * 2  # both pages are full now
    assert host.ahead() is None and host.scheduler.num_preemptions == 0
    for each in scheduled:
        assert each is not None
        host.run(each)
    after = host.step()
    assert after is not None and after.requests == (old,) and host.scheduler.num_preemptions == 1
    host.run(after)
    host.finish(at_most=200)


def test_one_token_of_what_is_known_is_prefill() -> None:
    host = Host(num_slots=2, max_num_tokens=65)
    host.add(make_request(0, 1))
    host.add(make_request(1, 65))
    assert kinds(host.go().plan) == [("PREFILL", 0, 1), ("PREFILL", 0, 64)]
    second = host.go().plan
    assert kinds(second) == [("DECODE", 1, 1), ("PREFILL", 64, 1)]
    assert [entry.is_last_chunk for entry in second.entries] == [True, True]
    assert kinds(host.go().plan) == [("DECODE", 2, 1), ("DECODE", 65, 1)]


def test_a_resumed_request_prefills_its_output_too() -> None:
    host = Host(max_num_tokens=128)
    request = host.add(make_request(0, 126, 9))
    host.go()
    host.go()
    assert len(request.tokens) == 128
    host.scheduler.preempt(request)
    assert (request.slot, request.pages, request.computed, request.num_preemptions) == (-1, [], 0, 1)
    assert kinds(host.go().plan) == [("PREFILL", 0, 128)]
    generations = request.generation
    host.scheduler.preempt(request)
    assert kinds(host.go().plan) == [("PREFILL", 0, 128)]  # 129 tokens, and one is left over
    assert request.generation == generations + 1
    assert kinds(host.go().plan) == [("PREFILL", 128, 1)]
    assert kinds(host.go().plan) == [("DECODE", 129, 1)]


def test_chunks_end_on_absolute_multiples_of_64() -> None:
    host = Host(max_num_tokens=100)
    host.add(make_request(0, 200))
    host.add(make_request(1, 30))
    plans = [kinds(host.go().plan) for _ in range(4)]
    assert plans[0] == [("PREFILL", 0, 64), ("PREFILL", 0, 30)]
    assert plans[1] == [("DECODE", 30, 1), ("PREFILL", 64, 64)]
    assert plans[2] == [("DECODE", 31, 1), ("PREFILL", 128, 72)]
    assert plans[3] == [("DECODE", 200, 1), ("DECODE", 32, 1)]


def test_decodes_never_keep_the_oldest_prefill_waiting() -> None:
    """The smallest step has room for a chunk of 64 beside all other requests' tokens; a smaller one is refused."""
    host = Host(num_slots=4, num_pages=30, max_num_tokens=67)
    for number in range(3):
        host.add(make_request(number, 1, 200))
    host.go()
    host.add(make_request(3, 300))
    for start in (0, 64, 128, 192, 256):
        assert kinds(host.go().plan)[-1] == ("PREFILL", start, min(64, 300 - start))
    with pytest.raises(AssertionError, match="beside every other request's token"):
        Host(num_slots=4, num_pages=30, max_num_tokens=66)


def test_a_ladder_must_hold_the_largest_step() -> None:
    with pytest.raises(ValueError, match="a step of 128 tokens and 3 sequences is larger than the largest, of 64 tok"):
        Host(buckets=Ladder((3,), (64,), 3))
    with pytest.raises(ValueError, match="3 sequences is larger than the largest, of 128 tokens and 2 sequences"):
        Host(buckets=Ladder((3,), (128,), 2))


def test_requests_wait_their_turn() -> None:
    host = Host(num_slots=2, num_pages=9)
    first, second, third = (host.add(make_request(number, 3, 2 + number)) for number in range(3))
    assert host.go().admitted == (first, second)
    assert host.go().admitted == () and first.status is Status.FINISHED
    assert host.go().admitted == (third,)
    assert host.finish(at_most=10) == 3


def test_a_crowded_pool_admits_nobody_it_would_push_out() -> None:
    """The running prefill has yet to take the two free pages: a prompt of one page must wait."""
    host = Host(num_pages=4, max_num_tokens=180)
    first = host.add(make_request(0, 250, 1))
    other = host.add(make_request(1, 50, 1))
    assert host.go().requests == (first,)
    assert (len(first.pages), host.pages.num_free) == (2, 2)
    assert host.go().requests == (first,)
    assert host.go().requests == (other,)
    assert host.scheduler.num_preemptions == 0


def test_who_has_its_token_already_may_yet_have_to_give_way() -> None:
    """An older prefill needs the page that a younger request's decode has just been granted."""
    host = Host(num_slots=2, num_pages=5, max_num_tokens=127)
    older, younger = host.add(make_request(0, 250)), host.add(make_request(1, 63))
    for _ in range(2):
        assert set(host.go().requests) == {older, younger}
    assert (len(older.pages), len(younger.pages), len(younger.tokens)) == (2, 1, 65)
    slot, first_page = younger.slot, younger.pages[0]
    assert kinds(host.go().plan) == [("PREFILL", 128, 122)]
    assert list(host.scheduler.waiting) == [younger]
    slots, pages = host.scheduler.take_freed()
    assert slots == [slot] and len(pages) == 2 and first_page in pages
    assert host.scheduler.take_freed() == ([], [])
    host.finish(at_most=20)


def test_the_youngest_gives_way_and_is_first_in_line() -> None:
    host = Host(num_slots=3, num_pages=3, max_num_tokens=200)
    first, second, third = (host.add(make_request(number, 63, 3)) for number in range(3))
    host.go()
    host.go()
    assert [request.computed for request in (first, second, third)] == [64, 64, 64]
    late = host.add(make_request(3, 5, 1))
    scheduled = host.step()  # token 65 of the first needs a page
    assert scheduled is not None and scheduled.requests == (first,)
    assert list(host.scheduler.waiting) == [second, third, late] and host.scheduler.num_preemptions == 2
    host.run(scheduled)
    assert first.status is Status.FINISHED
    assert host.go().admitted[:1] == (second,)
    host.finish(at_most=20)


def test_after_a_fault_all_are_computed_anew_in_the_old_order() -> None:
    host = Host()
    first, second = (host.add(make_request(number, 10)) for number in range(2))
    host.go()
    third, fourth = (host.add(make_request(number, 10)) for number in range(2, 4))
    assert host.step() is not None
    host.scheduler.running.append(host.scheduler.waiting[0])  # it was being admitted
    host.slots._free.clear()  # and nothing fits together
    host.scheduler.start_over()
    assert list(host.scheduler.waiting) == [first, second, third, fourth] and not host.scheduler.running
    assert kinds(host.go().plan) == [("PREFILL", 0, 11), ("PREFILL", 0, 11), ("PREFILL", 0, 10)]
    host.finish(at_most=10)


def test_leaks_are_seen() -> None:
    host = Host()
    request = host.add(make_request(0, 10))
    with pytest.raises(AssertionError):
        host.scheduler.check_empty()
    host.go()
    host.scheduler.running.remove(request)
    with pytest.raises(AssertionError, match="slots leaked"):
        host.scheduler.check_empty()
    host.slots.give_back(request.slot, request.id)
    with pytest.raises(AssertionError, match="pages leaked"):
        host.scheduler.check_empty()
    with pytest.raises(AssertionError, match="does not belong"):
        host.pages.give_back(request.pages, request.id + 1)
