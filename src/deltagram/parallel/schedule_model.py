"""A model of kernels that wait for their peers while they run, explored exhaustively for stalls.

Ranks launch kernels on streams. A stream's kernels run one after the other; those of different streams, and of ranks
on one device, share its multiprocessors. Blocks are placed in order, on any multiprocessor that has room: which one,
and whose block comes next, is an adversary's choice. A block of a collective spins, and holds its place, until the
block of its number has been placed on every rank; blocks of other kernels end once they are placed. A state from
which nothing can go on, with kernels left, is a stall.

What makes a stall impossible is `problems`: everything that can spin at once on a device fits at once (the rule of
residency.py, for every choice of one kernel a stream), and the orders in which ranks run collectives on their streams
do not contradict each other. For of the collectives that are not over, take one before which none has to run: on
every rank it is at the head of its stream or behind kernels that get in, so it gets in whole, and ends.

States are explored with every block that can end ended at once. That hides no stall: a block that stays longer leaves
less room, so whatever can happen then can happen without it too, and a stall is a state in which nothing can end.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from deltagram.parallel.residency import DeviceResources, Footprint, Spinner, misfit

Resident = tuple[int, int, int, int]  # rank, stream, kernel of the stream, block
Progress = tuple[tuple[tuple[int, int], ...], ...]  # [rank][stream]: its kernel, and how many blocks of it are placed
State = tuple[Progress, tuple[tuple[tuple[Resident, ...], ...], ...]]  # and [device][multiprocessor]: who is there


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch. collective: what it takes part in with all other ranks, as many blocks on each; None if it waits for
    nobody."""

    name: str
    blocks: int
    footprint: Footprint
    collective: str | None = None


