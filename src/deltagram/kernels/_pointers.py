"""Memory of several ranks behind one table: tensors int64 [ranks], each entry the address of a rank's buffer as this
process sees it. Kernels follow the addresses; the references look at the same memory through `at`.

A table outlives what it points to: buffers may be released and taken back elsewhere, and captured graphs go on reading
the table. So an op never takes a peer buffer itself, not even its own rank's.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

_lock = threading.Lock()


class _DeviceMemory:
    """What torch asks of memory that another library allocated on a CUDA device."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": (nbytes,), "strides": None, "typestr": "|u1", "version": 3,
        }  # fmt: skip


def at(address: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A view of memory that somebody else keeps alive."""
    nbytes = prod(shape) * dtype.itemsize
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cuda":
        return torch.as_tensor(_DeviceMemory(address, nbytes), device=device).view(dtype).view(shape)
    return torch.frombuffer((ctypes.c_byte * nbytes).from_address(address), dtype=torch.uint8).view(dtype).view(shape)


def fence() -> None:
    """What this thread wrote before comes before what it writes or reads after, for other processes too: releasing a
    lock keeps earlier accesses before it, and taking it again keeps later ones behind."""
    for _ in range(2):
        with _lock:
            pass


def wait_until(ready: Callable[[], bool], polls: int, stalled: Tensor, patience: int) -> bool:
    """Give up the processor until `ready()`, for as many microseconds as a GPU is given polls, which take it about as
    long; for `patience` of them while `stalled` is not 0. Returns whether it came true."""
    began, looks = time.monotonic(), 0
    while not ready():
        if time.monotonic() > began + 1e-6 * (min(polls, patience) if int(stalled) else polls):
            return ready()
        looks += 1
        if looks < 20:
            os.sched_yield()
        else:  # a peer may be waiting for this processor
            time.sleep(2e-5)
    fence()
    return True
