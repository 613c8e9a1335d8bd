"""What a step's sequence table says of each sequence and token, derived from what the host packed and the token
history.

    start    [N]  prefill: as packed; decode and verify: the request's tokens but the last; 0 for padding
    length   [N]  start + new tokens; 0 for padding
    pending  [N]  accepted drafts of the request's last step: committed - 1, at least 0; 0 for prefill and padding
    sequence [T]  the sequence of each token; -1 for padding
    position [T]  its absolute position in its request; 0 for padding
    token    [T]  its id; 0 for padding
    place    [T]  int64, where its keys and values go: page * page size + offset; -1 for padding

First the step's page grants are written to the page table; those that are not real go to the pad row's first page, as
0.

Shapes, all int32 unless said: counts [4] (real tokens, sequences, chunks, grants); kind, row, prefill_start [N];
cu_tokens [N + 1]; grants [G, 3] (row, index, page); tokens [rows, context], lengths and committed [rows]; page_table
[rows, pages], updated in place. `num_rows` is T, padding included.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._triton import Impl, choose, on_cpu

_VERIFY, _PREFILL, _PAD = 1, 2, 3  # kinds: decode is 0


def derive_table(
    counts: Tensor,
    kind: Tensor,
    row: Tensor,
    cu_tokens: Tensor,
    prefill_start: Tensor,
    grants: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    committed: Tensor,
    page_table: Tensor,
    page_size: int,
    num_rows: int,
    impl: Impl = None,
) -> tuple[Tensor, ...]:
    """See the file's docstring."""
    body = choose(impl, counts, _reference, _reference, _compiled)
    packed = counts, kind, row, cu_tokens, prefill_start, grants
    return body(*packed, tokens, lengths, committed, page_table, page_size, num_rows)


def _reference(
    counts: Tensor,
    kind: Tensor,
    row: Tensor,
    cu_tokens: Tensor,
    prefill_start: Tensor,
    grants: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    committed: Tensor,
    page_table: Tensor,
    page_size: int,
    num_rows: int,
) -> tuple[Tensor, ...]:
    device = counts.device
    rows, pages = page_table.shape
    granted = torch.arange(len(grants), device=device) < counts[3]
    grant_row, index, page = grants.long().unbind(1)
    target = torch.where(granted, grant_row * pages + index, (rows - 1) * pages)
    page_table.view(-1).index_put_((target,), torch.where(granted, page, 0).int())

    owner, real = row.long(), kind != _PAD
    start = torch.where(kind == _PREFILL, prefill_start, lengths[owner] - 1)
    start = torch.where(real, start, 0).int()
    length = torch.where(real, start + cu_tokens.diff(), 0).int()
    pending = torch.where(kind <= _VERIFY, committed[owner] - 1, 0).clamp_(min=0)

    ticks = torch.arange(num_rows, dtype=torch.int32, device=device)
    valid = ticks < counts[0]
    found = torch.searchsorted(cu_tokens[1:], ticks, right=True).clamp_(max=len(kind) - 1)
    position = torch.where(valid, start[found] + ticks - cu_tokens[found], 0).int()
    token_row, long_position = owner[found], position.long()
    token = torch.where(valid, tokens[token_row, long_position], 0)
    entry = page_table[token_row, long_position // page_size].long()
    place = torch.where(valid, entry * page_size + long_position % page_size, -1)
    return start, length, pending, torch.where(valid, found, -1).int(), position, token, place


_compiled = on_cpu("derive_table")
