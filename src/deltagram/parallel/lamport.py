"""All-gather of projected values for one stream, without barriers: see kernels/lamport_gather.py for how.

It waits inside a kernel, so its blocks must fit beside everything else that may wait at the same time: `blocks_beside`
says how many it may have, by parallel/residency.py. Parts of many rows go to the group's collective instead, which is
faster for them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from deltagram.kernels.lamport_gather import REGISTERS, SENTINEL, WARPS, lamport_gather
from deltagram.parallel.groups import Communicator
from deltagram.parallel.peer_memory import PeerMemory
from deltagram.parallel.residency import DeviceResources, Footprint, Spinner, co_residency_budget
from deltagram.parallel.watchdog import HangError

FOOTPRINT = Footprint.of_kernel(WARPS, REGISTERS, 1024)  # of a block; it uses less shared memory than that
_CHANNELS = 32  # blocks of a collective of NCCL, at most
_DTYPES = (torch.float32, torch.bfloat16)


def main_collective(device: torch.device) -> Spinner:
    """What the main stream of a CUDA device may have waiting at any time: a collective of NCCL, with blocks of a size
    that is not ours to know."""
    return Spinner("a collective", _CHANNELS, DeviceResources.of(device).whole())


def blocks_beside(device: torch.device, others: Sequence[Spinner] = (), ranks_here: int = 1) -> int:
    """Blocks that a gather on `device` may have beside `others`, everything else that may wait there at the same time,
    so that a kernel which needs a multiprocessor for itself still finds one. ranks_here: ranks that share the card and
    gather too.

    Raises ValueError where there is no room for one.
    """
    if device.type == "cpu":
        return 1
    resources = DeviceResources.of(device)
    blocks = co_residency_budget(resources, FOOTPRINT, others, [resources.whole()]) // ranks_here
    if blocks == 0:
        listed = ", ".join(f"{other.blocks} blocks of {other.name}" for other in others)
        raise ValueError(f"no room for a Lamport gather of {ranks_here} ranks beside {listed or 'a kernel'}")
    return blocks


class LamportAllGather:
    """Gathers parts of `width` values of `dtype` (fp32 or bf16) a row from every rank, on one stream.

    memory: of at least `nbytes(...)`, which becomes this instance's alone. max_rows: of a part that goes this way;
    longer ones take `communicator`, the stream's, which also lets the watchdog note what waits; None for ranks that one
    process plays. blocks: see `blocks_beside`. polls: looks, of about a microsecond, after which a wait gives up. Every
    rank makes the same calls, with parts of one shape, in one order.
    """

    def __init__(
        self,
        memory: PeerMemory,
        max_rows: int,
        width: int,
        dtype: torch.dtype,
        blocks: int,
        polls: int,
        communicator: Communicator | None = None,
    ) -> None:
        if dtype not in _DTYPES or width * dtype.itemsize % 4:
            raise ValueError(f"rows of {width} x {dtype}; expected fp32 or bf16 in multiples of 4 bytes")
        self.memory, self.max_rows, self.width, self.dtype = memory, max_rows, width, dtype
        self.blocks, self.polls, self.communicator = blocks, polls, communicator
        self.capacity = _capacity(max_rows, width, dtype)
        self.buffers = memory.addresses()
        self.state = torch.zeros(3, dtype=torch.int64, device=memory.device)
        self.stalled = torch.zeros(1, dtype=torch.int64, pin_memory=memory.device.type == "cuda")
        self._arm()
        if communicator is not None:
            communicator.group.watchdog.abort_with(lambda: self.stalled.fill_(1))

    @staticmethod
    def nbytes(ranks: int, max_rows: int, width: int, dtype: torch.dtype) -> int:
        """Memory that each rank needs."""
        return 4 * 3 * ranks * _capacity(max_rows, width, dtype)

    def gather(self, part: Tensor, out: Tensor | None = None) -> Tensor:
        """The parts [n, width] of all ranks side by side, [n, ranks * width]; -0.0 comes as +0.0 from a part of at most
        max_rows rows."""
        ranks = self.memory.ranks
        if out is None:
            out = part.new_empty(len(part), ranks * self.width)
        if not len(part):
            return out
        if len(part) <= self.max_rows:
            if self.communicator is None:
                return self._gather(part, out)
            with self.communicator.entered("Lamport gather", part.device):
                return self._gather(part, out)
        assert self.communicator is not None, f"a part of {len(part)} rows, for which no communicator was given"
        parts = part.new_empty(ranks, *part.shape)
        self.communicator.all_gather(parts, part)
        out.view(len(part), ranks, self.width).copy_(parts.transpose(0, 1))
        return out

    def _gather(self, part: Tensor, out: Tensor) -> Tensor:
        given = part, self.buffers, self.state, self.stalled, out
        return lamport_gather(*given, self.memory.rank, self.capacity, self.polls, self.blocks)

    def check(self) -> None:
        """Raises HangError if a gather that has ended gave up: what it gathered is void."""
        if int(self.stalled):
            raise HangError("a Lamport gather gave up: a rank did not send its part")

    def release(self) -> None:
        """Give the memory back, and after an error start anew: every rank does, between steps."""
        self.memory.release()

    def take_back(self) -> None:
        """Have memory again; captured graphs stay valid."""
        self.memory.take_back()
        self.state.zero_()
        self.stalled.zero_()
        self._arm()

    def _arm(self) -> None:
        self.memory.buffers[self.memory.rank].view(torch.int32).fill_(SENTINEL)
        self.memory.barrier()


def _capacity(max_rows: int, width: int, dtype: torch.dtype) -> int:
    """Words of a part, at most: a multiple of 4, so that segments begin at multiples of 16 bytes."""
    return -(-max_rows * width * dtype.itemsize // 16) * 4
