"""A Gated DeltaNet layer's core for the decode and verify sequences of a step: from the rows of its projections to the
heads before the gated norm, in one launch.

It is causal_conv1d, gated_delta_prep and gated_delta_recurrent in turn, with their formulas, roundings and rules: the
convolution continues from the ring of past inputs, where each token's own inputs are then kept; q and k are normalised;
the state takes the tokens one by one; drafts that were accepted are replayed from their rings, and new ones kept there.
Sequences of other kinds, and their rows, are left alone.

Every program reads past inputs from the ring while others write new ones there; they never meet, since a ring has room
for what the convolution reaches back to and a step's tokens besides.

Shapes: qkv [T, 2 H K + HV V] (channels q | k | v), a and b [T, HV] (rows may be strided), conv_weight [C, W], A_log and
dt_bias [HV] fp32, ring [slots, R, C]; state [slots, HV, V, K], rounded to its dtype after every token; kind, start,
pending, slot [N] and cu_tokens [N + 1]: int32; out [T, HV, V]; drafts: rings of k [slots, D, H, K], v [slots, D, HV, V]
and gates [slots, D, 2, HV] fp32, or None, and then a sequence has one token. Written in place: ring, state, out,
drafts.
Errors: ValueError for a ring too short for the step's tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deltagram.kernels._triton import Build, Impl, choose, dependent_launch, jit, power_of_two, prefetch, tl

_VERIFY = 1  # kinds: decode 0, verify 1, prefill 2, padding 3; decode and verify come first in a step


def gated_delta_decode(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    ring: Tensor,
    state: Tensor,
    kind: Tensor,
    cu_tokens: Tensor,
    start: Tensor,
    pending: Tensor,
    slot: Tensor,
    out: Tensor,
    num_key_heads: int,
    drafts: tuple[Tensor, Tensor, Tensor] | None = None,
    impl: Impl = None,
) -> None:
    """See the file's docstring. `num_key_heads` is H."""
    tokens = 1 if drafts is None else (drafts[0].shape[1] + 1) // 2
    if ring.shape[1] < conv_weight.shape[1] - 1 + tokens:
        raise ValueError(
            f"a ring of {ring.shape[1]} entries is too short for a kernel of {conv_weight.shape[1]} and {tokens} tokens"
        )
    body = choose(impl, qkv, _reference, _launch)
    arguments = qkv, a, b, conv_weight, A_log, dt_bias, ring, state, kind, cu_tokens, start, pending, slot, out
    body(*arguments, num_key_heads, drafts)


