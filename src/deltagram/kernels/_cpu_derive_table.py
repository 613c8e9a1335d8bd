"""Compiled body of derive_table.py."""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._compiled import compiled
from deltagram.kernels._vectors import get_int, put_int, put_long


@compiled
def _kernel(
    counts: int, kind: int, row: int, cu_tokens: int, prefill_start: int, grants: int, num_grants: int, sequences: int,
    tokens: int, context: int, lengths: int, untaken: int, page_table: int, rows: int, pages: int, page_size: int,
    every: int, few: int, start: int, length: int, pending: int, stores: int, sequence: int, position: int, token: int,
    place: int, padded: int,
) -> None:  # fmt: skip
    for i in range(num_grants):
        if i < get_int(counts, 3):
            put_int(page_table, get_int(grants, 3 * i) * pages + get_int(grants, 3 * i + 1), get_int(grants, 3 * i + 2))
        else:
            put_int(page_table, (rows - 1) * pages, 0)
    interval = every if get_int(counts, 1) > few else 1
    for n in range(sequences):
        what, owner, first, end = get_int(kind, n), get_int(row, n), get_int(cu_tokens, n), get_int(cu_tokens, n + 1)
        begun = 0 if what == 3 else get_int(prefill_start, n) if what == 2 else get_int(lengths, owner) - 1
        put_int(start, n, begun)
        put_int(length, n, 0 if what == 3 else begun + end - first)
        waiting = get_int(untaken, owner) if what <= 1 else 0
        store = 1 if what <= 1 and (waiting + 1 >= interval or (begun + owner) % interval == 0) else 0
        put_int(pending, n, waiting)
        put_int(stores, n, store)
        if what != 3:
            put_int(untaken, owner, 0 if store or what == 2 else waiting + 1)
        for t in range(first, end):
            p = begun + t - first
            put_int(sequence, t, n)
            put_int(position, t, p)
            put_int(token, t, get_int(tokens, owner * context + p))
            put_long(place, t, get_int(page_table, owner * pages + p // page_size) * page_size + p % page_size)
    for t in range(get_int(counts, 0), padded):
        put_int(sequence, t, -1)
        put_int(position, t, 0)
        put_int(token, t, 0)
        put_long(place, t, -1)


def derive_table(
    counts: Tensor, kind: Tensor, row: Tensor, cu_tokens: Tensor, prefill_start: Tensor, grants: Tensor, tokens: Tensor,
    lengths: Tensor, untaken: Tensor, page_table: Tensor, page_size: int, every: int, few: int, num_rows: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    sequences, (rows, pages) = len(kind), page_table.shape
    start, length, pending, stores = torch.empty(4, sequences, dtype=torch.int32).unbind()
    sequence, position, token = torch.empty(3, num_rows, dtype=torch.int32).unbind()
    place = torch.empty(num_rows, dtype=torch.int64)
    assert tokens.is_contiguous() and page_table.is_contiguous() and grants.is_contiguous()
    _kernel(
        counts.data_ptr(), kind.data_ptr(), row.data_ptr(), cu_tokens.data_ptr(), prefill_start.data_ptr(),
        grants.data_ptr(), len(grants), sequences, tokens.data_ptr(), tokens.shape[1], lengths.data_ptr(),
        untaken.data_ptr(), page_table.data_ptr(), rows, pages, page_size, every, few, start.data_ptr(),
        length.data_ptr(), pending.data_ptr(), stores.data_ptr(), sequence.data_ptr(), position.data_ptr(),
        token.data_ptr(), place.data_ptr(), num_rows,
    )  # fmt: skip
    return start, length, pending, stores, sequence, position, token, place
