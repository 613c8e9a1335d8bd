"""Compiled body of gated_delta_chunk.py: the recurrence, four tokens at a time.

For tokens t = 0 .. 3 with decays d, P_t = d_0 .. d_t and D_ts = d_(s+1) .. d_t, S being the state before them:

    u_t = beta_t (v_t - P_t S k_t - sum over s < t of D_ts (k_t . k_s) u_s)
    o_t = P_t S q_t + sum over s <= t of D_ts (q_t . k_s) u_s
    S  <- P_3 S + sum over s of D_3s u_s k_s^T

so that S is read twice and written once in four tokens. Larger chunks, which a GPU takes, are more work on a CPU. A
state lies in panels of 16 values: [V / 16, K, 16], as a weight does, and S k, S q are a product with it.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from deltagram.kernels._compiled import inlined
from deltagram.kernels._packed import room
from deltagram.kernels._products import PRODUCT, product
from deltagram.kernels._threads import spread, threaded
from deltagram.kernels._vectors import LANES, fma, get, get_int, load, multiply, put, splat, store, subtract, total

FOUR = 4  # tokens; fewer are filled up with tokens that change nothing: k = 0, decay 1, beta 0
WORK = 32  # numbers that four tokens have in common: (k_t . k_s) and (q_t . k_s)


@inlined
def to_panels(held, key_dim, value_dim, fresh, s):  # type: ignore[no-untyped-def]
    """A state [V, K] as panels; zero if `fresh`."""
    for i in range((value_dim + LANES - 1) // LANES * LANES):
        line = s + 4 * (i // LANES * key_dim * LANES + i % LANES)
        for j in range(key_dim):
            there = i < value_dim and not fresh
            put(line, j * LANES, get(held, i * key_dim + j) if there else np.float32(0))


@inlined
def from_panels(s, key_dim, value_dim, held):  # type: ignore[no-untyped-def]
    for i in range(value_dim):
        line = s + 4 * (i // LANES * key_dim * LANES + i % LANES)
        for j in range(key_dim):
            put(held, i * key_dim + j, get(line, j * LANES))


@inlined
def _dot(x, y, n):  # type: ignore[no-untyped-def]
    a = splat(0.0)
    for i in range(0, n, LANES):
        a = fma(load(x, i, n), load(y, i, n), a)
    return total(a)


@inlined
def dots(kq, key_dim, work):  # type: ignore[no-untyped-def]
    """Of four keys and then four queries, rows of kq: (k_t . k_s) for s < t and, from 16 on, (q_t . k_s) for s <= t."""
    for t in range(FOUR):
        for s in range(t + 1):
            if s < t:
                put(work, FOUR * t + s, _dot(kq + 4 * t * key_dim, kq + 4 * s * key_dim, key_dim))
            put(work, 16 + FOUR * t + s, _dot(kq + 4 * (FOUR + t) * key_dim, kq + 4 * s * key_dim, key_dim))


@inlined
def four_tokens(  # type: ignore[no-untyped-def]
    s, k, key_dim, read, read_step, v, v_step, value_dim, decay, beta, work, some, out, out_step
):
    """`some` of four tokens of one value head; read: S k of each, then S q, `read_step` numbers apart; decay and beta
    of each at their addresses."""
    d0, d1, d2, d3 = get(decay, 0), get(decay, 1), get(decay, 2), get(decay, 3)
    p1 = d0 * d1
    p2 = p1 * d2
    p3 = p2 * d3
    d21, d32 = d2 * d1, d3 * d2
    d321 = d3 * d21
    queries = read + 16 * read_step
    for i in range(0, value_dim, LANES):
        a = multiply(splat(d0), load(read, i, i + LANES))
        u0 = multiply(splat(get(beta, 0)), subtract(load(v, i, value_dim), a))
        a = multiply(splat(p1), load(read + 4 * read_step, i, i + LANES))
        a = fma(splat(d1 * get(work, 4)), u0, a)
        u1 = multiply(splat(get(beta, 1)), subtract(load(v + 4 * v_step, i, value_dim), a))
        a = multiply(splat(p2), load(read + 8 * read_step, i, i + LANES))
        a = fma(splat(d2 * get(work, 9)), u1, fma(splat(d21 * get(work, 8)), u0, a))
        u2 = multiply(splat(get(beta, 2)), subtract(load(v + 8 * v_step, i, value_dim), a))
        a = multiply(splat(p3), load(read + 12 * read_step, i, i + LANES))
        a = fma(splat(d32 * get(work, 13)), u1, fma(splat(d321 * get(work, 12)), u0, a))
        a = fma(splat(d3 * get(work, 14)), u2, a)
        u3 = multiply(splat(get(beta, 3)), subtract(load(v + 12 * v_step, i, value_dim), a))
        o = multiply(splat(d0), load(queries, i, i + LANES))
        store(out, i, value_dim, fma(splat(get(work, 16)), u0, o))
        if some > 1:
            o = multiply(splat(p1), load(queries + 4 * read_step, i, i + LANES))
            o = fma(splat(get(work, 21)), u1, fma(splat(d1 * get(work, 20)), u0, o))
            store(out + 4 * out_step, i, value_dim, o)
        if some > 2:
            o = multiply(splat(p2), load(queries + 8 * read_step, i, i + LANES))
            o = fma(splat(d2 * get(work, 25)), u1, fma(splat(d21 * get(work, 24)), u0, o))
            store(out + 8 * out_step, i, value_dim, fma(splat(get(work, 26)), u2, o))
        if some > 3:
            o = multiply(splat(p3), load(queries + 12 * read_step, i, i + LANES))
            o = fma(splat(d32 * get(work, 29)), u1, fma(splat(d321 * get(work, 28)), u0, o))
            o = fma(splat(get(work, 31)), u3, fma(splat(d3 * get(work, 30)), u2, o))
            store(out + 12 * out_step, i, value_dim, o)
        u0, u1, u2 = multiply(splat(d321), u0), multiply(splat(d32), u1), multiply(splat(d3), u2)
        kept, panel = splat(p3), s + 4 * i * key_dim
        for j in range(key_dim):
            b = multiply(kept, load(panel, LANES * j, LANES * j + LANES))
            b = fma(splat(get(k, key_dim + j)), u1, fma(splat(get(k, j)), u0, b))
            b = fma(splat(get(k, 3 * key_dim + j)), u3, fma(splat(get(k, 2 * key_dim + j)), u2, b))
            store(panel, LANES * j, LANES * j + LANES, b)


@inlined
def copy_row(x, n, y):  # type: ignore[no-untyped-def]
    for i in range(0, n, LANES):
        store(y, i, n, load(x, i, n))


@inlined
def no_token(kq, key_dim, i, decay, beta):  # type: ignore[no-untyped-def]
    """Token i of four is one that changes nothing."""
    for j in range(0, key_dim, LANES):
        store(kq + 4 * i * key_dim, j, key_dim, splat(0.0))
        store(kq + 4 * (FOUR + i) * key_dim, j, key_dim, splat(0.0))
    put(decay, i, np.float32(1))
    put(beta, i, np.float32(0))


@threaded
def _kernel(
    first: int, last: int, scratch: int, f: int, q: int, q_stride: int, k: int, k_stride: int, v: int, v_stride: int,
    g: int, beta: int, heads: int, value_heads: int, key_dim: int, value_dim: int, width: int, state: int,
    sequences: int, kind: int, cu_tokens: int, start: int, slot: int, out: int,
) -> None:  # fmt: skip
    kq = scratch + 4 * key_dim * width
    read = kq + 8 * FOUR * key_dim
    work = read + 8 * FOUR * width
    decays = work + 4 * WORK
    betas = decays + 4 * FOUR
    values = betas + 4 * FOUR
    for unit in range(first, last):
        hv, n = unit // sequences, unit % sequences
        if get_int(kind, n) != 2:
            continue
        h = hv // (value_heads // heads)
        held = state + 4 * (get_int(slot, n) * value_heads + hv) * value_dim * key_dim
        to_panels(held, key_dim, value_dim, get_int(start, n) == 0, scratch)
        end = get_int(cu_tokens, n + 1)
        for t in range(get_int(cu_tokens, n), end, FOUR):
            some = min(FOUR, end - t)
            for i in range(FOUR):
                if i < some:
                    copy_row(k + 4 * ((t + i) * k_stride + h * key_dim), key_dim, kq + 4 * i * key_dim)
                    copy_row(q + 4 * ((t + i) * q_stride + h * key_dim), key_dim, kq + 4 * (FOUR + i) * key_dim)
                    copy_row(v + 4 * ((t + i) * v_stride + hv * value_dim), value_dim, values + 4 * i * width)
                    put(decays, i, np.exp(get(g, (t + i) * value_heads + hv)))
                    put(betas, i, get(beta, (t + i) * value_heads + hv))
                else:
                    no_token(kq, key_dim, i, decays, betas)
                    copy_row(values, value_dim, values + 4 * i * width)
            dots(kq, key_dim, work)
            product(f, kq, key_dim, 2 * FOUR, key_dim, scratch, 0, width, read, width)
            four_tokens(
                scratch, kq, key_dim, read, width, values, width, value_dim, decays, betas, work, some,
                out + 4 * (t * value_heads + hv) * value_dim, value_heads * value_dim,
            )  # fmt: skip
        from_panels(scratch, key_dim, value_dim, held)


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
        _kernel, units, 1 if len(q) >= 64 else units,
        (key_dim + 3 * FOUR) * room(value_dim) + 2 * FOUR * (key_dim + 1) + WORK, PRODUCT, q.data_ptr(), q.stride(0),
        k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), g.data_ptr(), beta.data_ptr(), heads, value_heads,
        key_dim, value_dim, room(value_dim), state.data_ptr(), len(kind), kind.data_ptr(), cu_tokens.data_ptr(),
        start.data_ptr(), slot.data_ptr(), out.data_ptr(),
    )  # fmt: skip
