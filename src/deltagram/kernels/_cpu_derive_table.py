"""Compiled body of derive_table.py."""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._compiled import compiled
from deltagram.kernels._vectors import get_int, put_int, put_long


@compiled
def _kernel(
    counts: int, kind: int, row: int, cu_tokens: int, prefill_start: int, grants: int, num_grants: int, sequences: int,
    tokens: int, context: int, lengths: int, committed: int, page_table: int, rows: int, pages: int, page_size: int,
    start: int, length: int, pending: int, sequence: int, position: int, token: int, place: int, padded: int,
) -> None:  # fmt: skip
    for i in range(num_grants):
        if i < get_int(counts, 3):
            put_int(page_table, get_int(grants, 3 * i) * pages + get_int(grants, 3 * i + 1), get_int(grants, 3 * i + 2))
        else:
            put_int(page_table, (rows - 1) * pages, 0)
    for n in range(sequences):
        what, owner, first, end = get_int(kind, n), get_int(row, n), get_int(cu_tokens, n), get_int(cu_tokens, n + 1)
        begun = 0 if what == 3 else get_int(prefill_start, n) if what == 2 else get_int(lengths, owner) - 1
        put_int(start, n, begun)
        put_int(length, n, 0 if what == 3 else begun + end - first)
        put_int(pending, n, max(get_int(committed, owner) - 1, 0) if what <= 1 else 0)
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
    lengths: Tensor, committed: Tensor, page_table: Tensor, page_size: int, num_rows: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    sequences, (rows, pages) = len(kind), page_table.shape
    start, length, pending = torch.empty(3, sequences, dtype=torch.int32).unbind()
    sequence, position, token = torch.empty(3, num_rows, dtype=torch.int32).unbind()
    place = torch.empty(num_rows, dtype=torch.int64)
    assert tokens.is_contiguous() and page_table.is_contiguous() and grants.is_contiguous()
    _kernel(
        counts.data_ptr(), kind.data_ptr(), row.data_ptr(), cu_tokens.data_ptr(), prefill_start.data_ptr(),
        grants.data_ptr(), len(grants), sequences, tokens.data_ptr(), tokens.shape[1], lengths.data_ptr(),
        committed.data_ptr(), page_table.data_ptr(), rows, pages, page_size, start.data_ptr(), length.data_ptr(),
        pending.data_ptr(), sequence.data_ptr(), position.data_ptr(), token.data_ptr(), place.data_ptr(), num_rows,
    )  # fmt: skip
    return start, length, pending, sequence, position, token, place
