"""What a draft head runs on after a step, derived from the step's table and the history that took the step's tokens.

    follower [T]  the token after each of the step's, as the history has it; 0 for padding
    order    [N]  int64, the step's sequences by the drafts they want: most first, of equals the lower number
    first    [N]  int64, in that order: the step's token at position L - 2, L being the request's known tokens; 0 for a
                  sequence that wants no draft
    and, for pass i of K = max_draft - 1, which yields draft i + 2 of the sequences that want as many (those first in
    that order; the others are its padding), a sequence table's
    counts   [K, 4], kind [K, N] (decode or padding), row [K, N], cu_tokens [K, N + 1], sequence [K, N],
    position [K, N]  L - 1 + i; 0 for padding
    length   [K, N]  position + 1; 0 for padding
    place    [K, N]  int64, page * page size + offset; -1 for padding

Shapes, all int32 unless said: wanted [N], 0 for padding; row, start [N], cu_tokens [N + 1], sequence, position [T] of
the step's table; tokens [rows, context], lengths [rows]; page_table [rows, pages], whose last row is the pad row.
Results may be rows of wider tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._triton import Build, Impl, choose, jit, on_cpu, tl

_DECODE, _PAD = 0, 3  # kinds


def derive_drafts(
    wanted: Tensor,
    row: Tensor,
    cu_tokens: Tensor,
    start: Tensor,
    sequence: Tensor,
    position: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    page_size: int,
    max_draft: int,
    impl: Impl = None,
) -> tuple[Tensor, ...]:
    """See the file's docstring."""
    body = choose(impl, wanted, _reference, _launch, _compiled)
    step = wanted, row, cu_tokens, start, sequence, position
    return body(*step, tokens, lengths, page_table, page_size, max_draft)


