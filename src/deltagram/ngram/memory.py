"""Host memory for tables: of exactly the size asked for, spread over the NUMA nodes, readable by the GPU, and
shareable.

PyTorch's page-locked allocator rounds up to a power of two, which turns a table of 20.4 GiB into 32. Here pages are
mapped first and registered with CUDA afterwards.
"""

import contextlib
import ctypes
import mmap
import os
import warnings
import weakref
from pathlib import Path

import torch
from torch import Tensor

PIECE = 8 << 30  # bytes of one registration: drivers refuse very large ones
_PORTABLE_MAPPED = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped
_MBIND = {"x86_64": 237, "aarch64": 235}
_INTERLEAVE = 3  # MPOL_INTERLEAVE


class HostMemory:
    """`nbytes` of zeroed host memory as `bytes`, a uint8 tensor [nbytes].

    descriptor: an open file to map instead of anonymous memory, shared with whoever else maps it; `writable` False
    then maps it for reading. device: a CUDA device registers the memory, so that its kernels read it in place at the
    same address. Raises RuntimeError where CUDA refuses.
    """

    def __init__(self, nbytes: int, device: torch.device, descriptor: int | None = None, writable: bool = True) -> None:
        self.nbytes = nbytes
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        if descriptor is None:
            mapped = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, protection)
            with contextlib.suppress(OSError):  # of a kernel without large pages, which fault a table in twice as fast
                mapped.madvise(mmap.MADV_HUGEPAGE)
        else:
            mapped = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, protection)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a tensor over memory that cannot be written: nobody does
            self.bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        if writable:
            interleave(self.bytes)
        if device.type == "cuda":
            _register(self, device)


def share(nbytes: int) -> int:
    """A descriptor of an anonymous file of `nbytes`, which lives as long as a process holds or maps it: a killed
    process leaves nothing behind. Its size is sealed, so that no reader can be made to fault."""
    import fcntl

    descriptor = os.memfd_create("deltagram-rows", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return descriptor


def numa_nodes(listed: str | None = None) -> list[int]:
    """The machine's NUMA nodes, or those of a kernel list such as "0-1,4"."""
    if listed is None:
        online = Path("/sys/devices/system/node/online")
        listed = online.read_text() if online.exists() else "0"
    nodes: list[int] = []
    for part in listed.strip().split(","):
        first, _, last = part.partition("-")
        nodes += range(int(first), int(last or first) + 1)
    return nodes


def interleave(memory: Tensor, nodes: list[int] | None = None) -> None:
    """Spread the pages of a page-aligned tensor, not touched yet, over `nodes` (all of the machine's), so that
    reading it is not bound by one node's memory. Warns where the kernel forbids it."""
    nodes = numa_nodes() if nodes is None else nodes
    number = _MBIND.get(os.uname().machine)
    if len(nodes) < 2 or number is None:
        return
    mask = ctypes.c_ulong(sum(1 << node for node in nodes))
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (memory.data_ptr(), memory.nbytes, _INTERLEAVE, ctypes.addressof(mask), 65, 0)
    if libc.syscall(ctypes.c_long(number), *map(ctypes.c_ulong, arguments)) != 0:
        reason = os.strerror(ctypes.get_errno())
        warnings.warn(f"a table's pages may end up on one of NUMA nodes {nodes}: mbind: {reason}", stacklevel=2)


def pieces(nbytes: int, size: int) -> list[tuple[int, int]]:
    """(offset, size) of each registration of `nbytes`, `size` at a time."""
    return [(offset, min(size, nbytes - offset)) for offset in range(0, nbytes, size)]


def _register(memory: HostMemory, device: torch.device) -> None:
    """Lock the memory, in one piece if the driver takes that many bytes, else in pieces of PIECE."""
    with torch.cuda.device(device):
        cudart = torch.cuda.cudart()
        address = memory.bytes.data_ptr()
        code = 0
        for size in (memory.nbytes, PIECE):
            held = []
            for offset, length in pieces(memory.nbytes, size):
                code = int(cudart.cudaHostRegister(address + offset, length, _PORTABLE_MAPPED))
                if code:
                    break
                held.append(address + offset)
            if not code:
                for part in held:
                    weakref.finalize(memory, cudart.cudaHostUnregister, part)
                return
            for part in held:
                cudart.cudaHostUnregister(part)
        limit = "ulimit -l, and the container's, must allow it"
        raise RuntimeError(f"CUDA did not lock {memory.nbytes} bytes of host memory (error {code}): {limit}")
