"""Compiled body of rms_norm_gated.py."""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._threads import spread, threaded
from deltagram.kernels._vectors import LANES, get_int, inverse_rms, load, multiply, sigmoid, silu, splat, store


@threaded
def _kernel(
    first: int, last: int, scratch: int, x: int, z: int, z_stride: int, heads: int, size: int, w: int, sequences: int,
    cu_tokens: int, eps: float, smooth: int, y: int,
) -> None:  # fmt: skip
    real = get_int(cu_tokens, sequences)
    for t in range(first, last):
        for h in range(heads):
            at, gates, out = (
                x + 4 * (t * heads + h) * size,
                z + 4 * (t * z_stride + h * size),
                y + 4 * (t * heads + h) * size,
            )
            if t >= real:
                for i in range(0, size, LANES):
                    store(out, i, size, splat(0.0))
                continue
            scale = splat(inverse_rms(at, size, eps))
            for i in range(0, size, LANES):
                gate = load(gates, i, size)
                gate = silu(gate) if smooth else sigmoid(gate)
                store(out, i, size, multiply(multiply(multiply(load(at, i, size), scale), load(w, i, size)), gate))


def rms_norm_gated(x: Tensor, z: Tensor, weight: Tensor, cu_tokens: Tensor, eps: float, activation: str) -> Tensor:
    rows, heads, size = x.shape
    assert x.is_contiguous() and z.stride()[1:] == (size, 1) and weight.dtype == torch.float32
    y = torch.empty(rows, heads, size)
    spread(
        _kernel, rows, 128, 0, x.data_ptr(), z.data_ptr(), z.stride(0), heads, size, weight.data_ptr(), len(cu_tokens)
        - 1, cu_tokens.data_ptr(), eps, activation == "silu", y.data_ptr(),
    )  # fmt: skip
    return y
