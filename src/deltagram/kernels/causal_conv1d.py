"""Depthwise causal convolution over the sequences of a step, with silu, continued from each request's ring of past
inputs.

    y[t, c] = silu(sum over j < W of weight[c, j] * x[position(t) - (W - 1 - j) * dilation, c])

Inputs before position 0 count as zero. Inputs of this step are read from `x`; older ones from the request's ring, where
the input of absolute position p lives at p modulo R. The step's inputs are then written to the ring (the last R of a
sequence). Since every position of a request passes through here in order, an entry read is always one the same request
wrote: a recycled slot needs no clearing, and rejected drafts are overwritten by the tokens that replace them.

Shapes: x [T, C] (rows may be strided), weight [C, W], ring [slots, R, C] with R >= (W - 1) * dilation plus the drafts
of a step; cu_tokens [N + 1], sequence [T], position [T], start [N], slot [N]: int32, as in the sequence table. Returns
[T, C] in x's dtype, zero for padding; arithmetic in fp32 (float64 for float64 inputs). `ring` is updated in place.
Errors: ValueError for a ring too short for the kernel's reach.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from deltagram.kernels._triton import Build, Impl, choose, jit, on_cpu, power_of_two, tl


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    ring: Tensor,
    cu_tokens: Tensor,
    sequence: Tensor,
    position: Tensor,
    start: Tensor,
    slot: Tensor,
    dilation: int = 1,
    impl: Impl = None,
) -> Tensor:
    """See the file's docstring."""
    reach = (weight.shape[1] - 1) * dilation
    if ring.shape[1] < reach:
        raise ValueError(f"a ring of {ring.shape[1]} entries is too short for a kernel that reaches back {reach}")
    body = choose(impl, x, _reference, _launch, _compiled if ring.dtype == weight.dtype == torch.float32 else None)
    return body(x, weight, ring, cu_tokens, sequence, position, start, slot, dilation)


def _reference(
    x: Tensor,
    weight: Tensor,
    ring: Tensor,
    cu_tokens: Tensor,
    sequence: Tensor,
    position: Tensor,
    start: Tensor,
    slot: Tensor,
    dilation: int = 1,
) -> Tensor:
    num_tokens = int(cu_tokens[-1])
    width, length = weight.shape[1], ring.shape[1]
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    taps = weight.t().to(dtype)  # [W, C], the oldest first
    lags, ticks = _lags(width, dilation, x.device), _ticks(len(slot), x.device)
    lines = ring.view(-1, ring.shape[2])

    def from_ring(base: Tensor, source: Tensor) -> Tensor:  # [n], [n, W - 1] -> [n, W - 1, C]
        old = lines.index_select(0, (base[:, None] + source.remainder(length)).flatten())
        old = old.view(*source.shape, ring.shape[2]).to(dtype)
        return old.masked_fill_((source < 0)[..., None], 0) if bool(source.min() < 0) else old

    if 0 < len(x) == num_tokens == len(slot) and torch.equal(sequence, ticks):
        base, pos = slot.long() * length, position.long()  # one token a sequence: every earlier tap is in the ring
        source = pos[:, None] - lags
        total = from_ring(base, source).mul_(taps[:-1]).sum(1).addcmul_(x.to(dtype), taps[-1])
        lines.index_copy_(0, base + pos.remainder(length), x.to(ring.dtype))
        return F.silu(total).to(x.dtype)

    out = x.new_zeros(x.shape)
    if num_tokens == 0:
        return out
    new = x[:num_tokens].to(dtype)
    seq, pos = sequence[:num_tokens].long(), position[:num_tokens].long()
    base, begin, end = slot.long()[seq] * length, start.long()[seq], (start + cu_tokens.diff()).long()[seq]
    total = new * taps[-1]
    for tap, lag in zip(taps, lags.tolist(), strict=False):
        total[lag:].addcmul_(new[:-lag], tap)
    heads = (pos - begin < (width - 1) * dilation).nonzero().squeeze(1)  # these reach past their sequence's first token
    source = pos[heads, None] - lags
    inside = (source >= begin[heads, None])[..., None]
    earlier = torch.where(inside, new[(heads[:, None] - lags).clamp_(min=0)], from_ring(base[heads], source))
    total[heads] = (earlier * taps[:-1]).sum(1).addcmul_(new[heads], taps[-1])
    kept = (pos >= end - length).nonzero().squeeze(1)
    lines.index_copy_(0, base[kept] + pos[kept].remainder(length), x[kept].to(ring.dtype))
    out[:num_tokens] = F.silu(total)
    return out


@functools.cache
def _lags(width: int, dilation: int, device: torch.device) -> Tensor:
    """How far back the taps before the current token reach, the farthest first: int64 [W - 1]."""
    return torch.arange(width - 1, 0, -1, device=device) * dilation


@functools.lru_cache(maxsize=64)
def _ticks(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)


_compiled = on_cpu("causal_conv1d")


