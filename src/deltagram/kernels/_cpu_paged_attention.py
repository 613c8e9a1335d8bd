"""Compiled body of paged_attention.py: for each token and key head, a list of the visible keys, then two passes over
it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deltagram.kernels._compiled import compiled, inlined, spread
from deltagram.kernels._vectors import (
    LANES,
    add,
    exp,
    fma,
    get,
    get_int,
    load,
    multiply,
    put,
    put_int,
    sigmoid,
    splat,
    store,
    subtract,
    total,
)  # fmt: skip


@inlined
def _list_keys(keys, page_table, page_size, position, selected, count, block_size, marks):  # type: ignore[no-untyped-def]
    """Cache places of the keys that the query at `position` sees, into `keys`; their number. selected 0: all up to it.
    marks: room for an int32 a block."""
    n, complete = 0, (position + 1) // block_size
    if selected != 0:
        for block in range(complete):
            put_int(marks, block, 0)
        for j in range(count):
            block = get_int(selected, j)
            if 0 <= block < complete:
                put_int(marks, block, 1)
    for p in range(position + 1):
        if selected == 0 or p // block_size >= complete or get_int(marks, p // block_size) != 0:
            put_int(keys, n, get_int(page_table, p // page_size) * page_size + p % page_size)
            n += 1
    return n


@compiled
def _kernel(
    first: int, last: int, scratch: int, q: int, q_stride: int, heads: int, groups: int, size: int, k_cache: int,
    v_cache: int, key_heads: int, page_size: int, page_table: int, pages: int, row: int, sequences: int, cu_tokens:
    int, position: int, scale: float, selected: int, count: int, block_size: int, gate: int, gate_stride: int,
    gate_head_stride: int, context: int, rows: int, out: int,
) -> None:  # fmt: skip
    keys, marks = scratch + 4 * context, scratch + 8 * context
    for n in range(sequences):
        table = page_table + 4 * get_int(row, n) * pages
        for t in range(get_int(cu_tokens, n), get_int(cu_tokens, n + 1)):
            chosen = selected + 4 * t * count if selected != 0 else 0
            visible = _list_keys(keys, table, page_size, get_int(position, t), chosen, count, block_size, marks)
            for h in range(first, last):
                query, o = q + 4 * (t * q_stride + h * size), out + 4 * (t * heads + h) * size
                at = 4 * (h // groups) * size
                step = 4 * key_heads * size
                highest = np.float32(-np.inf)
                for m in range(visible):
                    line = k_cache + get_int(keys, m) * step + at
                    a = splat(0.0)
                    for i in range(0, size, LANES):
                        a = fma(load(query, i, size), load(line, i, size), a)
                    score = total(a) * np.float32(scale)
                    put(scratch, m, score)
                    highest = max(highest, score)
                sums = splat(0.0)
                for i in range(0, visible, LANES):
                    store(scratch, i, visible, exp(subtract(load(scratch, i, visible), splat(highest))))
                    sums = add(sums, load(scratch, i, visible))
                whole = splat(np.float32(1) / total(sums))
                for i in range(0, size, LANES):
                    a = splat(0.0)
                    for m in range(visible):
                        line = v_cache + get_int(keys, m) * step + at
                        a = fma(splat(get(scratch, m)), load(line, i, size), a)
                    a = multiply(a, whole)
                    if gate != 0:
                        a = multiply(a, sigmoid(load(gate + 4 * (t * gate_stride + h * gate_head_stride), i, size)))
                    store(o, i, size, a)
    for t in range(get_int(cu_tokens, sequences), rows):
        for i in range(first * size, last * size, LANES):
            store(out + 4 * t * heads * size, i, last * size, splat(0.0))


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, row: Tensor, cu_tokens: Tensor, length: Tensor,
    position: Tensor, scale: float, selected: Tensor | None = None, block_size: int = 1, gate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    rows, heads, size = q.shape
    _, page_size, key_heads, _ = k_cache.shape
    assert q.stride()[1:] == (size, 1) and k_cache.is_contiguous() and v_cache.is_contiguous()
    out = torch.empty(rows, heads, size)
    pages = page_table.shape[1]
    context = pages * page_size
    spread(
        _kernel, heads, 1 if rows >= 64 else heads, 3 * context, q.data_ptr(), q.stride(0), heads, heads // key_heads,
        size, k_cache.data_ptr(), v_cache.data_ptr(), key_heads, page_size, page_table.data_ptr(), pages,
        row.data_ptr(), len(row), cu_tokens.data_ptr(), position.data_ptr(), scale, 0 if selected is None else
        selected.data_ptr(), 0 if selected is None else selected.shape[1], block_size, 0 if gate is None else
        gate.data_ptr(), 0 if gate is None else gate.stride(0), 0 if gate is None else gate.stride(1), context, rows,
        out.data_ptr(),
    )  # fmt: skip
    return out
