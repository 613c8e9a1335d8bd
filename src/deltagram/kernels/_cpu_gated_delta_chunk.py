"""Compiled body of gated_delta_chunk.py: the recurrence itself, token by token, which on a CPU is less work than its
chunked form.

Each head's state is turned to [K, V] first, so that vectors lie along V and no sum goes over lanes.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from deltagram.kernels._compiled import inlined
from deltagram.kernels._packed import room
from deltagram.kernels._threads import spread, threaded
from deltagram.kernels._vectors import LANES, add, fma, get, get_int, load, multiply, put, splat, store, subtract


@inlined
def _token(s, width, i, k, q, key_dim, v, value_dim, decay, beta, out):  # type: ignore[no-untyped-def]
    """One token of sixteen values from the i-th on. Four sums side by side: one would wait for each addition."""
    line, end, step = s + 4 * i, LANES, 4 * width  # whole vectors: a line has room for them
    a, b, c, d = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    j = 0
    while j + 3 < key_dim:
        at = line + j * step
        a = fma(splat(get(k, j)), load(at, 0, end), a)
        b = fma(splat(get(k, j + 1)), load(at + step, 0, end), b)
        c = fma(splat(get(k, j + 2)), load(at + 2 * step, 0, end), c)
        d = fma(splat(get(k, j + 3)), load(at + 3 * step, 0, end), d)
        j += 4
    while j < key_dim:
        a = fma(splat(get(k, j)), load(line + j * step, 0, end), a)
        j += 1
    kept = splat(decay)
    seen = multiply(kept, add(add(a, b), add(c, d)))
    u = multiply(splat(beta), subtract(load(v, i, value_dim), seen))
    a, b, c, d = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    j = 0
    while j + 3 < key_dim:
        at = line + j * step
        w = fma(u, splat(get(k, j)), multiply(kept, load(at, 0, end)))
        x = fma(u, splat(get(k, j + 1)), multiply(kept, load(at + step, 0, end)))
        y = fma(u, splat(get(k, j + 2)), multiply(kept, load(at + 2 * step, 0, end)))
        z = fma(u, splat(get(k, j + 3)), multiply(kept, load(at + 3 * step, 0, end)))
        store(at, 0, end, w)
        store(at + step, 0, end, x)
        store(at + 2 * step, 0, end, y)
        store(at + 3 * step, 0, end, z)
        a = fma(splat(get(q, j)), w, a)
        b = fma(splat(get(q, j + 1)), x, b)
        c = fma(splat(get(q, j + 2)), y, c)
        d = fma(splat(get(q, j + 3)), z, d)
        j += 4
    while j < key_dim:
        w = fma(u, splat(get(k, j)), multiply(kept, load(line + j * step, 0, end)))
        store(line + j * step, 0, end, w)
        a = fma(splat(get(q, j)), w, a)
        j += 1
    store(out, i, value_dim, add(add(a, b), add(c, d)))


@threaded
def _kernel(
    first: int, last: int, scratch: int, q: int, q_stride: int, k: int, k_stride: int, v: int, v_stride: int, g: int,
    beta: int, heads: int, value_heads: int, key_dim: int, value_dim: int, width: int, state: int, sequences: int,
    kind: int, cu_tokens: int, start: int, slot: int, out: int,
) -> None:  # fmt: skip
    for unit in range(first, last):
        hv, n = unit // sequences, unit % sequences
        if get_int(kind, n) != 2:
            continue
        h = hv // (value_heads // heads)
        held = state + 4 * (get_int(slot, n) * value_heads + hv) * value_dim * key_dim
        fresh = get_int(start, n) == 0
        for j in range(key_dim):
            for i in range(width):
                there = i < value_dim and not fresh
                put(scratch, j * width + i, get(held, i * key_dim + j) if there else np.float32(0))
        for t in range(get_int(cu_tokens, n), get_int(cu_tokens, n + 1)):
            decay, strength = np.exp(get(g, t * value_heads + hv)), get(beta, t * value_heads + hv)
            k_t, q_t = k + 4 * (t * k_stride + h * key_dim), q + 4 * (t * q_stride + h * key_dim)
            v_t, o_t = v + 4 * (t * v_stride + hv * value_dim), out + 4 * (t * value_heads + hv) * value_dim
            for i in range(0, value_dim, LANES):
                _token(scratch, width, i, k_t, q_t, key_dim, v_t, value_dim, decay, strength, o_t)
        for i in range(value_dim):
            for j in range(key_dim):
                put(held, i * key_dim + j, get(scratch, j * width + i))


def gated_delta_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, chunks: Tensor, kind: Tensor, cu_tokens:
    Tensor, start: Tensor, slot: Tensor, out: Tensor,
) -> None:  # fmt: skip
    heads, key_dim = k.shape[1:]
    value_heads, value_dim = v.shape[1:]
    assert state.is_contiguous() and out.is_contiguous() and g.is_contiguous() and beta.is_contiguous()
    assert q.stride()[1:] == k.stride()[1:] == (key_dim, 1) and v.stride()[1:] == (value_dim, 1)
    units = value_heads * len(kind)
    spread(
        _kernel, units, 1 if len(q) >= 64 else units, key_dim * room(value_dim), q.data_ptr(), q.stride(0),
        k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), g.data_ptr(), beta.data_ptr(), heads, value_heads,
        key_dim, value_dim, room(value_dim), state.data_ptr(), len(kind), kind.data_ptr(), cu_tokens.data_ptr(),
        start.data_ptr(), slot.data_ptr(), out.data_ptr(),
    )  # fmt: skip
