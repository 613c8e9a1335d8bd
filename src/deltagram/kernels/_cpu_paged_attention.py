"""Compiled body of paged_attention.py: for each token and key head, a list of the visible keys, then two passes over
it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deltagram.kernels._compiled import inlined
from deltagram.kernels._packed import room
from deltagram.kernels._products import PRODUCT, product
from deltagram.kernels._threads import spread, threaded
from deltagram.kernels._vectors import (
    LANES,
    add,
    exp,
    fma,
    get,
    get_int,
    greater,
    largest,
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

_MANY, _ROWS = 16, 32  # tokens from which on a sequence takes panels, and how many it takes at a time


@inlined
def _mark(marks, position, selected, count, block_size):  # type: ignore[no-untyped-def]
    """For each block complete at `position`, whether it is among the `count` selected."""
    complete = (position + 1) // block_size
    for block in range(complete):
        put_int(marks, block, 0)
    for j in range(count):
        block = get_int(selected, j)
        if 0 <= block < complete:
            put_int(marks, block, 1)


@inlined
def _list_keys(keys, page_table, page_size, position, selected, count, block_size, marks):  # type: ignore[no-untyped-def]
    """Places in the cache of the keys that the query at `position` sees, into `keys`; their number. selected 0: all up
    to it. marks: room for an int32 a block."""
    n, left = 0, position + 1
    complete = left // block_size * block_size
    if selected != 0:
        _mark(marks, position, selected, count, block_size)
    for index in range((position + page_size) // page_size):
        page, begun = get_int(page_table, index) * page_size, index * page_size
        for i in range(min(page_size, left - begun)):
            if selected == 0 or begun + i >= complete or get_int(marks, (begun + i) // block_size) != 0:
                put_int(keys, n, page + i)
                n += 1
    return n


@inlined
def _one(q, size, k_cache, v_cache, step, keys, visible, scale, scores, gate, out):  # type: ignore[no-untyped-def]
    """One query of one head over the keys listed, which lie `step` bytes apart."""
    highest = np.float32(-np.inf)
    for m in range(visible):
        line = k_cache + get_int(keys, m) * step
        a = splat(0.0)
        for i in range(0, size, LANES):
            a = fma(load(q, i, size), load(line, i, size), a)
        score = total(a) * np.float32(scale)
        put(scores, m, score)
        highest = max(highest, score)
    whole = splat(np.float32(1) / _exponentials(scores, visible, highest))
    for i in range(0, size, LANES):
        a = splat(0.0)
        for m in range(visible):
            a = fma(splat(get(scores, m)), load(v_cache + get_int(keys, m) * step, i, size), a)
        _finish(out, i, size, multiply(a, whole), gate)


@inlined
def _exponentials(scores, count, highest):  # type: ignore[no-untyped-def]
    """exp(score - highest) in place; their sum."""
    sums = splat(0.0)
    for i in range(0, count, LANES):
        store(scores, i, count, exp(subtract(load(scores, i, count), splat(highest))))
        sums = add(sums, load(scores, i, count))
    return total(sums)


@inlined
def _finish(out, i, size, value, gate):  # type: ignore[no-untyped-def]
    if gate != 0:
        value = multiply(value, sigmoid(load(gate, i, size)))
    store(out, i, size, value)


@inlined
def _to_panels(k_cache, v_cache, step, size, table, page_size, count, k_panels, v_panels):  # type: ignore[no-untyped-def]
    """The first `count` keys of one head as the panels of a weight [keys, size], its values as those of [size,
    keys]."""
    for p in range(count):
        place = (get_int(table, p // page_size) * page_size + p % page_size) * step
        panel = k_panels + 4 * (p // LANES * size * LANES + p % LANES)
        for i in range(size):
            put(panel, i * LANES, get(k_cache + place, i))
        for i in range(0, size, LANES):
            store(v_panels + 4 * (i * count + p * LANES), 0, LANES, load(v_cache + place, i, size))


@threaded
def _kernel(
    first: int, last: int, scratch: int, f: int, q: int, q_stride: int, heads: int, groups: int, size: int, k_cache:
    int, v_cache: int, key_heads: int, page_size: int, page_table: int, pages: int, row: int, sequences: int,
    cu_tokens: int, position: int, scale: float, selected: int, count: int, block_size: int, gate: int, gate_stride:
    int, gate_head_stride: int, context: int, rows: int, out: int,
) -> None:  # fmt: skip
    keys, marks = scratch + 4 * context, scratch + 8 * context
    width, step = (size + 15) // 16 * 16, 4 * key_heads * size
    k_panels = scratch + 12 * context
    v_panels = k_panels + 4 * context * size
    scores = v_panels + 4 * context * width
    results = scores + 4 * _ROWS * context
    sums = results + 4 * _ROWS * width
    for n in range(sequences):
        table, begin, end = page_table + 4 * get_int(row, n) * pages, get_int(cu_tokens, n), get_int(cu_tokens, n + 1)
        if end - begin < _MANY:
            for t in range(begin, end):
                chosen = selected + 4 * t * count if selected != 0 else 0
                visible = _list_keys(keys, table, page_size, get_int(position, t), chosen, count, block_size, marks)
                for h in range(first, last):
                    at, gates = 4 * (h // groups) * size, gate + 4 * (t * gate_stride + h * gate_head_stride)
                    _one(
                        q + 4 * (t * q_stride + h * size), size, k_cache + at, v_cache + at, step, keys, visible, scale,
                        scratch, gates if gate != 0 else 0, out + 4 * (t * heads + h) * size,
                    )  # fmt: skip
            continue
        length = get_int(position, end - 1) + 1
        for h in range(first, last):
            at = 4 * (h // groups) * size
            if h == first or h % groups == 0:
                _to_panels(k_cache + at, v_cache + at, step, size, table, page_size, length, k_panels, v_panels)
            for block in range(begin, end, _ROWS):
                some = min(_ROWS, end - block)
                seen = get_int(position, block + some - 1) + 1
                product(
                    f, q + 4 * (block * q_stride + h * size), q_stride, some, size, k_panels, 0, seen, scores, context
                )
                for r in range(some):
                    line, p = scores + 4 * r * context, get_int(position, block + r)
                    visible, highest = p + 1, np.float32(-np.inf)
                    if selected != 0:
                        chosen = selected + 4 * (block + r) * count
                        _mark(marks, p, chosen, count, block_size)
                        for m in range(visible // block_size * block_size):
                            if get_int(marks, m // block_size) == 0:
                                put(line, m, np.float32(-np.inf))
                    top = splat(highest)
                    for m in range(0, visible - LANES + 1, LANES):
                        score = multiply(load(line, m, m + LANES), splat(scale))
                        store(line, m, m + LANES, score)
                        top = greater(top, score)
                    highest = largest(top)
                    for m in range(visible // LANES * LANES, visible):
                        put(line, m, get(line, m) * np.float32(scale))
                        highest = max(highest, get(line, m))
                    put(sums, r, _exponentials(line, visible, highest))
                    for i in range(visible, seen):
                        put(line, i, np.float32(0))
                for i in range(0, size, LANES):
                    product(f, scores, context, some, seen, v_panels + 4 * i * length, 0, LANES, results + 4 * i, width)
                for r in range(some):
                    t = block + r
                    gates = gate + 4 * (t * gate_stride + h * gate_head_stride)
                    whole = splat(np.float32(1) / get(sums, r))
                    for i in range(0, size, LANES):
                        value = multiply(load(results + 4 * r * width, i, size), whole)
                        _finish(out + 4 * (t * heads + h) * size, i, size, value, gates if gate != 0 else 0)
    for t in range(get_int(cu_tokens, sequences), rows):
        for i in range(first * size, last * size, LANES):
            store(out + 4 * t * heads * size, i, last * size, splat(0.0))


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, row: Tensor, kind: Tensor, cu_tokens: Tensor,
    length: Tensor, sequence: Tensor, position: Tensor, scale: float, mixed: bool, max_draft: int,
    selected: Tensor | None, block_size: int, gate: Tensor | None,
) -> Tensor:  # fmt: skip
    rows, heads, size = q.shape
    _, page_size, key_heads, _ = k_cache.shape
    assert q.stride()[1:] == (size, 1) and k_cache.is_contiguous() and v_cache.is_contiguous()
    out = torch.empty(rows, heads, size)
    pages = page_table.shape[1]
    context = room(pages * page_size)
    some = rows - len(row) + 1 >= _MANY
    panels = context * (size + room(size) + _ROWS) + _ROWS * (room(size) + 1) if some else 0
    spread(
        _kernel, heads, 1 if rows >= 64 else heads, 3 * context + panels, PRODUCT, q.data_ptr(), q.stride(0), heads,
        heads // key_heads, size, k_cache.data_ptr(), v_cache.data_ptr(), key_heads, page_size, page_table.data_ptr(),
        pages, row.data_ptr(), len(row), cu_tokens.data_ptr(), position.data_ptr(), scale, 0 if selected is None else
        selected.data_ptr(), 0 if selected is None else selected.shape[1], block_size, 0 if gate is None else
        gate.data_ptr(), 0 if gate is None else gate.stride(0), 0 if gate is None else gate.stride(1), context, rows,
        out.data_ptr(),
    )  # fmt: skip
    return out
