"""The slot pool refuses what would be a wrong answer."""

import pytest

from deltagram.gdn.state import SlotPool, ring_length


def test_a_slot_is_its_owners_alone() -> None:
    pool = SlotPool(2)
    slot = pool.take(request=7)
    generation = pool.generation[slot]
    with pytest.raises(RuntimeError, match="request 8"):
        pool.advance(slot, generation, request=8, start=0, num_new=4)
    pool.give_back(slot, 7)
    assert pool.take(request=9) == slot
    with pytest.raises(RuntimeError, match=f"generation {generation}"):
        pool.advance(slot, generation, request=9, start=0, num_new=4)
    with pytest.raises(RuntimeError):
        pool.advance(pool.pad, 0, request=9, start=0, num_new=1)


def test_a_state_is_used_only_where_it_was_left() -> None:
    """Whatever the request's pages hold: preempted requests start over, and chunks follow one another."""
    pool = SlotPool(1)
    slot = pool.take(1)
    at = slot, pool.generation[slot], 1
    pool.advance(*at, start=0, num_new=64)
    for wrong in (0, 63, 65):
        with pytest.raises(RuntimeError, match="state_pos=64"):
            pool.advance(*at, start=wrong, num_new=1)
    pool.advance(*at, start=64, num_new=1)


def test_drafts_leave_as_many_places_as_could_be_accepted() -> None:
    pool = SlotPool(1)
    slot = pool.take(1)
    at = slot, pool.generation[slot], 1
    pool.advance(*at, start=0, num_new=10)
    pool.advance(*at, start=10, num_new=4, num_draft=3)  # the state takes token 10; 11 to 13 are drafts
    for wrong in (10, 15):
        with pytest.raises(RuntimeError, match="pending=3"):
            pool.advance(*at, start=wrong, num_new=1)
    pool.advance(*at, start=13, num_new=1)  # two of them accepted
    with pytest.raises(RuntimeError):
        pool.advance(*at, start=15, num_new=1)
    pool.advance(*at, start=14, num_new=1)


def test_a_failed_step_leaves_no_usable_state() -> None:
    pool = SlotPool(1)
    slot = pool.take(1)
    before = slot, pool.generation[slot], 1
    pool.advance(*before, start=0, num_new=5)
    pool.clear()
    pool.check_empty()
    with pytest.raises(RuntimeError, match="it has None"):
        pool.advance(*before, start=5, num_new=1)
    assert pool.take(1) == slot, "the same request in the same slot, and yet another stay"
    for start in (0, 5):
        with pytest.raises(RuntimeError, match="generation 1, is not request 1's"):
            pool.advance(*before, start=start, num_new=1)
    pool.advance(slot, pool.generation[slot], 1, start=0, num_new=5)


def test_leaks_are_seen() -> None:
    pool = SlotPool(2)
    slot = pool.take(1)
    with pytest.raises(AssertionError, match="leaked"):
        pool.check_empty()
    pool.give_back(slot, 1)
    pool.check_empty()


def test_rings_hold_what_is_read_and_what_is_written() -> None:
    for reach in (3, 9):
        for drafts in range(6):
            length = ring_length(reach, drafts)
            start = 100
            touched = range(start - reach, start + 1 + drafts)  # read, then written, by one verify step
            assert len({position % length for position in touched}) == len(touched)
