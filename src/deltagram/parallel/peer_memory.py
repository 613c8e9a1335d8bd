"""Memory that every rank of a group reads and writes: one buffer a rank, all of one size, and its address everywhere.

Three kinds behind one interface: torch's symmetric memory, for ranks on cards of their own that reach each other; CUDA
IPC, for processes that share one card; and anonymous shared files, for processes on a CPU. Nothing outlives the ranks,
however they end. A buffer's address differs from process to process, so each has its own table of them (see
kernels/_pointers.py); tables stay where they are when memory is released and taken back, and so do graphs that use
them.
"""

import ctypes
import mmap
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from deltagram.kernels._pointers import at
from deltagram.parallel.groups import Group

SIZES = (2, 4, 8)  # of groups, for which peer kernels are built
Opened = tuple[list[Tensor], Callable[[], None]]  # every rank's buffer, uint8 [nbytes], and what gives them back
_HEADROOM = 1 << 28  # bytes of a device that a request leaves alone
_PAGE = 1 << 21  # bytes, of a device's memory


class PeerMemory:
    """`nbytes` of every rank. `buffers`: each rank's, uint8 [nbytes], as this process sees it, zeros at first; none
    while the memory is released. Every rank makes, releases and takes back the same memory in the same order."""

    def __init__(
        self, rank: int, device: torch.device, open_: Callable[[], Opened], barrier: Callable[[], None]
    ) -> None:
        self.rank, self.device = rank, device
        self._open, self._barrier = open_, barrier
        self._tables: dict[int, Tensor] = {}
        self.buffers: list[Tensor] = []
        self.take_back()
        self.ranks = len(self.buffers)

    def addresses(self, offset: int = 0) -> Tensor:
        """int64 [ranks] on the device: the address of byte `offset` of each rank's buffer. The tensor is the same for
        ever, its contents follow the memory."""
        if offset not in self._tables:
            assert self.buffers, "the memory is released"
            self._tables[offset] = torch.tensor(self._now(offset), device=self.device)
        return self._tables[offset]

    def release(self) -> None:
        """Give the memory back, once no rank uses it any more. Its contents are lost."""
        assert self.buffers, "the memory is released already"
        self.barrier()
        self.buffers = []
        self._close()
        self.barrier()

    def take_back(self) -> None:
        """Have memory again, zeros; addresses() are those of the new."""
        assert not self.buffers, "the memory was not released"
        self.buffers, self._close = self._open()
        for offset, table in self._tables.items():
            table.copy_(torch.tensor(self._now(offset)))
        self.barrier()

    def barrier(self) -> None:
        """Every rank has come here, and its device has done what it was given: for the start, never within a step."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._barrier()

    def _now(self, offset: int) -> list[int]:
        return [buffer.data_ptr() + offset for buffer in self.buffers]


def peer_memory(nbytes: int, group: Group) -> PeerMemory:
    """Memory of `group`'s ranks. Raises ValueError, the same one on every rank, where the machine has not what it
    takes, or the ranks cannot reach each other."""
    group.check(problem(nbytes, group))
    open_ = _open_shared if group.device.type == "cpu" else _open_ipc if group.shared_card else _open_symmetric
    return PeerMemory(group.rank, group.device, partial(open_, nbytes, group), group.barrier)


def patience(group: Group) -> int:
    """Polls, of about a microsecond, after which a wait of `group` gives up: when a step's deadline is well past, so
    that the watchdog speaks first."""
    return min(int((group.deadline + 5) * 1e6), 2**31 - 1)


def virtual_ranks(nbytes: int, ranks: int, device: torch.device) -> list[PeerMemory]:
    """The memory of `ranks` ranks that one process plays, each on a stream of its own: how kernels that wait for each
    other are tested on one card, where processes would take turns."""
    buffers = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(ranks)]

    def open_(rank: int) -> Opened:
        buffers[rank].zero_()
        return list(buffers), lambda: None

    return [PeerMemory(rank, device, partial(open_, rank), lambda: None) for rank in range(ranks)]


def problem(nbytes: int, group: Group) -> str | None:
    """Why this rank cannot have `nbytes` of peer memory in `group`, or None. Every rank must ask."""
    device = group.device
    cuda, alone = device.type == "cuda", device.type == "cuda" and not group.shared_card
    cards = gather_bytes(_card(device) if cuda else b"", group)
    free = torch.cuda.mem_get_info(device)[0] - _HEADROOM if cuda else _free_memory()
    least = max(0, min(numbers[0] for numbers in group.gather_numbers([free])))  # ranks look at different moments
    if group.size not in SIZES:
        return f"peer memory between {group.size} ranks; expected {', '.join(map(str, SIZES))}"
    unreached = _unreached(device, cards) if alone else []
    if unreached:
        return f"device {device.index} does not reach {', '.join(unreached)} directly"
    sharing = 1 if alone else group.size
    if nbytes * sharing > least:
        where = "a device" if cuda else "this machine"
        return f"{sharing} x {nbytes / 1e9:.2f} GB of peer memory asked for; {where} has {least / 1e9:.2f} GB free"
    return None


def gather_bytes(payload: bytes, group: Group) -> list[bytes]:
    """The `payload` of every rank, all of one length."""
    padded = payload.ljust(-(-len(payload) // 8) * 8, b"\0")
    numbers = [int.from_bytes(padded[i : i + 8], "little", signed=True) for i in range(0, len(padded), 8)]
    found = group.gather_numbers([len(payload), *numbers])
    assert all(each[0] == len(payload) for each in found)
    return [b"".join(n.to_bytes(8, "little", signed=True) for n in each[1:])[: len(payload)] for each in found]


def _card(device: torch.device) -> bytes:
    return str(torch.cuda.get_device_properties(device).uuid).encode()


def _unreached(device: torch.device, cards: list[bytes]) -> list[str]:
    """The cards of other ranks that `device` cannot read directly."""
    seen = {_card(torch.device("cuda", i)): i for i in range(torch.cuda.device_count())}
    return [
        f"rank {rank}'s"
        for rank, card in enumerate(cards)
        if card not in seen
        or (seen[card] != device.index and not torch.cuda.can_device_access_peer(device, seen[card]))
    ]


def _free_memory() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _open_shared(nbytes: int, group: Group) -> Opened:
    """Each rank makes an anonymous file, and the others open it while its maker holds it open. Mappings keep it."""
    descriptor, problem = os.memfd_create("deltagram-peer", os.MFD_CLOEXEC), None
    try:
        os.posix_fallocate(descriptor, 0, nbytes)  # now, not when a page is first touched
    except OSError as error:
        problem = f"{nbytes / 1e9:.2f} GB of peer memory asked for: {error.strerror}"
    group.check(problem)
    mapped = []
    for process, theirs in group.gather_numbers([os.getpid(), descriptor]):
        opened = os.open(f"/proc/{process}/fd/{theirs}", os.O_RDWR | os.O_CLOEXEC)
        mapped.append(mmap.mmap(opened, nbytes, mmap.MAP_SHARED))
        os.close(opened)
    group.barrier()
    os.close(descriptor)
    return [torch.frombuffer(each, dtype=torch.uint8) for each in mapped], lambda: None


def _open_symmetric(nbytes: int, group: Group) -> Opened:
    """By torch, without NVLink's multicast, which nothing here needs."""
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    from torch.distributed import _symmetric_memory as symmetric

    mine = symmetric.empty(nbytes, dtype=torch.uint8, device=group.device).zero_()
    world = dist.group.WORLD
    assert world is not None
    handle = symmetric.rendezvous(mine, world.group_name)
    buffers = [handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(group.size)]
    held = [mine, handle]
    return buffers, held.clear


