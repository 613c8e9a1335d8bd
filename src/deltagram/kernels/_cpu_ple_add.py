"""Compiled body of ple_add.py."""

from __future__ import annotations

from torch import Tensor

from deltagram.kernels._threads import spread, threaded
from deltagram.kernels._vectors import LANES, add, load, store


@threaded
def _kernel(first: int, last: int, scratch: int, x: int, gated: int, mixed: int, size: int) -> None:
    for i in range(first * size, last * size, LANES):
        store(
            x,
            i,
            last * size,
            add(load(x, i, last * size), add(load(gated, i, last * size), load(mixed, i, last * size))),
        )


def ple_add(streams: Tensor, gated: Tensor, mixed: Tensor) -> None:
    rows, count, size = streams.shape
    assert streams.is_contiguous() and gated.is_contiguous() and mixed.is_contiguous()
    spread(_kernel, rows, 128, 0, streams.data_ptr(), gated.data_ptr(), mixed.data_ptr(), count * size)
