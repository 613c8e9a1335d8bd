"""A Gated DeltaNet layer's core for the decode and verify sequences of a step: from the rows of its projections to the
heads before the gated norm, in one launch.

It is causal_conv1d, gated_delta_prep and gated_delta_recurrent in turn, with their formulas, roundings and rules: the
convolution continues from the ring of past inputs, where each token's own inputs are then kept; q and k are normalised;
the state takes the tokens one by one; pending ones are replayed from the rings of recent tokens, and what the stored
state does not take is kept there. Sequences of other kinds, and their rows, are left alone.

Every program reads past inputs from the ring while others write new ones there; they never meet, since a ring has room
for what the convolution reaches back to and a step's tokens besides.

A program is one warp and a tile of rows of one head's state, so that nobody waits at a barrier. Rows do not mix, and
what is summed along them is laid out alike in any tile: a few sequences are cut finer than many, and keep their bits.
With dependent launch the kernel reads what earlier steps left (the state, past inputs, and pending tokens, which it
takes at once) while this step's projections still run. No kernel of this step writes any of it, and those of earlier
steps have ended: a step begins with kernels that start when all before them have. So must whoever calls this twice on
one state.

Shapes: qkv [T, 2 H K + HV V] (channels q | k | v), a and b [T, HV] (rows may be strided), conv_weight [C, W], A_log and
dt_bias [HV] fp32, ring [slots, R, C]; state [slots, HV, V, K], rounded to its dtype after every token; kind, start,
pending, stores, slot [N] and cu_tokens [N + 1]: int32; out [T, HV, V]; recent: rings of k [slots, D, H, K], v [slots,
D, HV, V] and gates [slots, D, 2, HV] fp32, or None, and then a sequence has one token and its state is stored. No
sequence has more than 1 + max_draft tokens. Written in place: ring, state, out, recent.
Errors: ValueError for rings too short for the step's tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deltagram.kernels._triton import Build, Impl, choose, dependent_launch, jit, power_of_two, tl

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
    stores: Tensor,
    slot: Tensor,
    out: Tensor,
    num_key_heads: int,
    recent: tuple[Tensor, Tensor, Tensor] | None = None,
    max_draft: int = 0,
    impl: Impl = None,
) -> None:
    """See the file's docstring. `num_key_heads` is H."""
    tokens = 1 + max_draft
    if ring.shape[1] < conv_weight.shape[1] - 1 + tokens:
        raise ValueError(
            f"a ring of {ring.shape[1]} entries is too short for a kernel of {conv_weight.shape[1]} and {tokens} tokens"
        )
    if max_draft and (recent is None or recent[0].shape[1] <= 2 * max_draft):
        length = 0 if recent is None else recent[0].shape[1]
        raise ValueError(f"rings of {length} recent tokens are too short for {max_draft} drafts: {2 * max_draft + 1}")
    body = choose(impl, qkv, _reference, _launch)
    arguments = qkv, a, b, conv_weight, A_log, dt_bias, ring, state, kind, cu_tokens, start, pending, stores, slot
    body(*arguments, out, num_key_heads, recent, max_draft)


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
    stores: Tensor,
    slot: Tensor,
    out: Tensor,
    num_key_heads: int,
    recent: tuple[Tensor, Tensor, Tensor] | None,
    max_draft: int,
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
    stored = stores[:rows] > 0
    if recent is None:
        behind, stored = torch.zeros_like(behind), torch.ones_like(stored)
    s, written = state[slots].to(wide), ring.clone()
    for i in range(-int(behind.max()), int(new.max())):  # the tokens at start + i of the sequences that have one there
        one = ((i >= -behind) & (i < new)).nonzero().squeeze(1)
        at, token = slots[one], begin[one] + i
        entry = (first[one] + i) % recent[0].shape[1] if recent is not None else token
        if i < 0:
            assert recent is not None
            k, v, gates = recent[0][at, entry], recent[1][at, entry], recent[2][at, entry]
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
        kept = stored[one] & (i == 0)
        state[at[kept]] = rounded[kept]
        if i >= 0 and recent is not None:
            at, entry, k, v, gates = at[~kept], entry[~kept], k[~kept], v[~kept], gates[~kept]
            recent[0][at, entry], recent[1][at, entry], recent[2][at, entry] = k, v, gates.to(recent[2].dtype)
    ring.copy_(written)


@jit
def _none():  # type: ignore[no-untyped-def]
    """A tuple to add to."""
    return ()