def _reference(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    ring: Tensor,
    state: Tensor,
    kind: Tensor,
    cu_tokens: Tensor,
    start: Tensor,
    pending: Tensor,
    slot: Tensor,
    out: Tensor,
    num_key_heads: int,
    drafts: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    rows = int((kind <= _VERIFY).sum())
    if rows == 0:
        return
    wide = torch.float64 if qkv.dtype == torch.float64 else torch.float32
    value_heads, value_dim, key_dim = state.shape[1:]
    group, keys = value_heads // num_key_heads, num_key_heads * key_dim
    taps = conv_weight.t().to(wide)
    lags = torch.arange(len(taps) - 1, -1, -1, device=qkv.device)
    slots, begin, first = slot[:rows].long(), cu_tokens[:rows].long(), start[:rows].long()
    new, behind = cu_tokens[: rows + 1].diff().long(), pending[:rows].long()
    if drafts is None:
        behind = torch.zeros_like(behind)
    s, written = state[slots].to(wide), ring.clone()
    for i in range(-int(behind.max()), int(new.max())):  # the tokens at start + i of the sequences that have one there
        one = ((i >= -behind) & (i < new)).nonzero().squeeze(1)
        at, token = slots[one], begin[one] + i
        entry = (first[one] + i) % drafts[0].shape[1] if drafts is not None else token
        if i < 0:
            assert drafts is not None
            k, v, gates = drafts[0][at, entry], drafts[1][at, entry], drafts[2][at, entry]
        else:
            back = (i - lags)[None, :, None]
            past = (first[one, None] + i - lags).remainder(ring.shape[1])
            known = torch.where(back < 0, ring[at[:, None], past], qkv[(begin[one, None] + i - lags).clamp_(min=0)])
            known = known.to(wide).masked_fill_((first[one, None] + i - lags < 0)[..., None], 0)
            row = F.silu((known * taps).sum(1)).to(qkv.dtype)
            qk = row[:, : 2 * keys].unflatten(1, (2, num_key_heads, key_dim)).to(wide)
            qk = qk * (qk.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
            q, k = (qk[:, 0] * key_dim**-0.5).to(qkv.dtype), qk[:, 1].to(qkv.dtype)
            v = row[:, 2 * keys :].unflatten(1, (value_heads, value_dim))
            decay = -A_log.to(wide).exp() * F.softplus(a[token].to(wide) + dt_bias.to(wide))
            gates = torch.stack((decay, b[token].to(wide).sigmoid()), 1)
            written[at, (first[one] + i) % ring.shape[1]] = qkv[token].to(ring.dtype)
        key = k.to(wide).repeat_interleave(group, 1)
        taken = s[one] * gates[:, 0].to(wide).exp()[..., None, None]
        u = (v.to(wide) - (taken @ key[..., None])[..., 0]) * gates[:, 1].to(wide)[..., None]
        rounded = (taken + u[..., None] * key[..., None, :]).to(state.dtype)
        s[one] = rounded.to(wide)
        if i >= 0:
            query = q.to(wide).repeat_interleave(group, 1)
            out[token] = (s[one] @ query[..., None])[..., 0].to(out.dtype)
        if i == 0:
            state[at] = rounded
        if i > 0:
            assert drafts is not None
            drafts[0][at, entry], drafts[1][at, entry], drafts[2][at, entry] = k, v, gates.to(drafts[2].dtype)
    ring.copy_(written)


@jit
def _convolved(  # type: ignore[no-untyped-def]
    x, line, weight, channel, known, begin, first, i, x_stride, R: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr
):
    """The convolution's output for token i of a sequence, in x's dtype."""
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(WIDTH):
        back = i - (WIDTH - 1 - tap)
        past = first + back
        w = tl.load(weight + channel * WIDTH + tap, mask=known, other=0).to(tl.float32)
        kept = known & (back < 0) & (past >= 0)
        old = tl.load(line + (tl.maximum(past, 0) % R).to(tl.int64) * C + channel, mask=kept, other=0)
        new = tl.load(x + (begin + back) * x_stride + channel, mask=known & (back >= 0), other=0)
        total = tl.fma(w, tl.where(back >= 0, new.to(tl.float32), old.to(tl.float32)), total)
    return (total / (1 + tl.exp(-total))).to(x.dtype.element_ty)


@jit
def _keep(x, line, channel, known, token, entry, x_stride, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keep a token's inputs in the convolution's ring."""
    value = tl.load(x + token * x_stride + channel, mask=known, other=0)
    tl.store(line + entry.to(tl.int64) * C + channel, value.to(line.dtype.element_ty), mask=known)


@jit
def _token(  # type: ignore[no-untyped-def]
    qkv, a, b, weight, line, q_channel, k_channel, v_channel, in_key, in_value, shared, rate, shift, hv, begin, first,
    i, qkv_stride, a_stride, b_stride, scale, R: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """q in fp32, k and v as rings of drafts hold them, g and beta of token i of a sequence; its inputs are kept."""
    q = _convolved(qkv, line, weight, q_channel, in_key, begin, first, i, qkv_stride, R, C, WIDTH).to(tl.float32)
    k = _convolved(qkv, line, weight, k_channel, in_key, begin, first, i, qkv_stride, R, C, WIDTH).to(tl.float32)
    v = _convolved(qkv, line, weight, v_channel, in_value, begin, first, i, qkv_stride, R, C, WIDTH)
    q = (q * (1 / tl.sqrt(tl.sum(q * q, 0) + 1e-6)) * scale).to(v.dtype).to(tl.float32)
    k = (k * (1 / tl.sqrt(tl.sum(k * k, 0) + 1e-6))).to(v.dtype)
    step = tl.load(a + (begin + i) * a_stride + hv).to(tl.float32) + shift
    g = rate * (tl.maximum(step, 0) + tl.log(1 + tl.exp(-tl.abs(step))))
    beta = 1 / (1 + tl.exp(-tl.load(b + (begin + i) * b_stride + hv).to(tl.float32)))
    entry = (first + i) % R
    _keep(qkv, line, q_channel, in_key & shared, begin + i, entry, qkv_stride, C)
    _keep(qkv, line, k_channel, in_key & shared, begin + i, entry, qkv_stride, C)
    _keep(qkv, line, v_channel, in_value, begin + i, entry, qkv_stride, C)
    return q, k, v, g, beta


@jit
def _take(s, k, v, g, beta):  # type: ignore[no-untyped-def]
    """The state after one more token."""
    s = s * tl.exp(g)
    u = beta * (v - tl.sum(s * k[None, :], 1))
    return s + u[:, None] * k[None, :]


@jit
def _kernel(  # type: ignore[no-untyped-def]
    qkv,
    a,
    b,
    conv_weight,
    A_log,
    dt_bias,
    ring,
    state,
    kind,
    cu_tokens,
    start,
    pending,
    slot,
    out,
    k_ring,
    v_ring,
    gate_ring,
    qkv_stride,
    a_stride,
    b_stride,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    R: tl.constexpr,  # entries of the convolution's ring
    D: tl.constexpr,  # entries of the rings of drafts; 0 without
    BK: tl.constexpr,
    BV: tl.constexpr,
    PDL: tl.constexpr,
):
    C: tl.constexpr = 2 * H * K + HV * V
    n = tl.program_id(1) // HV
    hv = tl.program_id(1) % HV
    h = hv // (HV // H)
    key = tl.arange(0, BK)
    value = tl.program_id(0) * BV + tl.arange(0, BV)
    in_key, in_value = key < K, value < V
    inside = in_value[:, None] & in_key[None, :]
    spot = hv * (V * K) + value[:, None] * K + key[None, :]
    q_channel, k_channel, v_channel = h * K + key, (H + h) * K + key, 2 * H * K + hv * V + value
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        prefetch(conv_weight + q_channel * WIDTH)
        prefetch(conv_weight + k_channel * WIDTH)
        # A line asked for too early is no harm: whoever writes it later writes it where it then is.
        ahead = tl.minimum(tl.program_id(0) * (BV * K) + tl.arange(0, BV * BK // 32) * 32, V * K - 1)
        prefetch(state + (tl.load(slot + n).to(tl.int64) * HV + hv) * (V * K) + ahead)
        tl.extra.cuda.gdc_wait()
    if tl.load(kind + n) > 1:
        return
    number = tl.load(slot + n).to(tl.int64)
    begin = tl.load(cu_tokens + n).to(tl.int64)
    first = tl.load(start + n)
    line = ring + number * (R * C)
    at = state + number * (HV * V * K) + spot
    s = tl.load(at, mask=inside, other=0).to(tl.float32)
    rate = -tl.exp(tl.load(A_log + hv).to(tl.float32))
    shift = tl.load(dt_bias + hv).to(tl.float32)
    shared = (tl.program_id(0) == 0) & (hv % (HV // H) == 0)  # who writes what programs of a key head share
    if D == 0:
        q_t, k_in, v_t, g_t, beta_t = _token(
            qkv, a, b, conv_weight, line, q_channel, k_channel, v_channel, in_key, in_value, shared, rate, shift, hv,
            begin, first, 0, qkv_stride, a_stride, b_stride, scale, R, C, WIDTH,
        )  # fmt: skip
        stored = _take(s, k_in.to(tl.float32), v_t.to(tl.float32), g_t, beta_t).to(state.dtype.element_ty)
        tl.store(at, stored, mask=inside)
        o = tl.sum(stored.to(tl.float32) * q_t[None, :], 1)
        tl.store(out + (begin * HV + hv) * V + value, o.to(out.dtype.element_ty), mask=in_value)
    else:
        num_new = (tl.load(cu_tokens + n + 1) - begin).to(tl.int32)
        for i in range(-tl.load(pending + n), num_new):
            entry = number * D + (first + i) % D
            k_at, v_at = k_ring + (entry * H + h) * K + key, v_ring + (entry * HV + hv) * V + value
            g_at = gate_ring + entry * (2 * HV) + hv
            if i < 0:
                k_in, v_in = tl.load(k_at, mask=in_key, other=0), tl.load(v_at, mask=in_value, other=0)
                g_t, beta_t = tl.load(g_at), tl.load(g_at + HV)
                q_t = tl.zeros([BK], tl.float32)
            else:
                q_t, k_in, v_in, g_t, beta_t = _token(
                    qkv, a, b, conv_weight, line, q_channel, k_channel, v_channel, in_key, in_value, shared, rate,
                    shift, hv, begin, first, i, qkv_stride, a_stride, b_stride, scale, R, C, WIDTH,
                )  # fmt: skip
            stored = _take(s, k_in.to(tl.float32), v_in.to(tl.float32), g_t, beta_t).to(state.dtype.element_ty)
            s = stored.to(tl.float32)
            o = tl.sum(s * q_t[None, :], 1)
            if i >= 0:
                tl.store(out + ((begin + i) * HV + hv) * V + value, o.to(out.dtype.element_ty), mask=in_value)
            if i == 0:
                tl.store(at, stored, mask=inside)
            if i > 0:
                tl.store(v_at, v_in, mask=in_value)
                tl.store(k_at, k_in, mask=in_key & shared)
                if tl.program_id(0) == 0:
                    tl.store(g_at, g_t)
                    tl.store(g_at + HV, beta_t)


# Whether a product and a sum become one rounding is the compiler's choice, and it chose differently with and without
# rings.
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


def _sizes(heads: int, state: Tensor | tuple[int, ...], width: int, ring: int, drafts: int) -> dict[str, int]:
    value_heads, value_dim, key_dim = (state.shape if isinstance(state, Tensor) else state)[-3:]
    columns = power_of_two(key_dim)
    tile = {"BK": columns, "BV": max(1, min(power_of_two(value_dim), 4096 // columns))}
    return {"H": heads, "HV": value_heads, "K": key_dim, "V": value_dim, "WIDTH": width, "R": ring, "D": drafts} | tile


def _launch(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    ring: Tensor,
    state: Tensor,
    kind: Tensor,
    cu_tokens: Tensor,
    start: Tensor,
    pending: Tensor,
    slot: Tensor,
    out: Tensor,
    num_key_heads: int,
    drafts: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    assert state.is_contiguous() and out.is_contiguous() and ring.is_contiguous() and conv_weight.is_contiguous()
    assert qkv.stride(1) == a.stride(1) == b.stride(1) == 1 and ring.shape[2] == qkv.shape[1]
    length = drafts[0].shape[1] if drafts is not None else 0
    rings = drafts if drafts is not None else (None, None, None)
    sizes = _sizes(num_key_heads, state, conv_weight.shape[1], ring.shape[1], length)
    grid = (-(-sizes["V"] // sizes["BV"]), len(kind) * sizes["HV"])
    pdl = dependent_launch(qkv)
    _kernel[grid](
        qkv, a, b, conv_weight, A_log, dt_bias, ring, state, kind, cu_tokens, start, pending, slot, out, *rings,
        qkv.stride(0), a.stride(0), b.stride(0), sizes["K"] ** -0.5, **sizes, PDL=pdl, launch_pdl=pdl, **_OPTIONS,
    )  # fmt: skip


def ahead_of_time() -> list[Build]:
    builds = []
    indices = ("kind", "cu_tokens", "start", "pending", "slot")
    for dtype, state, key_dim, value_dim, drafts in (
        ("*bf16", "*fp32", 128, 128, 0),
        ("*bf16", "*fp32", 128, 128, 11),
        ("*bf16", "*bf16", 128, 128, 0),
        ("*fp32", "*fp32", 64, 256, 3),
    ):
        types = dict.fromkeys(("qkv", "a", "b", "conv_weight", "ring", "out", "k_ring", "v_ring"), dtype)
        types |= dict.fromkeys(indices, "*i32") | {"A_log": "*fp32", "dt_bias": "*fp32", "gate_ring": "*fp32"}
        types |= {"state": state, "scale": "fp32"} | dict.fromkeys(("qkv_stride", "a_stride", "b_stride"), "i32")
        absent = dict.fromkeys(("k_ring", "v_ring", "gate_ring")) if drafts == 0 else {}
        sizes = _sizes(16, (32, value_dim, key_dim), 4, 3 + (drafts + 1) // 2, drafts)
        builds.append(Build(_kernel, types, sizes | absent, _OPTIONS))
    return builds
