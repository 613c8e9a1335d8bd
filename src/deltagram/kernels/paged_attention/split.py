"""Decode and verify tokens: each part of a sequence's keys on its own, and the parts put together by the last to end.

Up to TOKENS tokens of a sequence, with all query heads of one key head, are one tile of queries. A token's keys are cut
into at most MOST parts of equal size, which depends on its position alone; a tile's tokens have parts of one size, and
see as much of each part as lies before them.

The grid is fixed: its programs take equal shares of the step's keys, counted from the sequences' lengths over all tiles
and key heads, and each does the parts that begin in its share. What a program does before and after a run of keys costs
as much as some hundred keys, so it goes through neighbouring parts in one run, and starts while the kernel before ends.
Of many sequences each multiprocessor has two programs, one of which computes while the other waits for its keys. How
many programs there are changes no bit.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from deltagram.kernels._triton import Build, dependent_launch, jit, power_of_two, prefetch, tl
from deltagram.kernels.paged_attention.tile import (
    MOST_COUNTERS,
    counters,
    finished,
    last_alike,
    merge,
    merge_tile,
    part_shift,
    rows_at,
    sequence_tile,
    take,
)

LEAST, MOST = 7, 32  # log2 of a part's keys, and parts
SINGLE = 8  # log2 of the keys that are one part: putting two together takes longer than to go through the second
FEW = {"num_warps": 8, "num_stages": 3}  # a program to a multiprocessor: its tiles fill most of the memory
MANY = {"num_warps": 8, "num_stages": 2, "maxnreg": 128}  # two programs to a multiprocessor


@jit
def _ask(  # type: ignore[no-untyped-def]
    k_cache, v_cache, line, h, keys, HKV: tl.constexpr, D: tl.constexpr, BN: tl.constexpr
):
    """Ask for key head h's share of a tile of keys and values, of which there are `keys` from `line` on: all heads of
    some of them, which lie side by side. The newest may be on their way: no harm, they are written where they then
    are."""
    SHARE: tl.constexpr = (BN + HKV - 1) // HKV
    SIZE: tl.constexpr = HKV * D * k_cache.dtype.element_ty.primitive_bitwidth // 8
    if SIZE % 16 == 0:
        at = (line + h * SHARE) * (HKV * D)
        size = tl.minimum(tl.minimum(keys, BN) - h * SHARE, SHARE) * SIZE
        prefetch(k_cache + at, size)
        prefetch(v_cache + at, size)


@jit
def _sum_and_least(a, b, c, d):  # type: ignore[no-untyped-def]
    return a + c, tl.minimum(b, d)


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
    SINGLE: tl.constexpr,
    ASK: tl.constexpr,
    PDL: tl.constexpr,
    BG: tl.constexpr,
    BP: tl.constexpr,
):
    ticks = tl.arange(0, NB)
    there = ticks < num_sequences
    first = tl.load(cu_tokens + ticks, mask=there, other=0)
    new = tl.load(cu_tokens + ticks + 1, mask=there, other=0) - first
    ends = tl.load(length + ticks, mask=there, other=1)
    mine = (tl.load(kind + ticks, mask=there, other=3) <= 1) & (new > 0)
    shifts = part_shift(ends - new + 1, LEAST, MOST, SINGLE)
    edges = tl.minimum(ends, last_alike(ends - new + 1, shifts, MOST, SINGLE))  # tokens from here on have other parts
    tiles = tl.cdiv(edges - ends + new, TOKENS) + tl.cdiv(ends - edges, TOKENS)
    lines = (((ends - 1) >> shifts) + 1) << (shifts - LEAST)  # a tile's keys, in least parts
    work = tl.where(mine, lines * tiles * HKV, 0)
    upto = tl.cumsum(work, 0)
    total_work, least = tl.reduce((work, tl.where(mine, 1 << (shifts - LEAST), 1 << 10)), 0, _sum_and_least)
    share = tl.cdiv(tl.cdiv(total_work, tl.num_programs(0)), least) * least
    from_here = tl.program_id(0) * share
    stop = tl.minimum(from_here + share, total_work)
    d = tl.arange(0, BD)
    rows = tl.arange(0, ROWS)
    at = from_here
    while at < stop:
        passed = tl.sum(tl.where(upto <= at, work.to(tl.int64) + (1 << 40), 0))  # sequences, and below them their work
        n = (passed >> 40).to(tl.int32)
        rest = at - passed.to(tl.int32)
        begin = tl.load(cu_tokens + n)
        end = tl.load(length + n)
        past = end - (tl.load(cu_tokens + n + 1) - begin)
        table = page_table + tl.load(row + n).to(tl.int64) * pages
        shift = part_shift(past + 1, LEAST, MOST, SINGLE)
        line = (((end - 1) >> shift) + 1) << (shift - LEAST)
        offset = rest % line
        h = rest // line % HKV
        tile = rest // line // HKV
        edge = tl.minimum(end, last_alike(past + 1, shift, MOST, SINGLE))
        before = tl.cdiv(edge - past, TOKENS)
        start = tl.where(tile < before, past + tile * TOKENS, edge + (tile - before) * TOKENS)
        until = tl.minimum(start + TOKENS, tl.where(tile < before, edge, end))
        shift = part_shift(start + 1, LEAST, MOST, SINGLE)
        count = ((until - 1) >> shift) + 1  # parts of the tile, of which those from `part` to before `other` are ours
        part = tl.cdiv(offset << LEAST, 1 << shift)
        other = tl.minimum(tl.cdiv((offset + stop - at) << LEAST, 1 << shift), count)
        low, high = part << shift, tl.minimum(other << shift, until)
        if PDL:
            if ASK & (at == from_here) & (part < other):
                page = tl.load(table + low // PAGE).to(tl.int64)
                _ask(k_cache, v_cache, page * PAGE + low % PAGE, h, high - low, HKV, D, BN)
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        if part < other:
            place = start + rows // GROUP
            token = (begin + place - past).to(tl.int64)
            head = h * GROUP + rows % GROUP
            real = (rows < TOKENS * GROUP) & (place < until)
            whole = real[:, None] & (d < D)[None, :]
            next_page = tl.load(table + low // PAGE)  # a tile ahead: loads that wait for a load get fewer buffers
            z = tl.load(rows_at(gate, token, head, gate_stride, gate_head, d), mask=whole & GATED, other=0)  # for later
            query = tl.load(rows_at(q, token, head, q_stride, D, d), mask=whole, other=0)
            acc = tl.zeros([ROWS, BD], tl.float32)
            top = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            kept = token * (HKV * GROUP) + head
            near = tl.arange(0, BN)[:, None] * (HKV * D) + d[None, :]
            for key in range(low, high, BN):
                key_at = key + tl.arange(0, BN)
                page = next_page.to(tl.int64)
                next_page = tl.load(table + (key + BN) // PAGE, mask=key + BN < high, other=0)
                from_line = (page * PAGE + key % PAGE) * (HKV * D) + h * D
                inside = (key_at < high)[:, None] & (d < D)[None, :]
                k = tl.load(k_cache + from_line + near, mask=inside, other=0)
                v = tl.load(v_cache + from_line + near, mask=inside, other=0)
                acc, top, total = take(acc, top, total, query, k, v, key_at[None, :] <= place[:, None], scale, True)
                if (count > 1) & (((key + BN) % (1 << shift) == 0) | (key + BN >= high)):  # a part ends
                    to = kept * places + (key >> shift)
                    tl.store(parts + (to * D)[:, None] + d[None, :], acc, mask=whole)
                    tl.store(weights + to + kept * places, top, mask=real)
                    tl.store(weights + to + (kept + 1) * places, total, mask=real)
                    acc = tl.zeros([ROWS, BD], tl.float32)
                    top = tl.full([ROWS], float("-inf"), tl.float32)
                    total = tl.zeros([ROWS], tl.float32)
            if count == 1:
                result = finished(acc, total, z, GATED).to(out.dtype.element_ty)
                tl.store(rows_at(out, token, head, HKV * GROUP * D, D, d), result, mask=whole)
            else:
                tl.debug_barrier()  # all of the program's writes come before its count
                first_token = (begin + start - past).to(tl.int64)
                counter = done + first_token * HKV + h
                if tl.atomic_add(counter, other - part, sem="acq_rel") == count - (other - part):
                    for i in range(until - start):
                        merge(
                            parts, weights, places, ((start + i) >> shift) + 1, gate, out, gate_stride, gate_head,
                            first_token + i, h * GROUP, HKV * GROUP, GROUP, D, GATED, BG, BP, MOST, BD,
                        )  # fmt: skip
                    tl.store(counter, 0)
        at += line - offset
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
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
    each: int,
) -> None:
    """Attend decode and verify tokens, of which a sequence has at most `each`, and zero the rows of padding."""
    num_rows, heads, size = q.shape
    page_size, key_heads = k_cache.shape[1:3]
    pages, group = page_table.shape[1], heads // key_heads
    tokens = min(num_rows, len(row) * each)  # they come first
    places = min(MOST, -(-pages * page_size >> LEAST))
    sizes = _sizes(q.dtype == torch.float32, group, size, len(row), each)
    parts = q.new_empty((tokens, heads, places, size), dtype=torch.float32)
    weights = q.new_empty((tokens, heads, 2, places), dtype=torch.float32)
    assert tokens * key_heads <= MOST_COUNTERS
    items = min(tokens, len(row) * (1 + -(-each // sizes["TOKENS"]))) * places * key_heads
    gates, pdl = q if gate is None else gate, dependent_launch(q)
    many = len(row) * key_heads > processors(q.device) and sizes["ROWS"] == 16
    _kernel[(min(items, processors(q.device) * (1 + many)),)](
        q, k_cache, v_cache, page_table, row, kind, cu_tokens, length, gates, out, parts, weights,
        counters(q.device), num_rows, len(row), places, pages, q.stride(0), gates.stride(0), gates.stride(1),
        scale * LOG2_E, GATED=gate is not None, HKV=key_heads, GROUP=group, D=size, PAGE=page_size, **sizes,
        ASK=not many, PDL=pdl, launch_pdl=pdl, **(MANY if many else FEW),
    )  # fmt: skip


LOG2_E = 1.4426950408889634


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def query_tile(group: int, least: int) -> dict[str, int]:
    """Rows of a tile of queries and how many tokens, a power of two, they take: `group` heads each."""
    rows = power_of_two(group, least)
    return {"ROWS": rows, "TOKENS": 1 << ((rows // group).bit_length() - 1)}


def _sizes(full: bool, group: int, size: int, num_sequences: int, each: int) -> dict[str, int]:
    """`full`: fp32 inputs, whose products no tensor core takes. Up to 32 rows of a tile are laid out, and summed, alike
    on tensor cores."""
    rows = max(power_of_two(group, 16), min(power_of_two(group * each), 16 if full else 32))
    tile = {"ROWS": rows, "TOKENS": rows // group, "BD": power_of_two(size, 16)}
    tile |= {"BN": 32 if full or size > 256 else 64, "LEAST": LEAST, "MOST": MOST, "SINGLE": SINGLE}
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
    for (dtype, key_heads, group, size, has_gate), each in ((SHAPES[0], 1), *((shape, 6) for shape in SHAPES)):
        types = TYPES | dict.fromkeys(("q", "k_cache", "v_cache", "gate", "out"), dtype)
        constants = {"GATED": has_gate, "HKV": key_heads, "GROUP": group, "D": size, "PAGE": 64}
        constants |= _sizes(dtype == "*fp32", group, size, 1, each) | {"ASK": each > 1}
        made.append(Build(_kernel, types, constants, FEW if each > 1 else MANY))
    return made
