"""Compiled body of gated_delta_recurrent.py: a row of the state S [V, K] at a time, in vectors over K."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from deltagram.kernels._compiled import inlined
from deltagram.kernels._threads import spread, threaded
from deltagram.kernels._vectors import LANES, fma, get, get_int, load, multiply, put, splat, store, total


@inlined
def one_token(s, k, v, q, key_dim, value_dim, decay, beta, into, out):  # type: ignore[no-untyped-def]
    """into = exp(g) s + u k^T and out = into q, all rows; into may be s. out 0: not wanted."""
    for row in range(value_dim):
        line, target = s + 4 * row * key_dim, into + 4 * row * key_dim
        seen = splat(0.0)
        for i in range(0, key_dim, LANES):
            seen = fma(load(line, i, key_dim), load(k, i, key_dim), seen)
        u = splat(beta * (get(v, row) - decay * total(seen)))
        kept, read = splat(decay), splat(0.0)
        for i in range(0, key_dim, LANES):
            new = fma(u, load(k, i, key_dim), multiply(kept, load(line, i, key_dim)))
            store(target, i, key_dim, new)
            read = fma(new, load(q, i, key_dim), read)
        if out != 0:
            put(out, row, total(read))


@threaded
def _kernel(
    first: int, last: int, scratch: int, q: int, q_stride: int, k: int, k_stride: int, v: int, v_stride: int, g: int,
    beta: int, heads: int, value_heads: int, key_dim: int, value_dim: int, state: int, kind: int, cu_tokens: int,
    start: int, pending: int, stores: int, slot: int, out: int, k_ring: int, v_ring: int, gate_ring: int,
    length: int,
) -> None:  # fmt: skip
    for unit in range(first, last):
        n, hv = unit // value_heads, unit % value_heads
        if get_int(kind, n) > 1:
            continue
        h, line, begin = hv // (value_heads // heads), get_int(slot, n), get_int(cu_tokens, n)
        s = state + 4 * (line * value_heads + hv) * value_dim * key_dim
        taken = s  # where the state of this step's tokens is: what is not stored goes to scratch
        behind, stored = 0, 1
        if length > 0:
            behind, stored = get_int(pending, n), get_int(stores, n)
        for i in range(-behind, get_int(cu_tokens, n + 1) - begin):
            entry, t = line * length, begin + i
            if length > 0:
                entry += (get_int(start, n) + i) % length
            into = s if stored > 0 and i <= 0 else scratch
            if i < 0:
                gates = gate_ring + 4 * (entry * 2 * value_heads + hv)
                one_token(
                    taken, k_ring + 4 * (entry * heads + h) * key_dim, v_ring + 4 * (entry * value_heads + hv) *
                    value_dim, q, key_dim, value_dim, np.exp(get(gates, 0)), get(gates, value_heads), into, 0,
                )  # fmt: skip
                taken = into
                continue
            k_t, v_t = k + 4 * (t * k_stride + h * key_dim), v + 4 * (t * v_stride + hv * value_dim)
            decay, strength = get(g, t * value_heads + hv), get(beta, t * value_heads + hv)
            one_token(
                taken, k_t, v_t, q + 4 * (t * q_stride + h * key_dim), key_dim, value_dim, np.exp(decay), strength,
                into, out + 4 * (t * value_heads + hv) * value_dim,
            )  # fmt: skip
            taken = into
            if i > 0 or stored == 0:
                for j in range(0, value_dim, LANES):
                    store(v_ring + 4 * (entry * value_heads + hv) * value_dim, j, value_dim, load(v_t, j, value_dim))
                put(gate_ring, entry * 2 * value_heads + hv, decay)
                put(gate_ring, (entry * 2 + 1) * value_heads + hv, strength)
                if hv % (value_heads // heads) == 0:
                    for j in range(0, key_dim, LANES):
                        store(k_ring + 4 * (entry * heads + h) * key_dim, j, key_dim, load(k_t, j, key_dim))


def gated_delta_recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, kind: Tensor, cu_tokens: Tensor, start:
    Tensor, pending: Tensor, stores: Tensor, slot: Tensor, out: Tensor,
    rings: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    heads, key_dim = k.shape[1:]
    value_heads, value_dim = v.shape[1:]
    assert state.is_contiguous() and out.is_contiguous() and g.is_contiguous() and beta.is_contiguous()
    assert q.stride()[1:] == k.stride()[1:] == (key_dim, 1) and v.stride()[1:] == (value_dim, 1)
    k_ring, v_ring, gate_ring = (ring.data_ptr() for ring in rings) if rings is not None else (0, 0, 0)
    units = len(kind) * value_heads
    spread(
        _kernel, units, units, key_dim * value_dim if rings else 0, q.data_ptr(), q.stride(0), k.data_ptr(),
        k.stride(0), v.data_ptr(), v.stride(0), g.data_ptr(), beta.data_ptr(), heads, value_heads, key_dim, value_dim,
        state.data_ptr(), kind.data_ptr(), cu_tokens.data_ptr(), start.data_ptr(), pending.data_ptr(),
        stores.data_ptr(), slot.data_ptr(), out.data_ptr(), k_ring, v_ring, gate_ring,
        rings[0].shape[1] if rings is not None else 0,
    )  # fmt: skip
