"""Decode and verify tokens: each part of a sequence's keys on its own, and the parts put together by the last to end.

Tokens of a sequence whose positions lie in the same aligned group of TOKENS, with all query heads of one key head, are
one tile of queries. A tile's keys are cut into at most MOST parts of equal size. That size depends on the group's
position alone, and is a multiple of TOKENS: so it is the same for all of its tokens, and each of them has its last key
in the same part.

The grid is fixed, and its programs share out the step's (sequence, part, tile, key head) items, which they count from
the sequences' lengths.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from deltagram.kernels._triton import Build, jit, power_of_two, tl
from deltagram.kernels.paged_attention.tile import (
    MOST_COUNTERS,
    counters,
    gated,
    merge,
    merge_tile,
    part_shift,
    rows_at,
    sequence_tile,
    take,
)

LEAST, MOST = 7, 64  # log2 of a part's keys, and parts


@jit(
    do_not_specialize=["num_rows", "num_sequences", "places", "pages"],
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
    parts,  # [tokens, HQ, places, D] fp32
    weights,  # [tokens, HQ, 2, places] fp32: largest score, sum
    done,  # [tokens, HKV] parts of a tile, at its first token; zero before and after
    num_rows,
    num_sequences,
    places,
    pages,
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
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    BG: tl.constexpr,
    BP: tl.constexpr,
):
    ticks = tl.arange(0, NB)
    there = ticks < num_sequences
    first = tl.load(cu_tokens + ticks, mask=there, other=0)
    new = tl.load(cu_tokens + ticks + 1, mask=there, other=0) - first
    ends = tl.load(length + ticks, mask=there, other=1)
    mine = (tl.load(kind + ticks, mask=there, other=3) <= 1) & (new > 0)
    start = ends - new
    tiles = (ends - 1) // TOKENS - start // TOKENS + 1
    cuts = ((ends - 1) >> part_shift(start + 1, LEAST, MOST)) + 1
    items = tl.where(mine, tiles * cuts * HKV, 0)
    upto = tl.cumsum(items, 0)
    d = tl.arange(0, BD)
    rows = tl.arange(0, ROWS)
    for item in range(tl.program_id(0), tl.sum(items), tl.num_programs(0)):
        n = tl.sum((upto <= item).to(tl.int32))
        rest = item - tl.sum(tl.where(ticks < n, items, 0))
        begin = tl.load(cu_tokens + n)
        end = tl.load(length + n)
        past = end - (tl.load(cu_tokens + n + 1) - begin)
        table = page_table + tl.load(row + n).to(tl.int64) * pages
        h = rest % HKV
        rest = rest // HKV
        num_tiles = (end - 1) // TOKENS - past // TOKENS + 1
        group = (past // TOKENS + rest % num_tiles) * TOKENS  # the first position of the tile's group
        part = rest // num_tiles
        shift = part_shift(group + 1, LEAST, MOST)
        low, last = part << shift, tl.minimum(group + TOKENS, end)
        if low < last:
            place = group + rows // GROUP
            token = (begin + place - past).to(tl.int64)
            head = h * GROUP + rows % GROUP
            real = (rows < TOKENS * GROUP) & (place >= past) & (place < end)
            whole = real[:, None] & (d < D)[None, :]
            next_page = tl.load(table + low // PAGE)  # a tile ahead: loads that wait for a load get fewer buffers
            z = tl.load(rows_at(gate, token, head, gate_stride, gate_head, d), mask=whole & GATED, other=0)  # for later
            query = tl.load(rows_at(q, token, head, q_stride, D, d), mask=whole, other=0)
            acc = tl.zeros([ROWS, BD], tl.float32)
            top = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            high = tl.minimum((part + 1) << shift, last)
            near = tl.arange(0, BN)[:, None] * (HKV * D) + d[None, :]
            for at in range(low, high, BN):
                key_at = at + tl.arange(0, BN)
                page = next_page.to(tl.int64)
                next_page = tl.load(table + (at + BN) // PAGE, mask=at + BN < high, other=0)
                line = (page * PAGE + at % PAGE) * (HKV * D) + h * D
                inside = (key_at < high)[:, None] & (d < D)[None, :]
                key = tl.load(k_cache + line + near, mask=inside, other=0)
                value = tl.load(v_cache + line + near, mask=inside, other=0)
                visible = (key_at[None, :] <= place[:, None]) & (key_at < high)[None, :]
                acc, top, total = take(acc, top, total, query, key, value, visible, scale, True)
            if group >> shift == 0:  # one part: done
                result = gated(acc / total[:, None], z, GATED).to(out.dtype.element_ty)
                tl.store(rows_at(out, token, head, HKV * GROUP * D, D, d), result, mask=whole)
            else:
                kept = token * (HKV * GROUP) + head
                to = parts + (kept * places + part) * D
                tl.store(to[:, None] + d[None, :], acc, mask=whole)
                tl.store(weights + kept * 2 * places + part, top, mask=real)
                tl.store(weights + (kept * 2 + 1) * places + part, total, mask=real)
                tl.debug_barrier()  # all of the program's writes come before its count
                from_token = (begin + tl.maximum(group, past) - past).to(tl.int64)
                ended = tl.atomic_add(done + from_token * HKV + h, 1, sem="acq_rel")
                if ended == group >> shift:
                    for i in range(last - tl.maximum(group, past)):
                        merge(
                            parts, weights, places, ended + 1, gate, out, gate_stride, gate_head, from_token + i,
                            h * GROUP, HKV * GROUP, GROUP, D, GATED, BG, BP, MOST, BD,
                        )  # fmt: skip
                    tl.store(done + from_token * HKV + h, 0)
    width = tl.full([], HKV * GROUP * D, tl.int64)
    for t in range(tl.load(cu_tokens + num_sequences) + tl.program_id(0), num_rows, tl.num_programs(0)):  # padding
        for h in range(HKV * GROUP):
            tl.store(out + width * t + h * D + d, tl.zeros([BD], out.dtype.element_ty), mask=d < D)


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
    gate: Tensor | None,
    out: Tensor,
    tokens: int,
) -> None:
    """Attend decode and verify tokens, of which there are at most `tokens`, and zero the rows of padding."""
    num_rows, heads, size = q.shape
    page_size, key_heads = k_cache.shape[1:3]
    pages, group = page_table.shape[1], heads // key_heads
    places = min(MOST, -(-pages * page_size >> LEAST))
    sizes = _sizes(q.dtype == torch.float32, group, size, len(row))
    parts = q.new_empty((tokens, heads, places, size), dtype=torch.float32)
    weights = q.new_empty((tokens, heads, 2, places), dtype=torch.float32)
    assert tokens * key_heads <= MOST_COUNTERS
    items = min(tokens, len(row) * (1 + tokens // sizes["TOKENS"])) * places * key_heads
    gates = q if gate is None else gate
    _kernel[(min(items, resident(size) * processors(q.device)),)](
        q, k_cache, v_cache, page_table, row, kind, cu_tokens, length, gates, out, parts, weights,
        counters(q.device), num_rows, len(row), places, pages, q.stride(0), gates.stride(0), gates.stride(1),
        scale * LOG2_E, GATED=gate is not None, HKV=key_heads, GROUP=group, D=size, PAGE=page_size, **sizes, **OPTIONS,
    )  # fmt: skip


LOG2_E = 1.4426950408889634
OPTIONS = {"num_warps": 4, "num_stages": 3}


def resident(size: int) -> int:
    """Programs that a multiprocessor holds at once: two tiles of 64 keys and values of 256 fill most of its memory."""
    return max(1, 256 // power_of_two(size))


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def query_tile(group: int, least: int) -> dict[str, int]:
    """Rows of a tile of queries and how many tokens, a power of two, they take: `group` heads each."""
    rows = power_of_two(group, least)
    return {"ROWS": rows, "TOKENS": 1 << ((rows // group).bit_length() - 1)}


def _sizes(full: bool, group: int, size: int, num_sequences: int) -> dict[str, int]:
    """`full`: fp32 inputs, whose products no tensor core takes."""
    tile = query_tile(group, 16) | {"BD": power_of_two(size, 16), "BN": 32 if full or size > 256 else 64}
    tile |= {"LEAST": LEAST, "MOST": MOST}
    return tile | sequence_tile(num_sequences) | merge_tile(group, size)


TYPES = (
    dict.fromkeys(("page_table", "row", "kind", "cu_tokens", "length", "sequence", "position", "selected"), "*i32")
    | dict.fromkeys(("num_rows", "num_sequences", "num_tiles", "places", "pages", "dense_until"), "i32")
    | dict.fromkeys(("q_stride", "gate_stride", "gate_head"), "i32")
    | {"scale": "fp32", "parts": "*fp32", "weights": "*fp32", "done": "*i32"}
)
SHAPES = (("*bf16", 4, 4, 256, True), ("*bf16", 2, 8, 128, False), ("*fp32", 2, 3, 80, True))  # of builds


def builds() -> list[Build]:
    made = []
    for dtype, key_heads, group, size, has_gate in SHAPES:
        types = TYPES | dict.fromkeys(("q", "k_cache", "v_cache", "gate", "out"), dtype)
        constants = {"GATED": has_gate, "HKV": key_heads, "GROUP": group, "D": size, "PAGE": 64}
        made.append(Build(_kernel, types, constants | _sizes(dtype == "*fp32", group, size, 1), OPTIONS))
    return made
