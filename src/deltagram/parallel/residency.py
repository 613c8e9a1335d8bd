"""What may spin at once must fit at once: how many blocks a kernel that waits for its peers may have.

A block that spins on a peer's data holds its multiprocessor until the peer's block has run. If the spinning blocks of
one rank can leave no room for a block that a peer waits for, the ranks wait for each other for ever. So for every
block that must run, no placement of the others may fill every multiprocessor.

A multiprocessor is full for a block that needs r_j of resource j once some resource has less than r_j left, that is,
once t_j of it is in use: the smallest amount above R_j - r_j that whole blocks can add up to. A block of kernel k
goes at most w_k = max_j(r_kj / t_j), or 1, of the way there, whichever resource fills first. Hence the others can fill
at most sum_k n_k w_k multiprocessors, and the block always finds room if that is less than all of them. For blocks of
one size this is exact: the card's capacity. Between sizes it is safe, never tight by promise.

`schedule_model.py` explores schedules exhaustively against these same functions. Nothing here needs a GPU.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one block holds of its multiprocessor while it runs: threads, registers, and bytes of shared memory."""

    threads: int
    registers: int = 0
    shared_memory: int = 0

    @staticmethod
    def of_kernel(warps: int, registers: int, shared_memory: int) -> "Footprint":
        """Of a compiled kernel: warps a block, registers a thread, and bytes of shared memory a block.

        Rounded as a GPU since Volta hands them out: warps by four (one per quarter of a multiprocessor), registers by
        8 a thread, shared memory by 128 bytes after 1 KiB that the system takes of each block.
        """
        threads = 32 * _up(warps, 4)
        return Footprint(threads, threads * _up(registers, 8), _up(shared_memory + 1024, 128))


@dataclass(frozen=True, slots=True)
class DeviceResources:
    """A device: its multiprocessors, and what each has of threads, registers, shared memory (bytes) and block slots."""

    multiprocessors: int
    threads: int
    registers: int
    shared_memory: int
    blocks: int

    @staticmethod
    def of(device: torch.device) -> "DeviceResources":
        """Of a CUDA device of this machine."""
        found = torch.cuda.get_device_properties(device)
        slots = 32 if (found.major, found.minor) in _THIRTY_TWO else 16  # fewer than there are is safe
        return DeviceResources(
            found.multi_processor_count,
            found.max_threads_per_multi_processor,
            _REGISTERS,
            found.shared_memory_per_multiprocessor,
            slots,
        )

    def whole(self) -> Footprint:
        """A block that needs a multiprocessor for itself: the safe guess for a kernel that is not ours."""
        return Footprint(self.threads, self.registers, self.shared_memory)


# The CUDA programming guide's table of compute capabilities: those with 32 block slots, and what all since 5.0 have.
_THIRTY_TWO = ((7, 0), (8, 0), (9, 0), (10, 0), (10, 3))
_REGISTERS = 65536
H200 = DeviceResources(132, 2048, _REGISTERS, 233472, 32)


@dataclass(frozen=True, slots=True)
class Spinner:
    """A kernel that may wait for a peer while it runs: `blocks` blocks of `footprint`, at most, at one time."""

    name: str
    blocks: int
    footprint: Footprint


def misfit(device: DeviceResources, spinners: Sequence[Spinner], guests: Sequence[Footprint] = ()) -> str | None:
    """Why the spinners may not all be under way on `device` at once; None if they may.

    spinners: everything that can spin at the same time on this device, whichever stream or rank it belongs to: NCCL's
    kernels and a main stream's waits are among them. guests: blocks of kernels that do not spin, which must be able
    to run while all of the spinners do, since a peer may wait for what follows them in their stream.
    """
    for index, spinner in enumerate(spinners):
        others = [(o.footprint, o.blocks - (at == index)) for at, o in enumerate(spinners)]
        if spinner.blocks and _filled(device, others, spinner.footprint) >= device.multiprocessors:
            return f"the last block of {spinner.name} may find no room beside " + _listed(spinners)
    for guest in guests:
        if _filled(device, [(o.footprint, o.blocks) for o in spinners], guest) >= device.multiprocessors:
            return f"a block of {guest} may find no room beside " + _listed(spinners)
    return None


def fits(device: DeviceResources, spinners: Sequence[Spinner], guests: Sequence[Footprint] = ()) -> bool:
    """Whether all that may spin at once fits at once, however the blocks are placed: see `misfit`."""
    return misfit(device, spinners, guests) is None


def co_residency_budget(
    device: DeviceResources, footprint: Footprint, others: Sequence[Spinner] = (), guests: Sequence[Footprint] = ()
) -> int:
    """The most blocks of `footprint` that a further spinning kernel may have beside the `others`; 0 for none."""
    low, high = 0, device.multiprocessors * device.blocks
    while low < high:
        middle = (low + high + 1) // 2
        if fits(device, [*others, Spinner("the new kernel", middle, footprint)], guests):
            low = middle
        else:
            high = middle - 1
    return low


def capacity(device: DeviceResources, footprint: Footprint) -> int:
    """Blocks of `footprint` that the empty device holds."""
    limits = [have // need for have, need in zip(_room(device), _needs(footprint), strict=True) if need]
    return device.multiprocessors * min(limits)


def _filled(device: DeviceResources, others: Sequence[tuple[Footprint, int]], block: Footprint) -> Fraction:
    """At most so many multiprocessors can the `others`, footprints and their counts, fill for one more `block`."""
    present = [(_needs(footprint), count) for footprint, count in others if count]
    thresholds: list[int | None] = []
    for resource, (have, need) in enumerate(zip(_room(device), _needs(block), strict=True)):
        if need > have:
            return Fraction(device.multiprocessors)  # it never fits
        unit = math.gcd(*(needs[resource] for needs, _ in present))
        reached = (have - need) // unit * unit + unit if unit else have + 1
        thresholds.append(reached if reached <= have else None)  # None: this resource alone never keeps it out
    total = Fraction(0)
    for needs, count in present:
        shares = (Fraction(n, t) for n, t in zip(needs, thresholds, strict=True) if t is not None)
        total += count * min(Fraction(1), max(shares, default=Fraction(0)))
    return total


def _needs(footprint: Footprint) -> tuple[int, int, int, int]:
    return footprint.threads, footprint.registers, footprint.shared_memory, 1


def _room(device: DeviceResources) -> tuple[int, int, int, int]:
    return device.threads, device.registers, device.shared_memory, device.blocks


def _listed(spinners: Sequence[Spinner]) -> str:
    return ", ".join(f"{spinner.blocks} blocks of {spinner.name}" for spinner in spinners)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
