"""Compiled body of ple_gate.py."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deltagram.kernels._threads import spread, threaded
from deltagram.kernels._vectors import LANES, fma, inverse_rms, load, multiply, norm_row, splat, store, total


@threaded
def _kernel(
    first: int, last: int, scratch: int, x: int, key: int, value: int, value_stride: int, streams: int, size: int,
    query_w: int, conv_w: int, eps: float, gated: int, conv: int,
) -> None:  # fmt: skip
    for t in range(first, last):
        for s in range(streams):
            at, w = 4 * (t * streams + s) * size, 4 * s * size
            a = splat(0.0)
            for i in range(0, size, LANES):
                a = fma(multiply(load(x + at, i, size), load(query_w + w, i, size)), load(key + at, i, size), a)
            dot = total(a) * inverse_rms(x + at, size, eps) / np.sqrt(np.float32(size))
            way = np.float32(1) if dot > 0 else np.float32(-1) if dot < 0 else dot
            level = way * np.sqrt(max(abs(dot), np.float32(1e-6)))
            gate = splat(np.float32(1) / (np.float32(1) + np.exp(-level)))
            for i in range(0, size, LANES):
                store(gated + at, i, size, multiply(gate, load(value + 4 * t * value_stride, i, size)))
            norm_row(gated + at, conv_w + w, size, eps, conv + at)


def ple_gate(
    streams: Tensor, key: Tensor, value: Tensor, query_weight: Tensor, conv_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    rows, count, size = streams.shape
    assert streams.is_contiguous() and key.is_contiguous() and value.stride(1) == 1
    gated, conv = torch.empty(rows, count, size), torch.empty(rows, count, size)
    spread(
        _kernel, rows, 128, 0, streams.data_ptr(), key.data_ptr(), value.data_ptr(), value.stride(0), count, size,
        query_weight.data_ptr(), conv_weight.data_ptr(), eps, gated.data_ptr(), conv.data_ptr(),
    )  # fmt: skip
    return gated, conv