@jit(do_not_specialize=["num_rows", "num_sequences"])
def _kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    ring,
    cu_tokens,
    sequence,
    position,
    start,
    slot,
    out,
    num_rows,
    x_stride,
    num_sequences,
    C: tl.constexpr,
    R: tl.constexpr,
    WIDTH: tl.constexpr,
    DILATION: tl.constexpr,
    HEAD: tl.constexpr,  # tokens of a sequence that its head program takes: at least those that reach into the ring
    RING_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    BC: tl.constexpr,
):
    """The first `num_sequences` programs take the head of a sequence each: its first tokens, which read the ring, and
    then the ring's new entries, so that who reads the ring is who writes it. The others take 16 tokens each, past the
    heads."""
    pid = tl.program_id(0)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    inside = channel < C
    if pid < num_sequences:
        begin = tl.load(cu_tokens + pid).to(tl.int64)
        length = tl.load(cu_tokens + pid + 1) - begin
        first = tl.load(start + pid)
        line = ring + tl.load(slot + pid).to(tl.int64) * (R * C)
        offset = tl.arange(0, HEAD)[:, None]
        kept = offset < length  # none of padding
        total = tl.zeros([HEAD, BC], tl.float32)
        for tap in tl.static_range(WIDTH):
            back = offset - (WIDTH - 1 - tap) * DILATION
            w = tl.load(weight + channel * WIDTH + tap, mask=inside, other=0).to(tl.float32)
            new = tl.load(x + (begin + back) * x_stride + channel, mask=(back >= 0) & kept & inside, other=0)
            past = first + back
            in_ring = (back < 0) & (past >= 0) & kept & inside
            old = tl.load(line + (tl.maximum(past, 0) % R).to(tl.int64) * C + channel, mask=in_ring, other=0)
            total = tl.fma(w, tl.where(back >= 0, new.to(tl.float32), old.to(tl.float32)), total)
        y = total / (1 + tl.exp(-total))
        tl.store(out + (begin + offset) * C + channel, y.to(out.dtype.element_ty), mask=kept & inside)
        tl.debug_barrier()  # every read of the ring comes before its first write
        age = tl.arange(0, RING_ROWS)[:, None]
        fresh = (age < R) & (age < length)
        value = tl.load(x + (begin + length - 1 - age) * x_stride + channel, mask=fresh & inside, other=0)
        entry = tl.maximum(first + length - 1 - age, 0) % R
        tl.store(line + entry * C + channel, value.to(ring.dtype.element_ty), mask=fresh & inside)
    else:
        token = (pid - num_sequences).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        holder = tl.load(sequence + token, mask=token < num_rows, other=-1)
        here = tl.load(position + token, mask=holder >= 0, other=0)
        begun = here - tl.load(start + holder, mask=holder >= 0, other=0)
        body = (holder >= 0) & (begun >= HEAD)
        padding = (holder < 0) & (token < num_rows)
        if tl.sum((body | padding).to(tl.int32)) > 0:
            total = tl.zeros([ROWS, BC], tl.float32)
            for tap in tl.static_range(WIDTH):
                w = tl.load(weight + channel * WIDTH + tap, mask=inside, other=0).to(tl.float32)
                source = (token - (WIDTH - 1 - tap) * DILATION)[:, None]
                value = tl.load(x + source * x_stride + channel, mask=body[:, None] & inside, other=0)
                total = tl.fma(w, value.to(tl.float32), total)
            y = total / (1 + tl.exp(-total))
            tl.store(
                out + token[:, None] * C + channel, y.to(out.dtype.element_ty), mask=(body | padding)[:, None] & inside
            )


def _launch(
    x: Tensor,
    weight: Tensor,
    ring: Tensor,
    cu_tokens: Tensor,
    sequence: Tensor,
    position: Tensor,
    start: Tensor,
    slot: Tensor,
    dilation: int = 1,
) -> Tensor:
    num_rows, channels = x.shape
    width, num_sequences = weight.shape[1], len(slot)
    assert x.stride(1) == 1 and weight.is_contiguous() and ring.is_contiguous()
    out = x.new_empty(x.shape)
    sizes = _sizes(channels, ring.shape[1], width, dilation)
    grid = (num_sequences + -(-num_rows // sizes["ROWS"]), -(-channels // sizes["BC"]))
    _kernel[grid](
        x, weight, ring, cu_tokens, sequence, position, start, slot, out, num_rows, x.stride(0), num_sequences,
        **sizes, num_warps=4,
    )  # fmt: skip
    return out


def _sizes(channels: int, ring: int, width: int, dilation: int) -> dict[str, int]:
    tile = {"HEAD": power_of_two((width - 1) * dilation), "RING_ROWS": power_of_two(ring), "ROWS": 16, "BC": 256}
    return {"C": channels, "R": ring, "WIDTH": width, "DILATION": dilation} | tile


def ahead_of_time() -> list[Build]:
    indices = ("cu_tokens", "sequence", "position", "start", "slot")
    builds = []
    for dtype, width, dilation, ring in (("*bf16", 4, 1, 3), ("*fp32", 4, 3, 15)):
        types = dict.fromkeys(("x", "weight", "ring", "out"), dtype) | dict.fromkeys(indices, "*i32")
        types |= dict.fromkeys(("num_rows", "x_stride", "num_sequences"), "i32")
        builds.append(Build(_kernel, types, dict(_sizes(8192, ring, width, dilation))))
    return builds
