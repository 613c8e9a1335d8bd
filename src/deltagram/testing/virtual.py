"""Ranks that one process plays: on a CPU each in a thread, on a card each on a stream, so that all of them are under
way at once. Processes that share a card take turns on it, which would hide that they wait for each other.

Kernels must be compiled and loaded before they wait for each other: loading may wait for what runs. `play` is for calls
that have been made before.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")


def play(calls: Sequence[Callable[[], T]], device: torch.device) -> list[T]:
    """What the call of each rank returns, made by all at once; their work on the device is done."""
    if device.type == "cpu":
        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(lambda call: call(), calls))
    torch.cuda.synchronize(device)
    found = []
    for call, stream in zip(calls, streams(len(calls), device), strict=True):
        with torch.cuda.stream(stream):
            found.append(call())
    torch.cuda.synchronize(device)
    return found


@cache
def streams(count: int, device: torch.device) -> list[torch.cuda.Stream]:
    """A stream a rank."""
    return [torch.cuda.Stream(device) for _ in range(count)]
