"""Compiled body of derive_drafts.py."""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._compiled import compiled
from deltagram.kernels._vectors import get_int, put_int, put_long


@compiled
def _kernel(
    wanted: int, row: int, cu_tokens: int, start: int, sequence: int, position: int, num_rows: int, sequences: int,
    tokens: int, context: int, lengths: int, page_table: int, rows: int, pages: int, page_size: int, passes: int,
    follower: int, order: int, first: int, counts: int, kind: int, pass_row: int, pass_cu_tokens: int,
    pass_sequence: int, pass_position: int, pass_length: int, place: int,
) -> None:  # fmt: skip
    for t in range(num_rows):
        n = get_int(sequence, t)
        after = min(get_int(position, t) + 1, context - 1)
        put_int(follower, t, get_int(tokens, get_int(row, n) * context + after) if n >= 0 else 0)
    for n in range(sequences):
        rank = 0
        for m in range(sequences):
            ahead = get_int(wanted, m) - get_int(wanted, n)
            if ahead > 0 or (ahead == 0 and m < n):
                rank += 1
        last = get_int(cu_tokens, n) + get_int(lengths, get_int(row, n)) - 2 - get_int(start, n)
        put_long(order, rank, n)
        put_long(first, rank, last if get_int(wanted, n) > 0 else 0)
        for i in range(passes):
            line, real, owner = i * sequences + rank, get_int(wanted, n) >= i + 2, get_int(row, n)
            at = get_int(lengths, owner) - 1 + i if real else 0
            page = get_int(page_table, owner * pages + at // page_size)
            put_int(kind, line, 0 if real else 3)
            put_int(pass_row, line, owner if real else rows - 1)
            put_int(pass_sequence, line, rank if real else -1)
            put_int(pass_position, line, at)
            put_int(pass_length, line, at + 1 if real else 0)
            put_long(place, line, page * page_size + at % page_size if real else -1)
    for i in range(passes):
        count = 0
        for n in range(sequences):
            put_int(pass_cu_tokens, i * (sequences + 1) + n, count)
            if get_int(pass_sequence, i * sequences + n) >= 0:
                count += 1
        put_int(pass_cu_tokens, i * (sequences + 1) + sequences, count)
        for field in range(4):
            put_int(counts, 4 * i + field, count if field < 2 else 0)


def derive_drafts(
    wanted: Tensor, row: Tensor, cu_tokens: Tensor, start: Tensor, sequence: Tensor, position: Tensor, tokens: Tensor,
    lengths: Tensor, page_table: Tensor, page_size: int, max_draft: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    num_rows, sequences, passes, (rows, pages) = len(sequence), len(row), max_draft - 1, page_table.shape
    assert wanted.dtype == torch.int32 and tokens.is_contiguous() and page_table.is_contiguous()
    follower = torch.empty(num_rows, dtype=torch.int32)
    order, first = torch.empty(2, sequences, dtype=torch.int64).unbind()
    counts, cu = torch.empty(passes, 4, dtype=torch.int32), torch.empty(passes, sequences + 1, dtype=torch.int32)
    kind, owner, number, at, length = torch.empty(5, passes, sequences, dtype=torch.int32).unbind()
    place = torch.empty(passes, sequences, dtype=torch.int64)
    _kernel(
        wanted.data_ptr(), row.data_ptr(), cu_tokens.data_ptr(), start.data_ptr(), sequence.data_ptr(),
        position.data_ptr(), num_rows, sequences, tokens.data_ptr(), tokens.shape[1], lengths.data_ptr(),
        page_table.data_ptr(), rows, pages, page_size, passes, follower.data_ptr(), order.data_ptr(), first.data_ptr(),
        counts.data_ptr(), kind.data_ptr(), owner.data_ptr(), cu.data_ptr(), number.data_ptr(), at.data_ptr(),
        length.data_ptr(), place.data_ptr(),
    )  # fmt: skip
    return follower, order, first, counts, kind, owner, cu, number, at, length, place
