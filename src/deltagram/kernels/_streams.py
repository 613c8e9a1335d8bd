"""Calls of a captured step that need nothing of each other run at the same time.

A graph of one stream runs its kernels one after the other, also those that leave most of the GPU idle. What a graph has
captured from a second stream may run beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch


@cache
def _second(device: torch.device) -> torch.cuda.Stream:
    # Of higher priority than a step's own stream: what runs beside it is the longer chain of smaller kernels, whose
    # programs would else wait until those of the one large kernel have all begun.
    return torch.cuda.Stream(device, priority=-2)


def side_by_side(chain: Callable[[], None], kernel: Callable[[], None], device: torch.device) -> None:
    """Run both calls: while a graph is captured on `device`, `chain` beside `kernel`; else one after the other.

    Neither reads or writes what the other writes, and what either leaves lies in tensors that were made before.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        chain()
        kernel()
        return
    step, second = torch.cuda.current_stream(device), _second(device)
    second.wait_stream(step)
    with torch.cuda.stream(second):
        chain()
    kernel()
    step.wait_stream(second)