@dataclass(frozen=True, slots=True)
class Rank:
    """What one rank launches, on the device of that number: the kernels of each of its streams, in order.

    Streams that share a hardware queue, as they do when there are many, are one stream here.
    """

    streams: tuple[tuple[Kernel, ...], ...]
    device: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Devices, and the ranks that run on them."""

    devices: tuple[DeviceResources, ...]
    ranks: tuple[Rank, ...]

    def __post_init__(self) -> None:
        launched = [
            sorted((k.collective, k.blocks) for stream in rank.streams for k in stream if k.collective)
            for rank in self.ranks
        ]
        assert all(each == launched[0] for each in launched), "every rank takes part in every collective, once"
        assert len(set(launched[0])) == len(launched[0])


@dataclass(frozen=True, slots=True)
class Exploration:
    """The outcome: how many states there are, and the kernels that wait for ever in a stall, (rank, name); None if no
    state is one."""

    states: int
    stall: tuple[tuple[int, str], ...] | None


def problems(schedule: Schedule) -> list[str]:
    """Why the schedule may stall, by the rules that keep schedules from it; nothing if it cannot."""
    found = []
    for index, device in enumerate(schedule.devices):
        streams = [stream for rank in schedule.ranks if rank.device == index for stream in rank.streams]
        guests = [kernel.footprint for stream in streams for kernel in stream if kernel.collective is None]
        spinning = [[k for k in stream if k.collective is not None] for stream in streams]
        for together in product(*(stream for stream in spinning if stream)):
            spinners = [Spinner(k.name, k.blocks, k.footprint) for k in together]
            if problem := misfit(device, spinners, guests):
                found.append(problem)
                break
    if crossed := _crossed(schedule):
        found.append(f"the ranks run {' and '.join(sorted(crossed))} in orders that contradict each other")
    return found


def explore(schedule: Schedule, limit: int = 1_000_000) -> Exploration:
    """Try every placement and every interleaving. Raises MemoryError for more than `limit` states."""
    start = _settle(
        schedule,
        tuple(tuple((0, 0) for _ in rank.streams) for rank in schedule.ranks),
        tuple(((),) * device.multiprocessors for device in schedule.devices),
    )
    seen, stack = {start}, [start]
    while stack:
        state = stack.pop()
        stuck = True
        for after in _next(schedule, state):
            stuck = False
            if after not in seen:
                seen.add(after)
                stack.append(after)
                if len(seen) > limit:
                    raise MemoryError(f"the schedule has more than {limit} states")
        if stuck and (left := _left(schedule, state[0])):
            return Exploration(len(seen), left)
    return Exploration(len(seen), None)


def _next(schedule: Schedule, state: State) -> Iterator[State]:
    """Every state in which one more block is placed."""
    progress, residents = state
    for r, rank in enumerate(schedule.ranks):
        device, here = schedule.devices[rank.device], residents[rank.device]
        for s, stream in enumerate(rank.streams):
            at, placed = progress[r][s]
            if at == len(stream) or placed == stream[at].blocks:
                continue
            kernel = stream[at]
            tried = set()
            for m, present in enumerate(here):
                if present in tried or not _has_room(schedule, device, present, kernel.footprint):
                    continue
                tried.add(present)  # multiprocessors that hold the same are one choice
                if kernel.collective is None:  # its blocks come and go one by one
                    yield _settle(schedule, _with(progress, r, s, (at, kernel.blocks)), residents)
                    break
                changed = tuple(sorted((*present, (r, s, at, placed))))
                on_device = tuple(sorted((*here[:m], changed, *here[m + 1 :])))
                everywhere = (*residents[: rank.device], on_device, *residents[rank.device + 1 :])
                yield _settle(schedule, _with(progress, r, s, (at, placed + 1)), everywhere)


def _settle(schedule: Schedule, progress: Progress, residents: tuple[tuple[tuple[Resident, ...], ...], ...]) -> State:
    """The state once every block and kernel that can end has ended."""
    while True:
        ready = _ready(schedule, progress)
        after = progress
        for r, rank in enumerate(schedule.ranks):
            for s, stream in enumerate(rank.streams):
                at, placed = progress[r][s]
                if at < len(stream):
                    kernel = stream[at]
                    over = placed if kernel.collective is None else ready[kernel.collective]
                    if over == kernel.blocks:
                        after = _with(after, r, s, (at + 1, 0))
        if after == progress:
            break
        progress = after

    def stays(block: Resident) -> bool:
        rank, stream, at, number = block
        name = schedule.ranks[rank].streams[stream][at].collective
        return name is not None and number >= ready[name]

    kept = tuple(tuple(sorted(tuple(b for b in m if stays(b)) for m in device)) for device in residents)
    return progress, kept


def _ready(schedule: Schedule, progress: Progress) -> dict[str, int]:
    """For each collective, how many of its blocks are placed on every rank."""
    ready: dict[str, int] = {}
    for r, rank in enumerate(schedule.ranks):
        for s, stream in enumerate(rank.streams):
            at, placed = progress[r][s]
            for k, kernel in enumerate(stream):
                if kernel.collective is not None:
                    mine = kernel.blocks if k < at else placed if k == at else 0
                    ready[kernel.collective] = min(ready.get(kernel.collective, mine), mine)
    return ready


def _has_room(schedule: Schedule, device: DeviceResources, present: tuple[Resident, ...], footprint: Footprint) -> bool:
    used = [schedule.ranks[r].streams[s][k].footprint for r, s, k, _ in present] + [footprint]
    return (
        sum(each.threads for each in used) <= device.threads
        and sum(each.registers for each in used) <= device.registers
        and sum(each.shared_memory for each in used) <= device.shared_memory
        and len(used) <= device.blocks
    )


def _with(progress: Progress, r: int, s: int, value: tuple[int, int]) -> Progress:
    row = (*progress[r][:s], value, *progress[r][s + 1 :])
    return (*progress[:r], row, *progress[r + 1 :])


def _left(schedule: Schedule, progress: Progress) -> tuple[tuple[int, str], ...]:
    return tuple(
        (r, stream[progress[r][s][0]].name)
        for r, rank in enumerate(schedule.ranks)
        for s, stream in enumerate(rank.streams)
        if progress[r][s][0] < len(stream)
    )


def _crossed(schedule: Schedule) -> set[str]:
    """Collectives whose orders on the ranks' streams contradict each other: what is left of the graph of "runs before"
    when what nothing runs before is taken away again and again."""
    before: dict[str, set[str]] = {}
    for rank in schedule.ranks:
        for stream in rank.streams:
            names = [kernel.collective for kernel in stream if kernel.collective is not None]
            for i, name in enumerate(names):
                before.setdefault(name, set()).update(names[:i])
    while free := {name for name, others in before.items() if not others & before.keys()}:
        before = {name: others for name, others in before.items() if name not in free}
    return set(before)