@jit
def _taps(weight, channel, known, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    taps = _none()
    for tap in tl.static_range(WIDTH):
        taps = taps + (tl.load(weight + channel * WIDTH + tap, mask=known, other=0).to(tl.float32),)
    return taps


@jit
def _ahead(taps, line, channel, known, first, R: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """What the kept inputs of tokens before position `first` add to the convolutions of the WIDTH - 1 from there on."""
    past, sums = _none(), _none()
    for i in tl.static_range(WIDTH - 1):
        at = first - (WIDTH - 1 - i)
        entry = (tl.maximum(at, 0) % R).to(tl.int64)
        kept = tl.load(line + entry * C + channel, mask=known & (at >= 0), other=0)
        past = past + (kept.to(tl.float32),)
    for i in tl.static_range(WIDTH - 1):
        total = tl.zeros(channel.shape, tl.float32)
        for tap in tl.static_range(WIDTH - 1 - i):
            total = tl.fma(taps[tap], past[i + tap], total)
        sums = sums + (total,)
    return sums


@jit
def _onward(taps, ahead, x, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """`ahead` after one more token, whose inputs are x."""
    sums = _none()
    for i in tl.static_range(1, WIDTH - 1):
        sums = sums + (tl.fma(taps[WIDTH - 1 - i], x.to(tl.float32), ahead[i]),)
    return sums + (tl.fma(taps[0], x.to(tl.float32), tl.zeros(x.shape, tl.float32)),)


@jit
def _convolved(taps, ahead, x, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.fma(taps[WIDTH - 1], x.to(tl.float32), ahead[0])
    return (total / (1 + tl.exp(-total))).to(x.dtype).to(tl.float32)


@jit
def _token(taps, ahead, x, rate, shift, scale, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """q, k, v, g and beta of a token from its inputs, as the rings of recent tokens hold them."""
    q = _convolved(taps[0], ahead[0], x[0], WIDTH)
    k = _convolved(taps[1], ahead[1], x[1], WIDTH)
    v = _convolved(taps[2], ahead[2], x[2], WIDTH)
    q = q * (1 / tl.sqrt(tl.sum(q * q, 0) + 1e-6)) * scale
    k = k * (1 / tl.sqrt(tl.sum(k * k, 0) + 1e-6))
    step = x[3].to(tl.float32) + shift
    g = rate * (tl.maximum(step, 0) + tl.log(1 + tl.exp(-tl.abs(step))))
    beta = 1 / (1 + tl.exp(-x[4].to(tl.float32)))
    return (q.to(x[0].dtype), k.to(x[1].dtype), v.to(x[2].dtype), g, beta)


@jit
def _recent(k_ring, v_ring, gate_ring, entry, key, value, in_key, in_value, h, hv, there, H, HV, K, V):  # type: ignore[no-untyped-def]
    """k, v, g and beta of a token that the state has yet to take."""
    k = tl.load(k_ring + (entry * H + h) * K + key, mask=in_key & there, other=0)
    v = tl.load(v_ring + (entry * HV + hv) * V + value, mask=in_value & there, other=0)
    g_at = gate_ring + entry * (2 * HV) + hv
    return (k, v, tl.load(g_at, mask=there, other=0), tl.load(g_at + HV, mask=there, other=0))


@jit
def _inputs(row, channels, known, a_at, b_at):  # type: ignore[no-untyped-def]
    x = _none()
    for j in tl.static_range(3):
        x = x + (tl.load(row + channels[j], mask=known[j], other=0),)
    return x + (tl.load(a_at), tl.load(b_at))


@jit
def _parts(x, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """x in equal parts, in fp32."""
    x = x.to(tl.float32)
    if PARTS == 1:
        return (x,)
    else:
        first, second = tl.split(tl.permute(tl.reshape(x, [2, x.shape[0] // 2]), (1, 0)))
        return _parts(first, PARTS // 2) + _parts(second, PARTS // 2)


@jit
def _read(s, x, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """S x."""
    total = s[0] * x[0][None, :]
    for j in tl.static_range(1, PARTS):
        total = tl.fma(s[j], x[j][None, :], total)
    return tl.sum(total, 1)


@jit
def _take(s, k, v, g, beta, dtype: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The state after one more token, rounded to `dtype`."""
    decayed, taken = _none(), _none()
    k = _parts(k, PARTS)
    for j in tl.static_range(PARTS):
        decayed = decayed + (s[j] * tl.exp(g),)
    u = beta * (v.to(tl.float32) - _read(decayed, k, PARTS))
    for j in tl.static_range(PARTS):
        new = tl.fma(u[:, None], k[j][None, :], decayed[j])
        taken = taken + (new.to(dtype).to(tl.float32),)
    return taken


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
    stores,
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
    D: tl.constexpr,  # entries of the rings of recent tokens; 0 without
    DRAFTS: tl.constexpr,  # whether a sequence may have more than one token
    BK: tl.constexpr,
    PARTS: tl.constexpr,  # of a row of the state, one after the other
    BV: tl.constexpr,
    SOON: tl.constexpr,  # whether the next kernel may start before this one's inputs are there
    PDL: tl.constexpr,
):
    """What earlier steps left is read before this step's projections have ended: the state, past inputs, and pending
    tokens, which are taken at once."""
    n = tl.program_id(2)
    if tl.load(kind + n) > 1:
        if PDL:
            if n == 0:  # one program has to: see dependent_launch
                tl.extra.cuda.gdc_wait()
        return
    if PDL:
        if SOON:
            tl.extra.cuda.gdc_launch_dependents()
    C: tl.constexpr = 2 * H * K + HV * V
    BP: tl.constexpr = BK // PARTS
    hv = tl.program_id(1)
    h = hv // (HV // H)
    key = tl.arange(0, BK)
    part = tl.arange(0, BP)
    value = tl.program_id(0) * BV + tl.arange(0, BV)
    in_key, in_value = key < K, value < V
    channels = (h * K + key, (H + h) * K + key, 2 * H * K + hv * V + value)
    known = (in_key, in_key, in_value)
    number = tl.load(slot + n).to(tl.int64)
    begin = tl.load(cu_tokens + n).to(tl.int64)
    first = tl.load(start + n)
    line = ring + number * (R * C)
    at = state + (number * HV + hv) * (V * K) + value[:, None] * K + part[None, :]
    s, taps, ahead = _none(), _none(), _none()
    for j in tl.static_range(PARTS):
        inside = in_value[:, None] & (j * BP + part < K)[None, :]
        s = s + (tl.load(at + j * BP, mask=inside, other=0, eviction_policy="evict_first").to(tl.float32),)
    for j in tl.static_range(3):
        taps = taps + (_taps(conv_weight, channels[j], known[j], WIDTH),)
        ahead = ahead + (_ahead(taps[j], line, channels[j], known[j], first, R, C, WIDTH),)
    rate = -tl.exp(tl.load(A_log + hv).to(tl.float32))
    shift = tl.load(dt_bias + hv).to(tl.float32)
    num_new = 1
    if DRAFTS:
        num_new = (tl.load(cu_tokens + n + 1) - begin).to(tl.int32)
    store = True
    if D > 0:
        store = tl.load(stores + n) > 0
        behind = tl.load(pending + n)
        rings = (k_ring, v_ring, gate_ring)
        places = (key, value, in_key, in_value, h, hv)
        token = _recent(*rings, number * D + (first - behind) % D, *places, behind > 0, H, HV, K, V)
        for i in range(-behind, 0):  # the next token comes while this one is taken
            k, v, g, beta = token
            token = _recent(*rings, number * D + (first + i + 1) % D, *places, i < -1, H, HV, K, V)
            s = _take(s, k, v, g, beta, state.dtype.element_ty, PARTS)
    if PDL:
        tl.extra.cuda.gdc_wait()
        if not SOON:
            tl.extra.cuda.gdc_launch_dependents()
    shared = (tl.program_id(0) == 0) & (hv % (HV // H) == 0)  # who writes what programs of a key head share
    writes = (in_key & shared, in_key & shared, in_value)
    row, a_at, b_at = qkv + begin * qkv_stride, a + begin * a_stride + hv, b + begin * b_stride + hv
    x = _inputs(row, channels, known, a_at, b_at)
    for i in range(num_new):
        q, k, v, g, beta = _token(taps, ahead, x, rate, shift, scale, WIDTH)
        kept = line + ((first + i) % R).to(tl.int64) * C
        for j in tl.static_range(3):
            tl.store(kept + channels[j], x[j].to(ring.dtype.element_ty), mask=writes[j])
        if DRAFTS:  # the next token's inputs (or again these) come while this one is taken
            moved = _none()
            for j in tl.static_range(3):
                moved = moved + (_onward(taps[j], ahead[j], x[j], WIDTH),)
            ahead = moved
            step = tl.minimum(i + 1, num_new - 1)
            x = _inputs(row + step * qkv_stride, channels, known, a_at + step * a_stride, b_at + step * b_stride)
        s = _take(s, k, v, g, beta, state.dtype.element_ty, PARTS)
        stored = store & (i == 0)
        if stored:
            for j in tl.static_range(PARTS):
                inside = in_value[:, None] & (j * BP + part < K)[None, :]
                new = s[j].to(state.dtype.element_ty)
                tl.store(at + j * BP, new, mask=inside, eviction_policy="evict_first")
        o = _read(s, _parts(q, PARTS), PARTS)
        tl.store(out + ((begin + i) * HV + hv) * V + value, o.to(out.dtype.element_ty), mask=in_value)
        if D > 0:
            if not stored:
                entry = number * D + (first + i) % D
                tl.store(v_ring + (entry * HV + hv) * V + value, v, mask=in_value)
                tl.store(k_ring + (entry * H + h) * K + key, k, mask=in_key & shared)
                if tl.program_id(0) == 0:
                    g_at = gate_ring + entry * (2 * HV) + hv
                    tl.store(g_at, g)
                    tl.store(g_at + HV, beta)


# Whether a product and a sum become one rounding is the compiler's choice, and it chose differently with and without
# rings: where they shall, the kernel says so.
_OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}


# Bytes of a row in a part, which a few lanes share. The fewer, the less is exchanged among them to add a row up; but
# half as many took an H200 longer to read.
_PART = 128
# Elements of a program's tile of a state, for up to _HEADS heads of states and for more: no sum depends on them.
_FEW, _MANY, _HEADS = 2048, 4096, 192


def _sizes(
    heads: int, state: Tensor, width: int, ring: int, recent: int, max_draft: int, sequences: int
) -> dict[str, int | bool]:
    value_heads, value_dim, key_dim = state.shape[1:]
    columns, few = power_of_two(key_dim), sequences * value_heads <= _HEADS
    rows = max(1, min(power_of_two(value_dim), (_FEW if few else _MANY) // columns))
    parts = max(columns * state.element_size() // _PART, 1)
    tile = {"BK": columns, "PARTS": parts, "BV": rows, "SOON": few}
    shape = {"H": heads, "HV": value_heads, "K": key_dim, "V": value_dim, "WIDTH": width}
    return shape | {"R": ring, "D": recent, "DRAFTS": max_draft > 0} | tile


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
    stores: Tensor,
    slot: Tensor,
    out: Tensor,
    num_key_heads: int,
    recent: tuple[Tensor, Tensor, Tensor] | None,
    max_draft: int,
) -> None:
    assert state.is_contiguous() and out.is_contiguous() and ring.is_contiguous() and conv_weight.is_contiguous()
    assert qkv.stride(1) == a.stride(1) == b.stride(1) == 1 and ring.shape[2] == qkv.shape[1]
    length = recent[0].shape[1] if recent is not None else 0
    rings = recent if recent is not None else (None, None, None)
    sizes = _sizes(num_key_heads, state, conv_weight.shape[1], ring.shape[1], length, max_draft, len(kind))
    grid = (-(-sizes["V"] // sizes["BV"]), sizes["HV"], len(kind))
    pdl = dependent_launch(qkv)
    _kernel[grid](
        qkv, a, b, conv_weight, A_log, dt_bias, ring, state, kind, cu_tokens, start, pending, stores, slot, out, *rings,
        qkv.stride(0), a.stride(0), b.stride(0), sizes["K"] ** -0.5, **sizes, PDL=pdl, launch_pdl=pdl, **_OPTIONS,
    )  # fmt: skip


def ahead_of_time() -> list[Build]:
    builds = []
    indices = ("kind", "cu_tokens", "start", "pending", "stores", "slot")
    for dtype, state, key_dim, value_dim, recent, max_draft, sequences in (
        ("*bf16", torch.float32, 128, 128, 4, 0, 1),
        ("*bf16", torch.float32, 128, 128, 4, 0, 48),
        ("*bf16", torch.float32, 128, 128, 14, 5, 1),
        ("*bf16", torch.float32, 128, 128, 14, 5, 48),
        ("*bf16", torch.bfloat16, 128, 128, 4, 0, 48),
        ("*fp32", torch.float32, 64, 256, 0, 0, 1),
    ):
        types = dict.fromkeys(("qkv", "a", "b", "conv_weight", "ring", "out", "k_ring", "v_ring"), dtype)
        types |= dict.fromkeys(indices, "*i32") | {"A_log": "*fp32", "dt_bias": "*fp32", "gate_ring": "*fp32"}
        types |= dict.fromkeys(("qkv_stride", "a_stride", "b_stride"), "i32") | {"scale": "fp32"}
        types["state"] = "*fp32" if state is torch.float32 else "*bf16"
        absent = dict.fromkeys(("k_ring", "v_ring", "gate_ring")) if recent == 0 else {}
        pool = torch.empty(1, 32, value_dim, key_dim, dtype=state, device="meta")
        sizes = _sizes(16, pool, 4, 4 + max_draft, recent, max_draft, sequences)
        builds.append(Build(_kernel, types, sizes | absent, _OPTIONS))
    return builds