def _reference(
    wanted: Tensor,
    row: Tensor,
    cu_tokens: Tensor,
    start: Tensor,
    sequence: Tensor,
    position: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    page_size: int,
    max_draft: int,
) -> tuple[Tensor, ...]:
    after = (position.long() + 1).clamp(max=tokens.shape[1] - 1)
    known = tokens[row[sequence.clamp(min=0).long()].long(), after]
    follower = torch.where(sequence >= 0, known, 0)

    order = wanted.argsort(descending=True, stable=True)
    owner = row[order].long()
    first = torch.where(wanted[order] > 0, cu_tokens[order] + lengths[owner] - 2 - start[order], 0).long()

    ticks = torch.arange(len(row) + 1, dtype=torch.int32, device=row.device)
    passes = torch.arange(max_draft - 1, dtype=torch.int32, device=row.device)[:, None]
    count = (wanted >= passes + 2).sum(1, keepdim=True, dtype=torch.int32)  # [K, 1]
    real = ticks[:-1] < count
    at = torch.where(real, lengths[owner] - 1 + passes, 0)
    page = page_table[owner, (at // page_size).long()].long()
    return (
        follower,
        order,
        first,
        torch.cat((count, count, torch.zeros_like(count), torch.zeros_like(count)), 1),
        torch.where(real, _DECODE, _PAD).int(),
        torch.where(real, row[order], len(page_table) - 1),
        torch.minimum(ticks, count),
        torch.where(real, ticks[:-1], -1),
        at,
        torch.where(real, at + 1, 0),
        torch.where(real, page * page_size + at % page_size, -1),
    )


_compiled = on_cpu("derive_drafts")
_TOKENS = 128  # of a program; also its sequences
_SEARCHED = 32  # sequences compared with a program's at a time


# The parts of the packed array lie where the bucket puts them.
@jit(
    do_not_specialize=["num_rows", "num_sequences", "num_passes", "width", "rows", "context", "pages"],
    do_not_specialize_on_alignment=["wanted", "row", "cu_tokens"],
)
def _kernel(  # type: ignore[no-untyped-def]
    wanted,
    row,
    cu_tokens,
    start,
    sequence,
    position,
    tokens,
    lengths,
    page_table,
    follower,
    order,
    first,
    counts,
    kind,
    pass_row,
    pass_cu_tokens,
    pass_sequence,
    pass_position,
    pass_length,
    place,
    num_rows,
    num_sequences,
    num_passes,
    width,
    rows,
    context,
    pages,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    SEARCHED: tl.constexpr,
):
    """The first programs take tokens, the last ones sequences: each finds its own place in the order."""
    token_programs = (num_rows + TOKENS - 1) // TOKENS
    if tl.program_id(0) < token_programs:
        t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        inside = t < num_rows
        found = tl.load(sequence + t, mask=inside, other=-1)
        owner = tl.load(row + found, mask=found >= 0, other=0)
        after = tl.minimum(tl.load(position + t, mask=inside, other=0) + 1, context - 1)
        known = tl.load(tokens + owner.to(tl.int64) * context + after, mask=found >= 0, other=0)
        tl.store(follower + t, known, mask=inside)
    else:
        n = (tl.program_id(0) - token_programs) * TOKENS + tl.arange(0, TOKENS)
        inside = n < num_sequences
        mine = tl.load(wanted + n, mask=inside, other=-1)
        rank = tl.zeros([TOKENS], tl.int32)
        for begin in range(0, num_sequences, SEARCHED):
            m = begin + tl.arange(0, SEARCHED)
            other = tl.load(wanted + m, mask=m < num_sequences, other=-1)
            tie = (other[None, :] == mine[:, None]) & (m[None, :] < n[:, None])
            rank += tl.sum((tie | (other[None, :] > mine[:, None])).to(tl.int32), 1)
        owner = tl.load(row + n, mask=inside, other=0)
        known = tl.load(lengths + owner, mask=inside, other=0)
        begun = tl.load(start + n, mask=inside, other=0)
        last = tl.load(cu_tokens + n, mask=inside, other=0) + known - 2 - begun
        tl.store(order + rank, n.to(tl.int64), mask=inside)
        tl.store(first + rank, tl.where(mine > 0, last, 0).to(tl.int64), mask=inside)
        leads = inside & (rank == 0)
        for i in range(0, num_passes):
            count = 0
            for begin in range(0, num_sequences, SEARCHED):
                m = begin + tl.arange(0, SEARCHED)
                count += tl.sum((tl.load(wanted + m, mask=m < num_sequences, other=-1) >= i + 2).to(tl.int32), 0)
            real = mine >= i + 2
            at = tl.where(real, known - 1 + i, 0)
            page = tl.load(page_table + owner.to(tl.int64) * pages + at // PAGE, mask=real, other=0)
            line = i * width + rank
            tl.store(kind + line, tl.where(real, 0, 3), mask=inside)
            tl.store(pass_row + line, tl.where(real, owner, rows - 1), mask=inside)
            tl.store(pass_cu_tokens + line + 1, tl.minimum(rank + 1, count), mask=inside)
            tl.store(pass_cu_tokens + line, rank, mask=leads)
            tl.store(pass_sequence + line, tl.where(real, rank, -1), mask=inside)
            tl.store(pass_position + line, at, mask=inside)
            tl.store(pass_length + line, tl.where(real, at + 1, 0), mask=inside)
            tl.store(place + line, tl.where(real, page.to(tl.int64) * PAGE + at % PAGE, -1), mask=inside)
            for field in tl.static_range(4):
                tl.store(counts + i * 4 + field + rank, count if field < 2 else 0 * count, mask=leads)


def _launch(
    wanted: Tensor,
    row: Tensor,
    cu_tokens: Tensor,
    start: Tensor,
    sequence: Tensor,
    position: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    page_size: int,
    max_draft: int,
) -> tuple[Tensor, ...]:
    num_rows, num_sequences, passes = len(sequence), len(row), max_draft - 1
    assert wanted.dtype == torch.int32 and tokens.is_contiguous() and page_table.is_contiguous()
    width = -(-(num_sequences + 1) // 4) * 4  # each pass begins on 16 bytes, as the fields of a step do
    follower = wanted.new_empty(num_rows)
    order, first = (wanted.new_empty(num_sequences, dtype=torch.int64) for _ in range(2))
    counts = wanted.new_empty(passes, 4)
    fields = [wanted.new_empty(passes, width) for _ in range(6)]
    place = wanted.new_empty(passes, width, dtype=torch.int64)
    grid = (-(-num_rows // _TOKENS) + -(-num_sequences // _TOKENS),)
    _kernel[grid](
        wanted, row, cu_tokens, start, sequence, position, tokens, lengths, page_table,
        follower, order, first, counts, *fields, place,
        num_rows, num_sequences, passes, width, len(page_table), tokens.shape[1], page_table.shape[1],
        PAGE=page_size, TOKENS=_TOKENS, SEARCHED=_SEARCHED, num_warps=4,
    )  # fmt: skip
    kind, pass_row, pass_cu_tokens, *others = fields
    lines = [field[:, :num_sequences] for field in (kind, pass_row)]
    rest = [field[:, :num_sequences] for field in (*others, place)]
    return follower, order, first, counts, *lines, pass_cu_tokens[:, : num_sequences + 1], *rest


def ahead_of_time() -> list[Build]:
    names = _kernel.arg_names
    types = dict.fromkeys(names, "*i32") | dict.fromkeys(("order", "first", "place"), "*i64")
    types |= dict.fromkeys(("num_rows", "num_sequences", "num_passes", "width", "rows", "context", "pages"), "i32")
    return [Build(_kernel, types, {"PAGE": 64, "TOKENS": _TOKENS, "SEARCHED": _SEARCHED})]
