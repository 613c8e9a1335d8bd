"""Gated delta rule, one token at a time: the decode and verify sequences of a step.

    S <- exp(g) S;  u = beta (v - S k);  S <- S + u k^T;  o = S q         per value head, S [V, K] in fp32

Each key head serves HV / H consecutive value heads. Rows of tokens that are neither decode nor verify are left as they
are.

A state is stored now and then, and by replay it is whole all the same. A sequence's first token is the one last
sampled, so it is certain; those after it are drafts that may be rejected. The state that is stored has taken the first
token and no draft, and only a sequence that `stores` stores it; each other token leaves its k, v, g and beta in a ring,
at its absolute position modulo R. `pending` counts the certain tokens that the stored state has yet to take, accepted
drafts among them: they lie in the ring at positions start - pending to start - 1 and are taken before the first token.
So a step reads a state once and writes it at most once, whatever was accepted, and gives the bits of decoding token by
token. Without rings a sequence has one token, nothing is pending and all is stored. No program writes a ring entry that
another may still read if R is at least the most that may be pending and the most that a step takes.

Shapes: q, k [T, H, K] (k normalised, q normalised and scaled), v [T, HV, V] (rows may be strided), g and beta [T, HV]
fp32; state [slots, HV, V, K], updated in place, rounded to its dtype after every token; kind, start, pending, stores,
slot [N] and cu_tokens [N + 1]: int32; out [T, HV, V], written in place; rings: k [slots, R, H, K], v [slots, R, HV, V],
gates [slots, R, 2, HV] fp32 (g, then beta), updated in place, or None.
Source: Gated Delta Networks, https://arxiv.org/abs/2412.06464, eq. 10.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._triton import Build, Impl, choose, jit, on_cpu, power_of_two, tl

_VERIFY = 1  # kinds: decode 0, verify 1, prefill 2, padding 3; decode and verify come first in a step


def gated_delta_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    kind: Tensor,
    cu_tokens: Tensor,
    start: Tensor,
    pending: Tensor,
    stores: Tensor,
    slot: Tensor,
    out: Tensor,
    rings: tuple[Tensor, Tensor, Tensor] | None = None,
    impl: Impl = None,
) -> None:
    """See the file's docstring."""
    body = choose(impl, q, _reference, _launch, _compiled if state.dtype == torch.float32 else None)
    body(q, k, v, g, beta, state, kind, cu_tokens, start, pending, stores, slot, out, rings)


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    kind: Tensor,
    cu_tokens: Tensor,
    start: Tensor,
    pending: Tensor,
    stores: Tensor,
    slot: Tensor,
    out: Tensor,
    rings: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    rows = int((kind <= _VERIFY).sum())
    if rows == 0:
        return
    dtype, slots = torch.float64 if state.dtype == torch.float64 else torch.float32, slot[:rows].long()
    s = state.index_select(0, slots).to(dtype)
    if rings is None:  # the first `rows` tokens
        state.index_copy_(0, slots, _take(s, k[:rows], v[:rows], g[:rows], beta[:rows]).to(state.dtype))
        out[:rows] = _read(s.to(state.dtype).to(dtype), q[:rows])
        return
    k_ring, v_ring, gate_ring = rings
    length, behind = k_ring.shape[1], pending[:rows].long()
    first, begin, new = start[:rows].long(), cu_tokens[:rows].long(), cu_tokens[: rows + 1].diff().long()
    for i in range(-int(behind.max()), int(new.max())):  # tokens at start + i of every sequence that has one there
        one = ((i >= -behind) & (i < new)).nonzero().squeeze(1)
        at, entry, token = slots[one], (first[one] + i) % length, begin[one] + i
        if i < 0:
            gate = gate_ring[at, entry]
            taken = _take(s[one], k_ring[at, entry], v_ring[at, entry], gate[:, 0], gate[:, 1])
        else:
            taken = _take(s[one], k[token], v[token], g[token], beta[token])
        rounded = taken.to(state.dtype)
        s[one] = rounded.to(dtype)
        if i >= 0:
            out[token] = _read(s[one], q[token]).to(out.dtype)
        if i == 0:
            kept = stores[one] > 0
            state[at[kept]] = rounded[kept]
            at, entry, token = at[~kept], entry[~kept], token[~kept]
        if i >= 0:
            k_ring[at, entry], v_ring[at, entry] = k[token], v[token]
            gate_ring[at, entry] = torch.stack((g[token], beta[token]), 1)


