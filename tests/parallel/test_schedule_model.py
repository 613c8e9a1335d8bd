"""Schedules that stall, found by exhaustive exploration; and that none of those which the budget allows does."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltagram.parallel.residency import DeviceResources, Footprint, Spinner, co_residency_budget
from deltagram.parallel.schedule_model import Kernel, Rank, Schedule, explore, problems

DEVICE = DeviceResources(multiprocessors=2, threads=4, registers=4, shared_memory=4, blocks=4)
SMALL, WHOLE = Footprint(2), Footprint(4)
TINY = Footprint(1)
GEMM = Kernel("gemm", 4, WHOLE)


def gather(blocks: int, footprint: Footprint = SMALL) -> Kernel:
    return Kernel("gather", blocks, footprint, "gather")


def reduce(blocks: int, footprint: Footprint = SMALL) -> Kernel:
    return Kernel("reduce", blocks, footprint, "reduce")


def spinner(kernel: Kernel) -> Spinner:
    return Spinner(kernel.name, kernel.blocks, kernel.footprint)


def everywhere(ranks: int, *streams: tuple[Kernel, ...]) -> Schedule:
    """Every rank runs the same, on a device of its own."""
    return Schedule((DEVICE,) * ranks, tuple(Rank(streams, device) for device in range(ranks)))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_published_hang_is_found_and_the_budget_rules_it_out(ranks):
    """A chain's gather that fills the device beside a main stream's own spinning collective: one rank's blocks are all
    of the gather, another's all of the collective, and each waits for the other. (Four ranks have larger and fewer
    blocks, for fewer states.)"""
    blocks = 2 if ranks == 4 else 4
    size = WHOLE if ranks == 4 else SMALL
    uncapped = everywhere(ranks, (reduce(blocks, size),), (gather(blocks, size),))
    assert problems(uncapped)
    stall = explore(uncapped).stall
    assert stall is not None and {name for _, name in stall} == {"gather", "reduce"}
    main = reduce(1 if ranks == 4 else 2, size)
    budget = co_residency_budget(DEVICE, size, [spinner(main)])
    assert budget == (1 if ranks == 4 else 2)
    capped = everywhere(ranks, (main,), (gather(budget, size),))
    outcome = explore(capped)
    assert not problems(capped) and outcome.stall is None and outcome.states > 10


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_small_spinners_everywhere_leave_no_room_for_a_block_that_needs_a_whole_multiprocessor(ranks):
    """All of it together is less than the device: counting alone would let it pass. One rank runs its streams one
    after the other, as streams that share a hardware queue do."""

    def schedule(blocks: int) -> Schedule:
        main, chain = reduce(1, WHOLE), gather(blocks, TINY)
        apart, one_queue = Rank(((main,), (chain,))), ((main, chain),)
        ranked = [apart] + [Rank(one_queue, device) for device in range(1, ranks)]
        return Schedule((DEVICE,) * ranks, tuple(ranked))

    filled = 2 * TINY.threads + WHOLE.threads
    assert filled < DEVICE.multiprocessors * DEVICE.threads
    assert problems(schedule(2)) and explore(schedule(2)).stall is not None
    budget = co_residency_budget(DEVICE, TINY, [spinner(reduce(1, WHOLE))])
    assert budget == 1
    assert not problems(schedule(budget)) and explore(schedule(budget)).stall is None


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_fits_stalls_all_the_same_where_two_ranks_cross_their_orders(ranks):
    main, chain = reduce(1, TINY), gather(1, TINY)
    orders = [(main, chain)] + [(chain, main)] * (ranks - 1)
    crossed = Schedule((DEVICE,) * ranks, tuple(Rank((order,), device) for device, order in enumerate(orders)))
    (problem,) = problems(crossed)
    assert problem == "the ranks run gather and reduce in orders that contradict each other"
    assert explore(crossed).stall == tuple((rank, order[0].name) for rank, order in enumerate(orders))
    kept = everywhere(ranks, (main, chain))
    assert not problems(kept) and explore(kept).stall is None


def test_a_kernel_that_waits_for_nobody_must_get_in_too():
    """A collective behind a product that needs a whole multiprocessor, while a gather spins on each of them; on the
    other rank the gather comes after that collective."""
    chain, main = gather(2, TINY), reduce(1, TINY)
    apart, one_queue = Rank(((chain,), (GEMM, main)), 0), Rank(((main, chain),), 1)
    stuck = Schedule((DEVICE,) * 2, (apart, one_queue))
    assert explore(stuck).stall == ((0, "gather"), (0, "gemm"), (1, "reduce"))
    assert any("a block of" in problem for problem in problems(stuck))
    assert co_residency_budget(DEVICE, TINY, [spinner(main)]) == 7, "enough, if the product could wait"
    assert co_residency_budget(DEVICE, TINY, [spinner(main)], [WHOLE]) == 0, "main may spin on one, the product has one"
    assert co_residency_budget(DEVICE, TINY, guests=[WHOLE]) == 1


def test_ranks_that_share_a_card_share_its_budget():
    """The virtual ranks with which a card is tested: the measured case, and half of it."""

    def schedule(blocks: int) -> Schedule:
        return Schedule((DEVICE,), tuple(Rank(((gather(blocks),),)) for _ in range(2)))

    assert explore(schedule(2)).stall is None and not problems(schedule(2))
    assert explore(schedule(4)).stall is not None and problems(schedule(4))


footprints = st.sampled_from([TINY, SMALL, WHOLE, Footprint(1, 3), Footprint(1, 0, 2)])


@st.composite
def schedules(draw):
    """Two to four ranks that run two collectives and a product, on two streams or one after the other."""
    device = DeviceResources(draw(st.integers(1, 2)), 4, 4, 4, draw(st.integers(2, 4)))
    ranks = draw(st.integers(2, 4))
    most = 2 if ranks == 4 else 3
    kernels = [Kernel(name, draw(st.integers(1, most)), draw(footprints), name) for name in ("gather", "reduce")]
    guest = Kernel("gemm", 1, draw(footprints))
    ranked = []
    for index in range(ranks):
        first, second = draw(st.permutations(kernels))
        shape = draw(st.integers(0, 3))
        streams = [((first,), (second,)), ((first, second),), ((first,), (guest, second)), ((first, guest, second),)]
        ranked.append(Rank(streams[shape], index))
    return Schedule((device,) * ranks, tuple(ranked))


@settings(max_examples=60, deadline=None)
@given(schedules())
def test_no_schedule_that_the_rules_allow_stalls(schedule):
    assert problems(schedule) or explore(schedule).stall is None


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_budgeted_pair_of_kernels_is_free_of_stalls(ranks):
    """Every footprint beside every other, the second with as many blocks as its budget gives."""
    for first, second in itertools.product([TINY, SMALL, WHOLE], repeat=2):
        main = reduce(1, first)
        budget = co_residency_budget(DEVICE, second, [spinner(main)])
        if budget:
            chain = gather(min(budget, 3), second)
            for shape in itertools.product([((main,), (chain,)), ((main, chain),)], repeat=ranks):
                ranked = tuple(Rank(streams, device) for device, streams in enumerate(shape))
                schedule = Schedule((DEVICE,) * ranks, ranked)
                assert not problems(schedule) and explore(schedule).stall is None
        if first == second:  # then it is exact: a block more stalls
            ranked = Rank(((main,), (gather(budget + 1, second),)), 0), Rank(((main, gather(budget + 1, second)),), 1)
            assert explore(Schedule((DEVICE,) * 2, ranked)).stall is not None
