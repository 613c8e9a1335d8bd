"""Tokens that see a selection: each over its own listed blocks and the tokens after its last complete block.

In a call with a selection every decode and verify token comes here, its keys in order where it sees everything, and of
the prefill tokens those that do not. A token's keys are cut into parts of SIZE.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._triton import Build, jit, power_of_two, tl
from deltagram.kernels.paged_attention.split import LOG2_E, SHAPES, TYPES, query_tile
from deltagram.kernels.paged_attention.tile import MOST_COUNTERS, counters, finished, merge, merge_tile, rows_at, take

SIZE = 256  # keys of a part
BN = 32
OPTIONS = {"num_warps": 4, "num_stages": 2, "maxnreg": 128}


@jit
def _keys_at(  # type: ignore[no-untyped-def]
    i, high, listed, shift, selected, LISTED: tl.constexpr, BLOCK: tl.constexpr
):
    """Positions of a token's keys i: those of the listed blocks first, then others, `shift` on."""
    some = (i < high) & (i < listed)
    block = tl.load(selected + i // BLOCK, mask=some, other=0)
    return tl.where(some, block * BLOCK + i % BLOCK, i + shift)


@jit(
    do_not_specialize=["places", "pages"],
    do_not_specialize_on_alignment=["row", "kind", "sequence", "position"],
)
def _kernel(  # type: ignore[no-untyped-def]
    q,
    k_cache,
    v_cache,
    page_table,
    row,
    kind,
    sequence,
    position,
    selected,
    gate,
    out,
    parts,
    weights,
    done,  # [T, HKV] as in split.py
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
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    MOST: tl.constexpr,
    BG: tl.constexpr,
    BP: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    n = tl.load(sequence + t)
    h = tl.program_id(1)
    part = tl.program_id(2)
    rows = tl.arange(0, ROWS)
    head = h * GROUP + rows % GROUP
    real = rows < GROUP
    d = tl.arange(0, BD)
    whole = real[:, None] & (d < D)[None, :]
    if n < 0:  # padding
        if part == 0:
            tl.store(
                rows_at(out, t, head, HKV * GROUP * D, D, d), tl.zeros([ROWS, BD], out.dtype.element_ty), mask=whole
            )
        return
    place = tl.load(position + t)
    complete = (place + 1) // BLOCK
    partial = complete > LISTED
    if (tl.load(kind + n) > 1) & (complete <= LISTED):
        return
    count = tl.where(partial, place + 1 - (complete - LISTED) * BLOCK, place + 1)
    low = part * SIZE
    if low >= count:
        return
    table = page_table + tl.load(row + n).to(tl.int64) * pages
    z = tl.load(rows_at(gate, t, head, gate_stride, gate_head, d), mask=whole & GATED, other=0)
    query = tl.load(rows_at(q, t, head, q_stride, D, d), mask=whole, other=0)
    acc = tl.zeros([ROWS, BD], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    high = tl.minimum(low + SIZE, count)
    listed = tl.where(partial, LISTED * BLOCK, 0)
    shift = tl.where(partial, complete * BLOCK, 0) - listed
    chosen = selected + t * LISTED
    # Two tiles ahead, and pages one: loads that wait for a load get fewer buffers.
    i = low + tl.arange(0, BN)
    key_at = _keys_at(i, high, listed, shift, chosen, LISTED, BLOCK)
    page = tl.load(table + key_at // PAGE, mask=i < high, other=0).to(tl.int64)
    line = (page * PAGE + key_at % PAGE) * (HKV * D) + h * D
    key_at = _keys_at(i + BN, high, listed, shift, chosen, LISTED, BLOCK)
    for at in range(low, high, BN):
        i = at + tl.arange(0, BN)
        seen = i < high
        from_line = line[:, None] + d[None, :]
        page = tl.load(table + key_at // PAGE, mask=i + BN < high, other=0).to(tl.int64)
        line = (page * PAGE + key_at % PAGE) * (HKV * D) + h * D
        key_at = _keys_at(i + 2 * BN, high, listed, shift, chosen, LISTED, BLOCK)
        inside = seen[:, None] & (d < D)[None, :]
        key = tl.load(k_cache + from_line, mask=inside, other=0)
        value = tl.load(v_cache + from_line, mask=inside, other=0)
        acc, top, total = take(acc, top, total, query, key, value, seen[None, :], scale, True)
    if count <= SIZE:
        result = finished(acc, total, z, GATED).to(out.dtype.element_ty)
        tl.store(rows_at(out, t, head, HKV * GROUP * D, D, d), result, mask=whole)
    else:
        kept = t * (HKV * GROUP) + head
        tl.store(parts + ((kept * places + part) * D)[:, None] + d[None, :], acc, mask=whole)
        tl.store(weights + kept * 2 * places + part, top, mask=real)
        tl.store(weights + (kept * 2 + 1) * places + part, total, mask=real)
        tl.debug_barrier()  # all of the program's writes come before its count
        ended = tl.atomic_add(done + t * HKV + h, 1, sem="acq_rel")
        if ended == (count - 1) // SIZE:
            merge(
                parts, weights, places, ended + 1, gate, out, gate_stride, gate_head, t, h * GROUP, HKV * GROUP, GROUP,
                D, GATED, BG, BP, MOST, BD,
            )  # fmt: skip
            tl.store(done + t * HKV + h, 0)


def places(listed: int, block_size: int) -> int:
    """Parts of a token's keys, at most."""
    return -(-((listed + 1) * block_size - 1) // SIZE)


def launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row: Tensor,
    kind: Tensor,
    sequence: Tensor,
    position: Tensor,
    scale: float,
    selected: Tensor,
    block_size: int,
    gate: Tensor | None,
    out: Tensor,
) -> None:
    num_rows, heads, size = q.shape
    page_size, key_heads = k_cache.shape[1:3]
    listed = selected.shape[1]
    assert selected.is_contiguous() and num_rows * key_heads <= MOST_COUNTERS
    most = places(listed, block_size)
    parts = q.new_empty((num_rows, heads, most, size), dtype=torch.float32)
    weights = q.new_empty((num_rows, heads, 2, most), dtype=torch.float32)
    gates = q if gate is None else gate
    _kernel[(num_rows, key_heads, most)](
        q, k_cache, v_cache, page_table, row, kind, sequence, position, selected, gates, out, parts, weights,
        counters(q.device), most, page_table.shape[1], q.stride(0), gates.stride(0), gates.stride(1), scale * LOG2_E,
        GATED=gate is not None, HKV=key_heads, GROUP=heads // key_heads, D=size, PAGE=page_size, LISTED=listed,
        BLOCK=block_size, **_sizes(heads // key_heads, size, listed, block_size), **OPTIONS,
    )  # fmt: skip


def _sizes(group: int, size: int, listed: int, block_size: int) -> dict[str, int]:
    tile = {"ROWS": query_tile(group, 16)["ROWS"], "BD": power_of_two(size, 16), "BN": BN, "SIZE": SIZE}
    return tile | {"MOST": power_of_two(places(listed, block_size)), **merge_tile(group, size)}


def builds() -> list[Build]:
    made = []
    for dtype, key_heads, group, size, has_gate in SHAPES:
        types = TYPES | dict.fromkeys(("q", "k_cache", "v_cache", "gate", "out"), dtype)
        constants = {"GATED": has_gate, "HKV": key_heads, "GROUP": group, "D": size, "PAGE": 64}
        constants |= {"LISTED": 128, "BLOCK": 16, **_sizes(group, size, 128, 16)}
        made.append(Build(_kernel, types, constants, OPTIONS))
    return made
