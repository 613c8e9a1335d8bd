"""Compiled body of hyper_mix.py."""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._packed import Packed, room
from deltagram.kernels._products import PRODUCT, product
from deltagram.kernels._threads import spread, threaded
from deltagram.kernels._vectors import (
    LANES,
    add,
    add_row,
    fma,
    get,
    load,
    multiply,
    norm_row,
    sigmoid,
    silu,
    splat,
    store,
)

_ROWS = 32  # whose norms and gates stay in the nearest cache


@threaded
def _kernel(
    first: int, last: int, scratch: int, f: int, x: int, streams: int, size: int, w: int, eps: float,
    down: int, down_brief: int, down_outputs: int, up: int, up_brief: int, rank: int, last_inject: int, last_out: int,
    last_stride: int, y: int, inject: int,
) -> None:  # fmt: skip
    flat, narrow, wide = streams * size, (down_outputs + 15) // 16 * 16, (streams * size + 15) // 16 * 16
    low, gates = scratch + 4 * _ROWS * flat, scratch + 4 * _ROWS * (flat + narrow)
    part = 1.0 / streams
    for begin in range(first, last, _ROWS):
        rows = min(_ROWS, last - begin)
        for r in range(rows):
            for s in range(streams):
                at = 4 * s * size
                if last_out != 0:
                    share = get(last_inject, (begin + r) * streams + s)
                    add_row(last_out + 4 * (begin + r) * last_stride, share, size, x + 4 * (begin + r) * flat + at)
                norm_row(x + 4 * (begin + r) * flat + at, w + at, size, eps, scratch + 4 * r * flat + at)
        product(f, scratch, flat, rows, flat, down, down_brief, down_outputs, low, narrow)
        for r in range(rows):
            line = low + 4 * r * narrow
            if down_outputs > rank:
                for i in range(0, streams, LANES):
                    half = sigmoid(multiply(load(line + 4 * rank, i, streams), splat(part)))
                    store(inject + 4 * (begin + r) * streams, i, streams, add(half, half))
            for i in range(0, rank, LANES):
                store(line, i, rank, silu(multiply(load(line, i, rank), splat(part))))
        product(f, low, narrow, rows, rank, up, up_brief, flat, gates, wide)
        for r in range(rows):
            for i in range(0, size, LANES):
                a = splat(0.0)
                for s in range(streams):
                    at = 4 * s * size
                    a = fma(
                        sigmoid(load(gates + 4 * r * wide + at, i, size)), load(scratch + 4 * r * flat + at, i, size), a
                    )
                store(y + 4 * (begin + r) * size, i, size, multiply(a, splat(part)))


def hyper_mix(
    streams: Tensor, weight: Tensor, down: Packed, up: Packed, eps: float, last_inject: Tensor | None = None,
    last_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, count, size = streams.shape
    assert streams.is_contiguous()
    flat, last = count * size, (0, 0, 0)
    if last_inject is not None and last_out is not None:
        assert last_inject.is_contiguous() and last_out.stride(1) == 1
        last = last_inject.data_ptr(), last_out.data_ptr(), last_out.stride(0)
    y, inject = torch.empty(rows, size), torch.empty(rows, count if down.outputs > up.inputs else 0)
    spread(
        _kernel, rows, 64, _ROWS * (flat + room(down.outputs) + room(flat)), PRODUCT, streams.data_ptr(), count, size,
        weight.data_ptr(), eps, down.address, down.brief, down.outputs, up.address, up.brief, up.inputs, *last,
        y.data_ptr(), inject.data_ptr(),
    )  # fmt: skip
    return y, inject