def _take(s: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The states s [n, HV, V, K] after one more token each, in place."""
    rows, value_heads, value_dim, key_dim = s.shape
    grouped = rows * k.shape[1]  # the value heads of one key head share its k and q
    s *= g.to(s.dtype).exp()[:, :, None, None]
    key = k.to(s.dtype).reshape(grouped, 1, key_dim)
    flat = s.view(grouped, -1, key_dim)
    seen = (flat @ key.transpose(1, 2)).view(rows, value_heads, value_dim)
    u = (v.to(s.dtype) - seen) * beta.to(s.dtype)[:, :, None]
    flat.baddbmm_(u.view(grouped, -1, 1), key)
    return s


def _read(s: Tensor, q: Tensor) -> Tensor:
    """o [n, HV, V] of states s and queries q [n, H, K]."""
    rows, value_heads, value_dim, key_dim = s.shape
    grouped = rows * q.shape[1]
    query = q.to(s.dtype).reshape(grouped, key_dim, 1)
    return (s.view(grouped, -1, key_dim) @ query).view(rows, value_heads, value_dim)


_compiled = on_cpu("gated_delta_recurrent")


@jit
def _token(s, k, v, g, beta):  # type: ignore[no-untyped-def]
    """The state after one more token."""
    s = s * tl.exp(g)
    u = beta * (v - tl.sum(s * k[None, :], 1))
    return s + u[:, None] * k[None, :]


@jit
def _kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    g,
    beta,
    state,
    kind,
    cu_tokens,
    start,
    pending,
    stores,
    slot,
    out,
    k_ring,
    v_ring,
    gate_ring,
    q_stride,
    k_stride,
    v_stride,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,  # entries of a ring; 0 without rings
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    n = tl.program_id(2)
    if tl.load(kind + n) > 1:
        return
    hv = tl.program_id(1)
    h = hv // (HV // H)
    line = tl.load(slot + n).to(tl.int64)
    begin = tl.load(cu_tokens + n).to(tl.int64)
    key = tl.arange(0, BK)
    value = tl.program_id(0) * BV + tl.arange(0, BV)
    at = state + (line * HV + hv) * (V * K) + value[:, None] * K + key[None, :]
    inside = (value < V)[:, None] & (key < K)[None, :]
    s = tl.load(at, mask=inside, other=0).to(tl.float32)
    if R == 0:
        k_t = tl.load(k + begin * k_stride + h * K + key, mask=key < K, other=0).to(tl.float32)
        v_t = tl.load(v + begin * v_stride + hv * V + value, mask=value < V, other=0).to(tl.float32)
        q_t = tl.load(q + begin * q_stride + h * K + key, mask=key < K, other=0).to(tl.float32)
        s = _token(s, k_t, v_t, tl.load(g + begin * HV + hv), tl.load(beta + begin * HV + hv))
        stored = s.to(state.dtype.element_ty)
        tl.store(at, stored, mask=inside)
        o = tl.sum(stored.to(tl.float32) * q_t[None, :], 1)
        tl.store(out + (begin * HV + hv) * V + value, o.to(out.dtype.element_ty), mask=value < V)
    else:
        num_new = (tl.load(cu_tokens + n + 1) - begin).to(tl.int32)
        first = tl.load(start + n)
        store = tl.load(stores + n) > 0
        for i in range(-tl.load(pending + n), num_new):
            entry = line * R + (first + i) % R
            token = begin + tl.maximum(i, 0)
            if i < 0:
                k_in = tl.load(k_ring + (entry * H + h) * K + key, mask=key < K, other=0)
                v_in = tl.load(v_ring + (entry * HV + hv) * V + value, mask=value < V, other=0)
                g_t = tl.load(gate_ring + entry * (2 * HV) + hv)
                beta_t = tl.load(gate_ring + entry * (2 * HV) + HV + hv)
            else:
                k_in = tl.load(k + token * k_stride + h * K + key, mask=key < K, other=0)
                v_in = tl.load(v + token * v_stride + hv * V + value, mask=value < V, other=0)
                g_t = tl.load(g + token * HV + hv)
                beta_t = tl.load(beta + token * HV + hv)
            q_t = tl.load(q + token * q_stride + h * K + key, mask=(key < K) & (i >= 0), other=0).to(tl.float32)
            s = _token(s, k_in.to(tl.float32), v_in.to(tl.float32), g_t, beta_t)
            stored = s.to(state.dtype.element_ty)
            s = stored.to(tl.float32)
            o = tl.sum(s * q_t[None, :], 1)
            if i >= 0:
                tl.store(out + (token * HV + hv) * V + value, o.to(out.dtype.element_ty), mask=value < V)
            if (i == 0) & store:
                tl.store(at, stored, mask=inside)
            elif i >= 0:
                tl.store(v_ring + (entry * HV + hv) * V + value, v_in, mask=value < V)
                if tl.program_id(0) == 0:
                    tl.store(gate_ring + entry * (2 * HV) + hv, g_t)
                    tl.store(gate_ring + entry * (2 * HV) + HV + hv, beta_t)
                    if hv % (HV // H) == 0:
                        tl.store(k_ring + (entry * H + h) * K + key, k_in, mask=key < K)


# Whether a product and a sum become one rounding is the compiler's choice, and it chose differently with and without
# rings.
_OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}


def _tiles(key_dim: int, value_dim: int) -> dict[str, int]:
    """A program's part of a state: by the model's shapes alone, since it decides the order of sums."""
    columns = power_of_two(key_dim)
    return {"BK": columns, "BV": max(1, min(power_of_two(value_dim), 1024 // columns))}


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    kind: Tensor,
    cu_tokens: Tensor,
    start: Tensor,
    pending: Tensor,
    stores: Tensor,
    slot: Tensor,
    out: Tensor,
    rings: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    heads, key_dim = k.shape[1:]
    value_heads, value_dim = v.shape[1:]
    assert state.is_contiguous() and out.is_contiguous() and g.is_contiguous() and beta.is_contiguous()
    assert q.stride()[1:] == k.stride()[1:] == (key_dim, 1) and v.stride()[1:] == (value_dim, 1)
    length = rings[0].shape[1] if rings is not None else 0
    k_ring, v_ring, gate_ring = rings if rings is not None else (k, v, g)
    tiles = _tiles(key_dim, value_dim)
    grid = (-(-value_dim // tiles["BV"]), value_heads, len(kind))
    _kernel[grid](
        q, k, v, g, beta, state, kind, cu_tokens, start, pending, stores, slot, out, k_ring, v_ring, gate_ring,
        q.stride(0), k.stride(0), v.stride(0), H=heads, HV=value_heads, K=key_dim, V=value_dim, R=length, **tiles,
        **_OPTIONS,
    )  # fmt: skip


def ahead_of_time() -> list[Build]:
    builds = []
    indices = ("kind", "cu_tokens", "start", "pending", "stores", "slot")
    for dtype, state, key_dim, value_dim, ring in (
        ("*bf16", "*fp32", 128, 128, 0),
        ("*bf16", "*fp32", 128, 128, 11),
        ("*bf16", "*bf16", 128, 128, 0),
        ("*fp32", "*fp32", 64, 256, 3),
    ):
        types = dict.fromkeys(("q", "k", "v", "out", "k_ring", "v_ring"), dtype) | dict.fromkeys(indices, "*i32")
        types |= {"g": "*fp32", "beta": "*fp32", "gate_ring": "*fp32", "state": state}
        types |= dict.fromkeys(("q_stride", "k_stride", "v_stride"), "i32")
        constants = {"H": 16, "HV": 32, "K": key_dim, "V": value_dim, "R": ring, **_tiles(key_dim, value_dim)}
        builds.append(Build(_kernel, types, constants, _OPTIONS))
    return builds
