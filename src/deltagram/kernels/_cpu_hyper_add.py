"""Compiled body of hyper_add.py."""

from __future__ import annotations

from torch import Tensor

from deltagram.kernels._threads import spread, threaded
from deltagram.kernels._vectors import add_row, get


@threaded
def _kernel(
    first: int, last: int, scratch: int, x: int, streams: int, size: int, inject: int, y: int, y_stride: int
) -> None:
    for row in range(first, last):
        for s in range(streams):
            add_row(y + 4 * row * y_stride, get(inject, row * streams + s), size, x + 4 * (row * streams + s) * size)


def hyper_add(streams: Tensor, inject: Tensor, out: Tensor) -> None:
    rows, count, size = streams.shape
    assert streams.is_contiguous() and inject.is_contiguous() and out.stride(1) == 1
    spread(_kernel, rows, 256, 0, streams.data_ptr(), count, size, inject.data_ptr(), out.data_ptr(), out.stride(0))
