"""Times on a GPU: of calls captured in one graph, and of calls made one by one."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Calls = Sequence[Callable[[], object]]


def captured_us(calls: Calls, replays: int = 20) -> float:
    """Device time of one of `calls` in microseconds, all captured in one graph: the median over replays.

    Calls that work on different buffers, together larger than the L2 cache, are timed as a model's layers would run.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    return statistics.median(_device_us(graph.replay) for _ in range(replays)) / len(calls)


def eager_us(calls: Calls, rounds: int = 5) -> tuple[float, float]:
    """Host and device time of one of `calls` in microseconds, issued one after another: medians over rounds."""
    for call in calls:
        call()
    host, device = [], []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for call in calls:
            call()
        host.append((time.perf_counter() - began) * 1e6 / len(calls))

        def issue() -> None:
            for call in calls:
                call()

        torch.cuda.synchronize()
        device.append(_device_us(issue) / len(calls))
    return statistics.median(host), statistics.median(device)


def launches(call: Callable[[], object]) -> int:
    """Kernels, copies and fills that a call puts on the device."""
    call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def _device_us(run: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3
