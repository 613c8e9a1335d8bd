"""What the kernels of paged attention share: one tile of keys taken into a running softmax, and the last step."""

from __future__ import annotations

from deltagram.kernels._triton import jit, tl


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
def give(  # type: ignore[no-untyped-def]
    result, gate, out, gate_stride, gate_head, token, head, real, HQ: tl.constexpr, D: tl.constexpr, GATED: tl.constexpr
):
    """Write rows of the result [ROWS, BD], gated. token (int64), head and real: [ROWS]."""
    d = tl.arange(0, result.shape[1])[None, :]
    inside = real[:, None] & (d < D)
    if GATED:
        line = token * gate_stride + head * gate_head
        z = tl.load(gate + line[:, None] + d, mask=inside, other=0).to(tl.float32)
        result = result / (1 + tl.exp(-z))
    line = (token * HQ + head) * D
    tl.store(out + line[:, None] + d, result.to(out.dtype.element_ty), mask=inside)


@jit
def part_size(context, LEAST: tl.constexpr, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys of one part for a query that sees `context` keys: the smallest power of two from LEAST on that makes no
    more than MOST parts."""
    size = context * 0 + LEAST
    for _ in tl.static_range(16):
        size = tl.where(size * MOST < context, size * 2, size)
    return size
