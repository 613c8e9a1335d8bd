"""Compiled body of gated_delta_prep.py."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deltagram.kernels._compiled import inlined
from deltagram.kernels._threads import spread, threaded
from deltagram.kernels._vectors import LANES, get, load, multiply, put, splat, square_sum, store


@inlined
def unit_row(x, size, length, y):  # type: ignore[no-untyped-def]
    """y = x / |x| * length. y may be x."""
    scale = splat(np.float32(1) / np.sqrt(square_sum(x, size) + np.float32(1e-6)) * length)
    for i in range(0, size, LANES):
        store(y, i, size, multiply(load(x, i, size), scale))


@inlined
def log_decay(a, A_log, dt_bias, hv):  # type: ignore[no-untyped-def]
    step = get(a, hv) + get(dt_bias, hv)
    softplus = max(step, np.float32(0)) + np.log1p(np.exp(-abs(step)))
    return -np.exp(get(A_log, hv)) * softplus


@inlined
def strength(b, hv):  # type: ignore[no-untyped-def]
    return np.float32(1) / (np.float32(1) + np.exp(-get(b, hv)))


@threaded
def _kernel(
    first: int, last: int, scratch: int, qkv: int, qkv_stride: int, a: int, a_stride: int, b: int, b_stride: int,
    A_log: int, dt_bias: int, rows: int, heads: int, value_heads: int, size: int, qk: int, gates: int,
) -> None:  # fmt: skip
    shrink = np.float32(1) / np.sqrt(np.float32(size))
    for t in range(first, last):
        for part in range(2):
            for h in range(heads):
                x = qkv + 4 * (t * qkv_stride + (part * heads + h) * size)
                y = qk + 4 * (((part * rows + t) * heads + h) * size)
                unit_row(x, size, shrink if part == 0 else np.float32(1), y)
        for hv in range(value_heads):
            put(gates, t * value_heads + hv, log_decay(a + 4 * t * a_stride, A_log, dt_bias, hv))
            put(gates, (rows + t) * value_heads + hv, strength(b + 4 * t * b_stride, hv))


def gated_delta_prep(
    qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, num_key_heads: int, key_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, value_heads = a.shape
    assert qkv.stride(1) == 1 and a.stride(1) == 1 and b.stride(1) == 1
    q, k = torch.empty(2, rows, num_key_heads, key_dim).unbind()
    g, beta = torch.empty(2, rows, value_heads).unbind()
    spread(
        _kernel, rows, 128, 0, qkv.data_ptr(), qkv.stride(0), a.data_ptr(), a.stride(0), b.data_ptr(), b.stride(0),
        A_log.data_ptr(), dt_bias.data_ptr(), rows, num_key_heads, value_heads, key_dim, q.data_ptr(),
        g.data_ptr(),
    )  # fmt: skip
    v = qkv[:, 2 * num_key_heads * key_dim :].view(rows, value_heads, -1)
    return q, k, v, g, beta