class _IpcHandle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 64)]


def _open_ipc(nbytes: int, group: Group) -> Opened:
    """By CUDA's driver: torch's symmetric memory refuses two ranks on one card."""
    driver = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        code = getattr(driver, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} failed with CUDA error {code}")

    with torch.cuda.device(group.device):
        torch.empty(1, device=group.device)  # makes the context that the driver's calls work in
        mine, handle = ctypes.c_uint64(), _IpcHandle()
        whole = -(-nbytes // _PAGE) * _PAGE  # smaller pieces share a page, which is what a handle is of
        call("cuMemAlloc_v2", ctypes.byref(mine), ctypes.c_size_t(whole))
        call("cuIpcGetMemHandle", ctypes.byref(handle), mine)
        addresses = []
        for rank, theirs in enumerate(gather_bytes(bytes(handle), group)):
            address = ctypes.c_uint64(mine.value)
            if rank != group.rank:
                call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _IpcHandle.from_buffer_copy(theirs), 1)
            addresses.append(address)
    buffers = [at(address.value, (nbytes,), torch.uint8, group.device) for address in addresses]
    buffers[group.rank].zero_()

    def close() -> None:
        for rank, address in enumerate(addresses):
            if rank != group.rank:
                call("cuIpcCloseMemHandle", address)
        group.barrier()
        call("cuMemFree_v2", mine)

    return buffers, close
