"""Compiled body of rms_norm_gated.py."""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._compiled import inlined
from deltagram.kernels._threads import spread, threaded
from deltagram.kernels._vectors import LANES, get_int, inverse_rms, load, multiply, sigmoid, silu, splat, store


@inlined
def gated_row(x, z, w, size, eps, smooth, y):  # type: ignore[no-untyped-def]
    """One head: y = w * x / sqrt(mean(x^2) + eps) times silu(z), or sigmoid(z) if not `smooth`. y may be x."""
    scale = splat(inverse_rms(x, size, eps))
    for i in range(0, size, LANES):
        gate = load(z, i, size)
        gate = silu(gate) if smooth else sigmoid(gate)
        store(y, i, size, multiply(multiply(multiply(load(x, i, size), scale), load(w, i, size)), gate))


@threaded
def _kernel(
    first: int, last: int, scratch: int, x: int, z: int, z_stride: int, heads: int, size: int, w: int, sequences: int,
    cu_tokens: int, eps: float, smooth: int, y: int,
) -> None:  # fmt: skip
    real = get_int(cu_tokens, sequences)
    for t in range(first, last):
        for h in range(heads):
            at, out = x + 4 * (t * heads + h) * size, y + 4 * (t * heads + h) * size
            if t < real:
                gated_row(at, z + 4 * (t * z_stride + h * size), w, size, eps, smooth, out)
            else:
                for i in range(0, size, LANES):
                    store(out, i, size, splat(0.0))


def rms_norm_gated(x: Tensor, z: Tensor, weight: Tensor, cu_tokens: Tensor, eps: float, activation: str) -> Tensor:
    rows, heads, size = x.shape
    assert x.is_contiguous() and z.stride()[1:] == (size, 1) and weight.dtype == torch.float32
    y = torch.empty(rows, heads, size)
    spread(
        _kernel, rows, 128, 0, x.data_ptr(), z.data_ptr(), z.stride(0), heads, size, weight.data_ptr(), len(cu_tokens)
        - 1, cu_tokens.data_ptr(), eps, activation == "silu", y.data_ptr(),
    )  # fmt: skip
    return y
