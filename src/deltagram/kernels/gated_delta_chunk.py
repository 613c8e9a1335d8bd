"""Gated delta rule over the prefill sequences of a step, 64 tokens at a time.

The recurrence of gated_delta_recurrent, in its chunked (WY) form. With G the running sum of g inside a chunk and
D[i, j] = exp(G_i - G_j) for i >= j, the corrections U of a chunk that starts from state S solve

    (I + strictly_lower(beta_i D_ij k_i . k_j)) U = beta V - (beta exp(G) K) S^T
    O = exp(G) (Q S^T) + lower(D_ij q_i . k_j) U
    S <- exp(G_last) S + U^T (exp(G_last - G) K)

A sequence whose request has computed nothing before starts from zero, whatever its slot holds; any other starts from
its slot. The final state is written back to the slot. Rows of tokens that are not prefill are left as they are.

The kernels run it in two launches: one works out, for every chunk on its own, A = (I + ...)^-1 diag(beta) and
P = lower(D_ij q_i . k_j); the other walks each sequence's chunks, with U = A (V - exp(G) (K S^T)). fp32 inputs, and key
heads larger than 128, are taken token by token instead: exact, and slow. No published model has such key heads.

Shapes: q, k [T, H, K] (k normalised, q normalised and scaled), v [T, HV, V] (rows may be strided), g and beta [T, HV]
fp32; state [slots, HV, V, K], updated in place; chunks [NT, 2] (sequence, index; sequence -1 is padding, ordered by
sequence), kind [N], cu_tokens [N + 1], start [N], slot [N]: int32; out [T, HV, V], written in place.
Source: Parallelizing Linear Transformers with the Delta Rule, https://arxiv.org/abs/2406.06484, with the gate of
https://arxiv.org/abs/2412.06464.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._triton import Build, Impl, choose, jit, on_cpu, power_of_two, tl

CHUNK = 64


def gated_delta_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    chunks: Tensor,
    kind: Tensor,
    cu_tokens: Tensor,
    start: Tensor,
    slot: Tensor,
    out: Tensor,
    impl: Impl = None,
) -> None:
    """See the file's docstring."""
    body = choose(impl, q, _reference, _launch, _compiled if state.dtype == torch.float32 else None)
    body(q, k, v, g, beta, state, chunks, kind, cu_tokens, start, slot, out)


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    chunks: Tensor,
    kind: Tensor,
    cu_tokens: Tensor,
    start: Tensor,
    slot: Tensor,
    out: Tensor,
) -> None:
    chunks = chunks[chunks[:, 0] >= 0].long()
    if len(chunks) == 0:
        return
    dtype, group = torch.float64 if state.dtype == torch.float64 else torch.float32, v.shape[1] // k.shape[1]
    sequence, order = chunks.unbind(1)
    ticks = torch.arange(CHUNK, device=q.device)
    token = cu_tokens.long()[sequence][:, None] + order[:, None] * CHUNK + ticks  # [C, 64]
    valid = token < cu_tokens.long()[sequence + 1][:, None]
    token = torch.where(valid, token, 0)

    def chunked(x: Tensor) -> Tensor:  # [T, heads, ...] -> [C, heads, 64, ...], zero past the sequence's end
        rows = x[token].to(dtype)
        return rows.masked_fill_(~valid.view(*valid.shape, *[1] * (x.dim() - 1)), 0).transpose(1, 2)

    q_c, k_c, v_c, g_c, beta_c = (chunked(x) for x in (q, k, v, g, beta))
    decay_log = g_c.cumsum(-1)  # [C, HV, 64]
    decay = (decay_log[..., :, None] - decay_log[..., None, :]).tril_().exp_().tril_()  # upper part: exp(0), then cut
    key_products = (k_c @ k_c.transpose(-1, -2)).repeat_interleave(group, 1)
    query_products = (q_c @ k_c.transpose(-1, -2)).repeat_interleave(group, 1).mul_(decay)
    q_c, k_c = q_c.repeat_interleave(group, 1), k_c.repeat_interleave(group, 1)
    from_start = decay_log.exp().unsqueeze(-1)
    system = key_products.mul_(decay).mul_(beta_c.unsqueeze(-1))  # unit lower triangular: the diagonal is not read
    right = torch.cat((v_c * beta_c.unsqueeze(-1), k_c * (beta_c.unsqueeze(-1) * from_start)), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new_value, state_key = solved.split((v.shape[2], k.shape[2]), -1)
    q_c = q_c * from_start
    to_end = k_c * (decay_log[..., -1:] - decay_log).exp_().unsqueeze(-1)
    whole = from_start[..., -1:, :]  # [C, HV, 1, 1]

    slots = slot.long()[sequence]
    first = (start.long()[sequence] == 0) & (order == 0)
    for step in range(int(order.max()) + 1):
        c = (order == step).nonzero().squeeze(1)
        s = state[slots[c]].to(dtype).masked_fill_(first[c].view(-1, 1, 1, 1), 0)  # [P, HV, V, K]
        u = new_value[c] - state_key[c] @ s.transpose(-1, -2)
        o = q_c[c] @ s.transpose(-1, -2) + query_products[c] @ u
        state[slots[c]] = (s * whole[c] + u.transpose(-1, -2) @ to_end[c]).to(state.dtype)
        out[token[c][valid[c]]] = o.transpose(1, 2)[valid[c]].to(out.dtype)


_compiled = on_cpu("gated_delta_chunk")


@jit
def _invert_blocks(system):  # type: ignore[no-untyped-def]
    """The inverse of I plus the diagonal blocks of 16 of a strictly lower triangular [64, 64], by substitution, which
    is stable where powers of the matrix are not. Blocks off the diagonal are zero."""
    block = tl.arange(0, 4)
    within = tl.arange(0, 16)
    same = block[:, None, None, None] == block[None, None, :, None]
    diagonal = tl.sum(tl.where(same, tl.reshape(system, [4, 16, 4, 16]), 0.0), 2)  # [4, 16, 16]
    row, column = within[None, :, None], within[None, None, :]
    inverse = tl.zeros([4, 16, 16], tl.float32) + tl.where(row == column, 1.0, 0.0)
    for i in tl.static_range(15):  # row i is final; take it out of the rows below
        factor = tl.sum(tl.where(column == i, diagonal, 0.0), 2)  # [4, 16]: column i of L, zero down to row i
        final = tl.sum(tl.where(row == i, inverse, 0.0), 1)
        inverse -= factor[:, :, None] * final[:, None, :]
    return tl.reshape(tl.where(same, inverse[:, :, None, :], 0.0), [64, 64])


@jit
def _chunk_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    g,
    beta,
    chunks,
    cu_tokens,
    decays,  # G [T, HV]
    solved,  # A [T, HV, 64]
    mixed,  # P [T, HV, 64]
    q_stride,
    k_stride,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
):
    n = tl.load(chunks + 2 * tl.program_id(0))
    if n < 0:
        return
    hv = tl.program_id(1)
    h = hv // (HV // H)
    begin = tl.load(cu_tokens + n).to(tl.int64) + tl.load(chunks + 2 * tl.program_id(0) + 1) * 64
    end = tl.load(cu_tokens + n + 1)
    i = tl.arange(0, 64)
    key = tl.arange(0, BK)
    token = begin + i
    real = token < end
    inside = real[:, None] & (key < K)[None, :]
    k_c = tl.load(k + token[:, None] * k_stride + h * K + key[None, :], mask=inside, other=0)
    q_c = tl.load(q + token[:, None] * q_stride + h * K + key[None, :], mask=inside, other=0)
    decay_log = tl.cumsum(tl.load(g + token * HV + hv, mask=real, other=0))
    strength = tl.load(beta + token * HV + hv, mask=real, other=0)
    tl.store(decays + token * HV + hv, decay_log, mask=real)

    lower = i[:, None] >= i[None, :]
    decay = tl.exp(tl.where(lower, decay_log[:, None] - decay_log[None, :], float("-inf")))
    products = tl.dot(q_c, tl.trans(k_c)) * decay
    at = (token * HV + hv)[:, None] * 64 + i[None, :]
    tl.store(mixed + at, products.to(mixed.dtype.element_ty), mask=real[:, None])

    system = tl.dot(k_c, tl.trans(k_c)) * decay * strength[:, None]
    system = tl.where(i[:, None] > i[None, :], system, 0.0)
    inverse = _invert_blocks(system)
    # (I + L)^-1 = (I + M)^-1 D with M = D (L off the diagonal blocks); M^4 = 0, so (I + M)^-1 = (I - M)(I + M^2)
    below = tl.where((i[:, None] // 16) > (i[None, :] // 16), system, 0.0)
    step = tl.dot(inverse, below)
    even = tl.where(i[:, None] == i[None, :], 1.0, 0.0) - step
    even += tl.dot(even, tl.dot(step, step))
    inverse = tl.dot(even, inverse)
    tl.store(solved + at, (inverse * strength[None, :]).to(solved.dtype.element_ty), mask=real[:, None])


# Narrower tiles or a loop of one stage are no choice: built by ptxas 12.8 such a kernel now and then reads outside its
# shared memory (Triton issues 10486 and 11366; docs/gated-delta.md).
_BV, _STAGES = 32, 2


@jit
def _walk_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    decays,
    solved,
    mixed,
    state,
    kind,
    cu_tokens,
    start,
    slot,
    out,
    q_stride,
    k_stride,
    v_stride,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STAGES: tl.constexpr,
):
    n = tl.program_id(2)
    if tl.load(kind + n) != 2:
        return
    hv = tl.program_id(1)
    h = hv // (HV // H)
    i = tl.arange(0, 64)
    key = tl.arange(0, BK)
    value = tl.program_id(0) * BV + tl.arange(0, BV)
    begin = tl.load(cu_tokens + n).to(tl.int64)
    end = tl.load(cu_tokens + n + 1).to(tl.int64)
    line = state + (tl.load(slot + n).to(tl.int64) * HV + hv) * (V * K)
    at = line + value[None, :] * K + key[:, None]  # S^T [K, V]: so it is the right side of every product
    held = (value < V)[None, :] & (key < K)[:, None]
    s = tl.load(at, mask=held & (tl.load(start + n) > 0), other=0).to(tl.float32)
    for first in tl.range(begin, end, 64, num_stages=STAGES):
        token = first + i
        real = token < end
        keyed = real[:, None] & (key < K)[None, :]
        valued = real[:, None] & (value < V)[None, :]
        pair = (token * HV + hv)[:, None] * 64 + i[None, :]
        k_c = tl.load(k + token[:, None] * k_stride + h * K + key[None, :], mask=keyed, other=0)
        q_c = tl.load(q + token[:, None] * q_stride + h * K + key[None, :], mask=keyed, other=0)
        v_c = tl.load(v + token[:, None] * v_stride + hv * V + value[None, :], mask=valued, other=0)
        a_c = tl.load(solved + pair, mask=real[:, None], other=0)
        p_c = tl.load(mixed + pair, mask=real[:, None], other=0)
        decay_log = tl.load(decays + token * HV + hv, mask=real, other=0)
        whole = tl.load(decays + (tl.minimum(first + 64, end) - 1) * HV + hv)
        from_start = tl.exp(decay_log)[:, None]

        operand = s.to(k_c.dtype)
        rest = v_c.to(tl.float32) - from_start * tl.dot(k_c, operand)
        u = tl.dot(a_c, rest.to(k_c.dtype))
        o = from_start * tl.dot(q_c, operand)
        o += tl.dot(p_c, u.to(k_c.dtype))
        tl.store(out + (token * HV + hv)[:, None] * V + value[None, :], o.to(out.dtype.element_ty), mask=valued)
        to_end = (u * tl.exp(whole - decay_log)[:, None]).to(k_c.dtype)
        s = tl.dot(tl.trans(k_c), to_end, s * tl.exp(whole))
    tl.store(at, s.to(state.dtype.element_ty), mask=held)


@jit
def _token_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    g,
    beta,
    state,
    kind,
    cu_tokens,
    start,
    slot,
    out,
    q_stride,
    k_stride,
    v_stride,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    n = tl.program_id(2)
    if tl.load(kind + n) != 2:
        return
    hv = tl.program_id(1)
    h = hv // (HV // H)
    key = tl.arange(0, BK)
    value = tl.program_id(0) * BV + tl.arange(0, BV)
    keyed, valued = key < K, value < V
    line = state + (tl.load(slot + n).to(tl.int64) * HV + hv) * (V * K)
    at = line + value[:, None] * K + key[None, :]
    held = valued[:, None] & keyed[None, :]
    s = tl.load(at, mask=held & (tl.load(start + n) > 0), other=0).to(tl.float32)
    for token in range(tl.load(cu_tokens + n).to(tl.int64), tl.load(cu_tokens + n + 1).to(tl.int64)):
        k_t = tl.load(k + token * k_stride + h * K + key, mask=keyed, other=0).to(tl.float32)
        q_t = tl.load(q + token * q_stride + h * K + key, mask=keyed, other=0).to(tl.float32)
        v_t = tl.load(v + token * v_stride + hv * V + value, mask=valued, other=0).to(tl.float32)
        s *= tl.exp(tl.load(g + token * HV + hv))
        u = tl.load(beta + token * HV + hv) * (v_t - tl.sum(s * k_t[None, :], 1))
        s += u[:, None] * k_t[None, :]
        o = tl.sum(s * q_t[None, :], 1)
        tl.store(out + (token * HV + hv) * V + value, o.to(out.dtype.element_ty), mask=valued)
    tl.store(at, s.to(state.dtype.element_ty), mask=held)


def _token_by_token(dtype: torch.dtype, key_dim: int) -> bool:
    return dtype == torch.float32 or key_dim > 128


def _token_tiles(key_dim: int, value_dim: int) -> dict[str, int]:
    columns = power_of_two(key_dim)
    return {"BK": columns, "BV": max(1, min(power_of_two(value_dim), 1024 // columns))}


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    chunks: Tensor,
    kind: Tensor,
    cu_tokens: Tensor,
    start: Tensor,
    slot: Tensor,
    out: Tensor,
) -> None:
    num_tokens, heads, key_dim = k.shape
    value_heads, value_dim = v.shape[1:]
    assert state.is_contiguous() and out.is_contiguous() and g.is_contiguous() and beta.is_contiguous()
    assert q.stride()[1:] == k.stride()[1:] == (key_dim, 1) and v.stride()[1:] == (value_dim, 1)
    shape = {"H": heads, "HV": value_heads, "K": key_dim}
    strides = q.stride(0), k.stride(0), v.stride(0)
    programs = value_heads, len(kind)
    if _token_by_token(q.dtype, key_dim):
        tiles = _token_tiles(key_dim, value_dim)
        _token_kernel[-(-value_dim // tiles["BV"]), *programs](
            q, k, v, g, beta, state, kind, cu_tokens, start, slot, out, *strides,
            **shape, V=value_dim, **tiles, num_warps=1,
        )  # fmt: skip
        return
    columns = power_of_two(key_dim, 16)
    decays = torch.empty_like(g)
    solved, mixed = q.new_empty(2, num_tokens, value_heads, CHUNK)
    _chunk_kernel[len(chunks), value_heads](
        q, k, g, beta, chunks, cu_tokens, decays, solved, mixed, *strides[:2], **shape, BK=columns, num_warps=4
    )
    _walk_kernel[-(-value_dim // _BV), *programs](
        q, k, v, decays, solved, mixed, state, kind, cu_tokens, start, slot, out, *strides,
        **shape, V=value_dim, BK=columns, BV=_BV, STAGES=_STAGES, num_warps=4,
    )  # fmt: skip


def ahead_of_time() -> list[Build]:
    types = dict.fromkeys(("q", "k", "v", "solved", "mixed", "out"), "*bf16")
    types |= dict.fromkeys(("g", "beta", "decays", "state"), "*fp32")
    types |= dict.fromkeys(("chunks", "kind", "cu_tokens", "start", "slot"), "*i32")
    types |= dict.fromkeys(("q_stride", "k_stride", "v_stride"), "i32")
    shape = {"H": 16, "HV": 32, "K": 128}
    walk = {**shape, "V": 128, "BK": 128, "BV": _BV, "STAGES": _STAGES}
    exact = types | dict.fromkeys(("q", "k", "v", "out"), "*fp32")
    return [
        Build(_chunk_kernel, types, {**shape, "BK": 128}),
        Build(_walk_kernel, types, walk),
        Build(_walk_kernel, types | {"state": "*bf16"}, walk | {"K": 64, "BK": 64, "V": 256}),
        Build(_token_kernel, exact, {**shape, "V": 128, **_token_tiles(128, 128)}, {"num_warps": 1}),
        Build(_token_kernel, types, {**shape, "K": 256, "V": 64, **_token_tiles(256, 64)}, {"num_warps": 1}),
    ]
