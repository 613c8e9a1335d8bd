"""How many spinning blocks a device holds. The counts of the H200 were measured on one."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltagram.parallel.lamport import FOOTPRINT, blocks_beside
from deltagram.parallel.residency import (
    H200,
    DeviceResources,
    Footprint,
    Spinner,
    capacity,
    co_residency_budget,
    fits,
    misfit,
)

FOUR_WARPS = Footprint.of_kernel(4, 32, 0)
WHOLE_WARPS = Footprint.of_kernel(32, 32, 0)


@pytest.mark.parametrize(
    "footprint, blocks, runs",
    [
        (FOUR_WARPS, 1056, True),
        (FOUR_WARPS, 2112, False),
        (FOUR_WARPS, 4224, False),
        (WHOLE_WARPS, 132, True),
        (WHOLE_WARPS, 264, False),
        (WHOLE_WARPS, 528, False),
    ],
)
def test_what_was_measured_on_an_h200_two_grids_at_once(footprint, blocks, runs):
    assert fits(H200, [Spinner("first", blocks, footprint), Spinner("second", blocks, footprint)]) == runs


def test_like_blocks_are_counted_exactly():
    assert (capacity(H200, FOUR_WARPS), capacity(H200, WHOLE_WARPS)) == (2112, 264)
    for footprint in (FOUR_WARPS, WHOLE_WARPS, Footprint.of_kernel(8, 72, 30000)):
        whole = capacity(H200, footprint)
        assert co_residency_budget(H200, footprint) == whole
        assert co_residency_budget(H200, footprint, [Spinner("other", 100, footprint)]) == whole - 100
        assert co_residency_budget(H200, footprint, [Spinner("other", whole, footprint)]) == 0


def test_a_small_spinner_on_every_multiprocessor_leaves_no_room_for_a_block_that_needs_a_whole_one():
    whole = H200.whole()
    assert fits(H200, [Spinner("small", 131, FOUR_WARPS), Spinner("large", 1, whole)])
    assert not fits(H200, [Spinner("small", 132, FOUR_WARPS), Spinner("large", 1, whole)])
    assert "last block of large" in str(misfit(H200, [Spinner("small", 132, FOUR_WARPS), Spinner("large", 1, whole)]))
    assert co_residency_budget(H200, FOUR_WARPS, [Spinner("large", 10, whole)]) == 122
    assert co_residency_budget(H200, FOUR_WARPS, guests=[whole]) == 131, "a guest does not spin, but must get in"


def test_a_block_larger_than_a_multiprocessor_never_fits():
    large = Footprint(128, 0, H200.shared_memory + 1)
    assert not fits(H200, [Spinner("large", 1, large)]) and co_residency_budget(H200, large) == 0


@pytest.mark.parametrize("ranks, blocks", [(2, 61), (4, 28), (8, 12)])
def test_what_ran_20000_rounds_on_an_h200_is_what_ranks_on_one_card_are_given(monkeypatch, ranks, blocks):
    """Each beside the main streams of all: see co_residency.py."""
    card = torch.device("cuda")
    monkeypatch.setattr(DeviceResources, "of", staticmethod(lambda device: H200))
    main = [Spinner(f"main stream {rank}", 4, FOOTPRINT) for rank in range(ranks)]
    assert blocks_beside(card, main, ranks) == blocks
    spinners = main + [Spinner("side", blocks, FOOTPRINT)] * ranks
    assert fits(H200, spinners, [H200.whole()])
    assert not fits(H200, spinners + [Spinner("another each", ranks, FOOTPRINT)], [H200.whole()])
    whole = [Spinner("a collective", 131, H200.whole())]
    with pytest.raises(ValueError, match=f"no room for a Lamport gather of {ranks} ranks beside 131 blocks of a coll"):
        blocks_beside(card, whole, ranks)


def can_stall(device: DeviceResources, spinners: list[Spinner]) -> bool:
    """By trying every placement: whether some order of arrivals leaves a block that no multiprocessor has room for."""
    room = (device.threads, device.registers, device.shared_memory, device.blocks)
    needs = [(s.footprint.threads, s.footprint.registers, s.footprint.shared_memory, 1) for s in spinners]
    start = (tuple(s.blocks for s in spinners), ((0, 0, 0, 0),) * device.multiprocessors)
    seen, stack = {start}, [start]
    while stack:
        left, used = stack.pop()
        for kernel, need in enumerate(needs):
            if not left[kernel]:
                continue
            placed = False
            for at in range(len(used)):
                after = tuple(u + n for u, n in zip(used[at], need, strict=True))
                if all(a <= r for a, r in zip(after, room, strict=True)):
                    placed = True
                    fewer = tuple(count - (k == kernel) for k, count in enumerate(left))
                    state = (fewer, tuple(sorted((*used[:at], after, *used[at + 1 :]))))
                    if state not in seen:
                        seen.add(state)
                        stack.append(state)
            if not placed:
                return True
    return False


small = st.builds(Footprint, st.integers(1, 8), st.integers(0, 6), st.integers(0, 5))


@settings(max_examples=300, deadline=None)
@given(
    st.builds(DeviceResources, st.integers(1, 3), st.just(8), st.just(6), st.just(5), st.integers(1, 4)),
    st.lists(st.tuples(st.integers(1, 4), small), min_size=1, max_size=3),
)
def test_nothing_that_fits_can_stall_wherever_its_blocks_are_placed(device, kernels):
    spinners = [Spinner(f"kernel {at}", blocks, footprint) for at, (blocks, footprint) in enumerate(kernels)]
    if fits(device, spinners):
        assert not can_stall(device, spinners)
    elif len({spinner.footprint for spinner in spinners}) == 1:
        assert can_stall(device, spinners), "for like blocks the rule is exact"


def test_more_never_fits_where_less_did_not():
    device = DeviceResources(2, 8, 6, 5, 4)
    sizes = [Footprint(2, 1, 1), Footprint(5, 2, 3)]
    for first, second in itertools.product(range(5), range(1, 5)):
        more = [Spinner("a", first, sizes[0]), Spinner("b", second, sizes[1])]
        less = [Spinner("a", first, sizes[0]), Spinner("b", second - 1, sizes[1])]
        assert fits(device, less) or not fits(device, more)
