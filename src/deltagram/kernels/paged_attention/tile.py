"""What the kernels of paged attention share: one tile of keys taken into a running softmax, and the last step."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from deltagram.kernels._triton import jit, power_of_two, tl

MOST_COUNTERS = 1 << 18


@jit
def take(acc, top, total, query, key, value, visible, scale, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sums [ROWS, BD], largest score (of base 2, scaled) and weight [ROWS] after one more tile: query [ROWS, BD],
    key and value [BN, BD], zero where nobody may look, visible bool [ROWS, BN]. A row that has seen nothing keeps
    total 0 and top -inf. Products and sums are rounded alike with and without a mask."""
    score = tl.dot(query, tl.trans(key), input_precision="ieee")
    if MASKED:
        score = tl.where(visible, score, float("-inf"))
    higher = tl.maximum(top, tl.max(score, 1) * scale)
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(tl.fma(score, scale, -shift[:, None]))
    fade = tl.exp2(top - shift)
    total = tl.fma(total, fade, tl.sum(weight, 1))
    acc = tl.dot(weight.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
    return acc, higher, total


@jit
def rows_at(base, token, head, stride, head_stride, d):  # type: ignore[no-untyped-def]
    """Pointers to rows [ROWS, BD] of q, gate or out. token (int64), head: [ROWS], or one of them a number."""
    return base + (token * stride + head * head_stride)[:, None] + d[None, :]


@jit
def finished(acc, total, z, GATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The result [ROWS, BD] of sums and their weights, times sigmoid(z) if GATED."""
    result = acc * (1 / total)[:, None]
    if GATED:
        result = result * (1 / (1 + tl.exp2(z.to(tl.float32) * -1.4426950408889634)))
    return result


@jit
def part_shift(context, LEAST: tl.constexpr, MOST: tl.constexpr, SINGLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Log2 of the keys of one part for a query that sees `context` keys. Up to 2^SINGLE keys are one part; more, parts
    of the smallest power of two from 2^LEAST on that makes no more than MOST (a power of two) of them."""
    log2 = ((context - 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126  # rounded up; exact up to 2^24
    return tl.where(context <= 1 << SINGLE, SINGLE, tl.maximum(log2 - (MOST.bit_length() - 1), LEAST))


@jit
def last_alike(context, shift, MOST: tl.constexpr, SINGLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many keys a query may see to have parts of the size that one of `context` keys, 2^shift, has."""
    return tl.where(context <= 1 << SINGLE, 1 << SINGLE, MOST << shift)


@jit
def _some(  # type: ignore[no-untyped-def]
    parts, weights, places, count, line, low,
    GROUP: tl.constexpr, D: tl.constexpr, BG: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Largest scores [BG, BP] and sums [BG, BP, BD] of the parts from `low` on."""
    deep = tl.arange(0, BD)[None, None, :]
    p = low + tl.arange(0, BP)[None, :]
    here = (tl.arange(0, BG) < GROUP)[:, None] & (p < count)
    top = tl.load(weights + (line * 2 * places)[:, None] + p, mask=here, other=float("-inf"), cache_modifier=".cg")
    source = ((line * places)[:, None] + p)[:, :, None] * D + deep
    return top, tl.load(parts + source, mask=here[:, :, None] & (deep < D), other=0, cache_modifier=".cg")


@jit
def merge(  # type: ignore[no-untyped-def]
    parts, weights, places, count, gate, out, gate_stride, gate_head, token, first_head,
    HQ: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, GATED: tl.constexpr, BG: tl.constexpr, BP: tl.constexpr,
    MOST: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Put the `count` parts of one token's keys together, in their order, for GROUP heads from `first_head` on. They
    were written by other programs of the launch, so they are read past the first cache."""
    g = tl.arange(0, BG)
    line = token * HQ + first_head + g
    p = tl.arange(0, MOST)[None, :]
    here = (g < GROUP)[:, None] & (p < count)
    at = weights + (line * 2 * places)[:, None] + p
    tops = tl.load(at, mask=here, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(at + places, mask=here, other=0, cache_modifier=".cg")
    top = tl.max(tl.where((g < GROUP)[:, None], tops, 0.0), 1)
    total = tl.sum(totals * tl.exp2(tops - top[:, None]), 1)
    acc = tl.zeros([BG, BD], tl.float32)
    share, sums = _some(parts, weights, places, count, line, 0, GROUP, D, BG, BP, BD)
    for low in range(0, count, BP):
        next_share, next_sums = _some(parts, weights, places, count, line, low + BP, GROUP, D, BG, BP, BD)
        acc += tl.sum(sums * tl.exp2(share - top[:, None])[:, :, None], 1)
        share, sums = next_share, next_sums
    total = tl.where(g < GROUP, total, 1.0)
    d = tl.arange(0, BD)
    inside = (g < GROUP)[:, None] & (d < D)[None, :]
    z = tl.load(rows_at(gate, token, first_head + g, gate_stride, gate_head, d), mask=inside & GATED, other=0)
    whole = finished(acc, total, z, GATED).to(out.dtype.element_ty)
    tl.store(rows_at(out, token, first_head + g, HQ * D, D, d), whole, mask=inside)


def sequence_tile(num_sequences: int) -> dict[str, int]:
    """How many sequences a program looks through at once. A warp has 32 to itself; past that, few sizes, since each is
    a kernel of its own."""
    return {"NB": 32 if num_sequences <= 32 else power_of_two(num_sequences, 256)}


def merge_tile(group: int, size: int) -> dict[str, int]:
    """Heads and parts that `merge` takes at once: about 8192 numbers."""
    heads, columns = power_of_two(group), power_of_two(size, 16)
    return {"BG": heads, "BP": max(1, 8192 // (heads * columns))}


@cache
def counters(device: torch.device) -> Tensor:
    """Zeros that programs count a tile's parts with, [tokens * Hkv]: whoever takes the last one leaves a zero again.
    Launches share them, since they follow each other on one stream."""
    return torch.zeros(MOST_COUNTERS, dtype=torch.int32, device=device)
