"""Ranks that one process plays: on a CPU each in a thread, on a card each on a stream, so that all of them are under
way at once. Processes that share a card take turns on it, which would hide that they wait for each other.

Kernels must be compiled and loaded before they wait for each other: loading may wait for what runs. `play` is for calls
that have been made before.
"""

import statistics
import time
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


def lockstep_us(calls: Sequence[Callable[[], object]], device: torch.device, repeats: int = 100) -> float:
    """Microseconds of one call when all ranks, on a card, make theirs `repeats` times in a graph each, at once: the
    median over replays. The calls wait for each other, so each is made once beforehand by `play`."""
    graphs = []
    for call in calls:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            for _ in range(repeats):
                call()
    taken = []
    for _ in range(12):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        for graph, stream in zip(graphs, streams(len(calls), device), strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize(device)
        taken.append((time.perf_counter() - began) * 1e6 / repeats)
    return statistics.median(taken[2:])
