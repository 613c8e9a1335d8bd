"""The parts of a token's keys put together, in their order."""

from __future__ import annotations

from torch import Tensor

from deltagram.kernels._triton import Build, jit, power_of_two, tl
from deltagram.kernels.paged_attention import gather, split
from deltagram.kernels.paged_attention.tile import give, part_size


@jit(
    do_not_specialize=["places"],
    do_not_specialize_on_alignment=["kind", "sequence", "position"],
)
def _kernel(  # type: ignore[no-untyped-def]
    parts,
    weights,
    kind,
    sequence,
    position,
    gate,
    out,
    places,
    gate_stride,
    gate_head,
    GATED: tl.constexpr,
    HQ: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    LISTED: tl.constexpr,  # places in a list of blocks; 0 without
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    BP: tl.constexpr,
    BD: tl.constexpr,
):
    """A program takes one head of one token."""
    t = tl.program_id(0).to(tl.int64)
    n = tl.load(sequence + t)
    if n < 0:
        return
    place = tl.load(position + t)
    what = tl.load(kind + n)
    if LISTED == 0:
        keys = (place // TOKENS + 1) * TOKENS
        size = part_size(place // TOKENS * TOKENS + 1, LEAST, MOST)
        if what > 1:
            keys = 0
    else:
        complete = (place + 1) // BLOCK
        keys = tl.where(complete > LISTED, place + 1 - (complete - LISTED) * BLOCK, tl.where(what > 1, 0, place + 1))
        size = SIZE
    if keys <= size:  # one part, done already; or none
        return
    count = (keys + size - 1) // size
    h = tl.program_id(1)
    line = t * HQ + h
    p = tl.arange(0, MOST)
    tops = tl.load(weights + line * 2 * places + p, mask=p < count, other=float("-inf"))
    totals = tl.load(weights + (line * 2 + 1) * places + p, mask=p < count, other=0)
    top = tl.max(tops, 0)
    total = tl.sum(totals * tl.exp2(tops - top), 0)
    d = tl.arange(0, BD)
    acc = tl.zeros([BD], tl.float32)
    for low in range(0, count, BP):
        q = low + tl.arange(0, BP)
        share = tl.exp2(tl.load(weights + line * 2 * places + q, mask=q < count, other=float("-inf")) - top)
        at = (line * places + q)[:, None] * D + d[None, :]
        sums = tl.load(parts + at, mask=(q < count)[:, None] & (d < D)[None, :], other=0)
        acc += tl.sum(sums * share[:, None], 0)
    whole = (acc / total)[None, :]
    one = tl.arange(0, 1)
    give(whole, gate, out, gate_stride, gate_head, t + one, h + one, one == 0, HQ, D, GATED)


def launch(
    parts: Tensor,
    weights: Tensor,
    tokens: int,
    listed: int,
    block_size: int,
    kind: Tensor,
    sequence: Tensor,
    position: Tensor,
    gate: Tensor | None,
    out: Tensor,
) -> None:
    rows, heads, places, size = parts.shape
    gates = out if gate is None else gate
    _kernel[(rows, heads)](
        parts, weights, kind, sequence, position, gates, out, places, gates.stride(0), gates.stride(1),
        GATED=gate is not None, **_sizes(heads, size, tokens, listed, block_size), num_warps=4,
    )  # fmt: skip


def _sizes(heads: int, size: int, tokens: int, listed: int, block_size: int) -> dict[str, int]:
    most = split.MOST if listed == 0 else power_of_two(gather.places(listed, block_size))
    shape = {"HQ": heads, "D": size, "TOKENS": tokens, "LISTED": listed, "BLOCK": block_size, "SIZE": gather.SIZE}
    return shape | {"LEAST": split.LEAST, "MOST": most, "BP": 8, "BD": power_of_two(size, 16)}


def builds() -> list[Build]:
    made = []
    for dtype, key_heads, group, size, gated in split.SHAPES:
        types = split.TYPES | {"gate": dtype, "out": dtype}
        for listed in (0, 128):
            sizes = _sizes(key_heads * group, size, 4, listed, 16)
            made.append(Build(_kernel, types, {"GATED": gated, **sizes}))
    return made
