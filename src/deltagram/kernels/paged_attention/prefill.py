"""Prefill tokens: tiles of queries over the keys in order, from the first to the last that one of them sees.

A tile is up to TOKENS consecutive tokens of a sequence with all query heads of one key head. Sequence n's tokens take
the tiles from cu_tokens[n] // TOKENS + n on; some of the last have none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._triton import Build, dependent_launch, jit, power_of_two, tl
from deltagram.kernels.paged_attention.split import LOG2_E, SHAPES, TYPES, query_tile
from deltagram.kernels.paged_attention.tile import finished, rows_at, sequence_tile, take


@jit
def _walk(  # type: ignore[no-untyped-def]
    acc, top, total, query, k_cache, v_cache, table, h, place, low, high, last, scale,
    HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys low to high, in tiles; MASKED: not all queries see all of them, and those past `last` nobody does."""
    d = tl.arange(0, BD)
    near = tl.arange(0, BN)[:, None] * (HKV * D) + d[None, :]
    next_page = tl.load(table + low // PAGE, mask=low < high, other=0)  # as in split.py
    for at in range(low, high, BN):
        key_at = at + tl.arange(0, BN)
        page = next_page.to(tl.int64)
        next_page = tl.load(table + (at + BN) // PAGE, mask=at + BN < high, other=0)
        line = (page * PAGE + at % PAGE) * (HKV * D) + h * D
        inside = (d < D)[None, :] & (key_at <= last)[:, None] if MASKED else (d < D)[None, :] & (key_at >= 0)[:, None]
        key = tl.load(k_cache + line + near, mask=inside, other=0)
        value = tl.load(v_cache + line + near, mask=inside, other=0)
        visible = key_at[None, :] <= place[:, None]
        acc, top, total = take(acc, top, total, query, key, value, visible, scale, MASKED)
    return acc, top, total


@jit(
    do_not_specialize=["num_sequences", "num_tiles", "pages", "dense_until"],
    do_not_specialize_on_alignment=["row", "kind", "cu_tokens", "length"],
)
def _kernel(  # type: ignore[no-untyped-def]
    q,
    k_cache,
    v_cache,
    page_table,
    row,
    kind,
    cu_tokens,
    length,
    gate,
    out,
    num_sequences,
    num_tiles,
    pages,
    dense_until,  # tokens from this position on see a selection, and are not ours
    q_stride,
    gate_stride,
    gate_head,
    scale,
    GATED: tl.constexpr,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    NB: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = num_tiles - 1 - tl.program_id(1)  # a sequence's last tile, which sees most, first
    ticks = tl.arange(0, NB)
    begins = tl.load(cu_tokens + ticks, mask=ticks < num_sequences, other=0)
    n = tl.sum(((begins // TOKENS + ticks <= tile) & (ticks < num_sequences)).to(tl.int32)) - 1
    begin = tl.load(cu_tokens + n)
    new = tl.load(cu_tokens + n + 1) - begin
    offset = (tile - begin // TOKENS - n) * TOKENS
    past = tl.load(length + n) - new
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if (tl.load(kind + n) != 2) | (offset >= new) | (past + offset >= dense_until):
        return
    h = tl.program_id(0)
    table = page_table + tl.load(row + n).to(tl.int64) * pages
    last = tl.minimum(past + tl.minimum(offset + TOKENS, new), dense_until) - 1
    d = tl.arange(0, BD)
    rows = tl.arange(0, ROWS)
    place = past + offset + rows // GROUP
    head = h * GROUP + rows % GROUP
    token = (begin + offset + rows // GROUP).to(tl.int64)
    real = (rows < TOKENS * GROUP) & (place <= last)
    whole = real[:, None] & (d < D)[None, :]
    query = tl.load(rows_at(q, token, head, q_stride, D, d), mask=whole, other=0)
    acc = tl.zeros([ROWS, BD], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    shared = (past + offset + 1) // BN * BN  # keys before this one, all of the queries see
    acc, top, total = _walk(
        acc, top, total, query, k_cache, v_cache, table, h, place, 0, shared, last, scale, HKV, D, PAGE, BN, BD, False
    )
    acc, top, total = _walk(
        acc, top, total, query, k_cache, v_cache, table, h, place, shared, last + 1, last, scale, HKV, D, PAGE, BN, BD,
        True,
    )  # fmt: skip
    z = tl.load(rows_at(gate, token, head, gate_stride, gate_head, d), mask=whole & GATED, other=0)
    result = finished(acc, total, z, GATED).to(out.dtype.element_ty)
    tl.store(rows_at(out, token, head, HKV * GROUP * D, D, d), result, mask=whole)


def launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row: Tensor,
    kind: Tensor,
    cu_tokens: Tensor,
    length: Tensor,
    scale: float,
    dense_until: int,
    gate: Tensor | None,
    out: Tensor,
) -> None:
    num_rows, heads, size = q.shape
    page_size, key_heads = k_cache.shape[1:3]
    full, group = q.dtype == torch.float32, heads // key_heads
    sizes = _sizes(full, group, size, len(row))
    num_tiles = num_rows // sizes["TOKENS"] + len(row)
    gates, pdl = q if gate is None else gate, dependent_launch(q)
    _kernel[(key_heads, num_tiles)](
        q, k_cache, v_cache, page_table, row, kind, cu_tokens, length, gates, out, len(row), num_tiles,
        page_table.shape[1], dense_until, q.stride(0), gates.stride(0), gates.stride(1), scale * LOG2_E,
        GATED=gate is not None, HKV=key_heads, GROUP=group, D=size, PAGE=page_size, **sizes, PDL=pdl, launch_pdl=pdl,
        **_options(full),
    )  # fmt: skip


def _sizes(full: bool, group: int, size: int, num_sequences: int) -> dict[str, int]:
    tile = query_tile(group, 32 if full else 128) | {"BD": power_of_two(size, 16), "BN": 32 if full else 64}
    return tile | sequence_tile(num_sequences)


def _options(full: bool) -> dict[str, int]:
    return {"num_warps": 8, "num_stages": 1 if full else 2}


def builds() -> list[Build]:
    made = []
    for dtype, key_heads, group, size, has_gate in SHAPES:
        types = TYPES | dict.fromkeys(("q", "k_cache", "v_cache", "gate", "out"), dtype)
        constants = {"GATED": has_gate, "HKV": key_heads, "GROUP": group, "D": size, "PAGE": 64}
        full = dtype == "*fp32"
        made.append(Build(_kernel, types, constants | _sizes(full, group, size, 1), _options(full)))
    return made
