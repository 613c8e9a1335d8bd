"""What a step's sequence table says of each sequence and token, derived from what the host packed and the token
history.

    start    [N]  prefill: as packed; decode and verify: the request's tokens but the last; 0 for padding
    length   [N]  start + new tokens; 0 for padding
    pending  [N]  tokens before start that the recurrent state has yet to take: untaken; 0 for prefill and padding
    stores   [N]  whether the step stores the state, past the first of its tokens; 0 for prefill and padding
    sequence [T]  the sequence of each token; -1 for padding
    position [T]  its absolute position in its request; 0 for padding
    token    [T]  its id; 0 for padding
    place    [T]  int64, where its keys and values go: page * page size + offset; -1 for padding

A state is stored after every `every` tokens or so: at the latest when that many are untaken, and by sequences of one
start in different steps; in a step of up to `few` sequences, by all. `untaken` becomes what is so after the step's
first token (commit_tokens adds accepted drafts): 0 where the step stores, or prefills.

First the step's page grants are written to the page table; those that are not real go to the pad row's first page, as
0. No entry of the page table is granted twice in a step.

Shapes, all int32 unless said: counts [4] (real tokens, sequences, chunks, grants); kind, row, prefill_start [N];
cu_tokens [N + 1]; grants [G, 3] (row, index, page); tokens [rows, context], lengths [rows]; untaken [rows] and
page_table [rows, pages], updated in place. `num_rows` is T, padding included.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._triton import Build, Impl, choose, jit, on_cpu, tl

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
    untaken: Tensor,
    page_table: Tensor,
    page_size: int,
    every: int,
    few: int,
    num_rows: int,
    impl: Impl = None,
) -> tuple[Tensor, ...]:
    """See the file's docstring."""
    body = choose(impl, counts, _reference, _launch, _compiled)
    packed = counts, kind, row, cu_tokens, prefill_start, grants
    return body(*packed, tokens, lengths, untaken, page_table, page_size, every, few, num_rows)


def _reference(
    counts: Tensor,
    kind: Tensor,
    row: Tensor,
    cu_tokens: Tensor,
    prefill_start: Tensor,
    grants: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    untaken: Tensor,
    page_table: Tensor,
    page_size: int,
    every: int,
    few: int,
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
    pending = torch.where(kind <= _VERIFY, untaken[owner], 0)
    every = every if int(counts[1]) > few else 1
    stores = (kind <= _VERIFY) & ((pending + 1 >= every) | ((start + row) % every == 0))
    untaken[owner[real]] = torch.where(stores | (kind == _PREFILL), 0, pending + 1)[real]

    ticks = torch.arange(num_rows, dtype=torch.int32, device=device)
    valid = ticks < counts[0]
    found = torch.searchsorted(cu_tokens[1:], ticks, right=True).clamp_(max=len(kind) - 1)
    position = torch.where(valid, start[found] + ticks - cu_tokens[found], 0).int()
    token_row, long_position = owner[found], position.long()
    token = torch.where(valid, tokens[token_row, long_position], 0)
    entry = page_table[token_row, long_position // page_size].long()
    place = torch.where(valid, entry * page_size + long_position % page_size, -1)
    return start, length, pending, stores.int(), torch.where(valid, found, -1).int(), position, token, place


_compiled = on_cpu("derive_table")
_TOKENS = 128  # of a program; also its sequences and grants
_SEARCHED = 32  # sequences or grants compared with a program's tokens at a time


@jit
def _start(kind, prefill_start, lengths, n, owner, real):  # type: ignore[no-untyped-def]
    """Tokens computed before this step of sequences `n`, which are those of history rows `owner`."""
    known = tl.load(prefill_start + n, mask=real, other=0)
    return tl.where(kind == 2, known, tl.load(lengths + owner, mask=real, other=1) - 1)


# The parts of the packed array lie where the bucket puts them.
@jit(
    do_not_specialize=["num_rows", "num_sequences", "num_grants", "rows", "context", "pages"],
    do_not_specialize_on_alignment=["counts", "kind", "row", "cu_tokens", "prefill_start", "grants"],
)
def _kernel(  # type: ignore[no-untyped-def]
    counts,
    kind,
    row,
    cu_tokens,
    prefill_start,
    grants,
    tokens,
    lengths,
    untaken,
    page_table,
    start,
    length,
    pending,
    stores,
    sequence,
    position,
    token,
    place,
    num_rows,
    num_sequences,
    num_grants,
    rows,
    context,
    pages,
    PAGE: tl.constexpr,
    EVERY: tl.constexpr,
    FEW: tl.constexpr,
    TOKENS: tl.constexpr,
    SEARCHED: tl.constexpr,
):
    """The first programs take tokens. A token's page may be granted in this very step, by another program: so tokens
    look the grants up, and what they read of the page table counts only where no grant says otherwise. The last
    programs take sequences and write the grants."""
    num_granted = tl.load(counts + 3)
    token_programs = (num_rows + TOKENS - 1) // TOKENS
    if tl.program_id(0) < token_programs:
        t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        valid = t < tl.load(counts)
        found = tl.zeros([TOKENS], tl.int32)
        for first in range(0, num_sequences, SEARCHED):
            n = first + tl.arange(0, SEARCHED)
            end = tl.load(cu_tokens + 1 + n, mask=n < num_sequences, other=0x7FFFFFFF)
            found += tl.sum((end[None, :] <= t[:, None]).to(tl.int32), 1)
        owner = tl.load(row + found, mask=valid, other=0)
        kinds = tl.load(kind + found, mask=valid, other=3)
        begun = _start(kinds, prefill_start, lengths, found, owner, valid)
        at = tl.where(valid, begun + t - tl.load(cu_tokens + found, mask=valid, other=0), 0)
        index = at // PAGE
        page = tl.load(page_table + owner.to(tl.int64) * pages + index, mask=valid, other=0)
        for first in range(0, num_granted, SEARCHED):
            grant = first + tl.arange(0, SEARCHED)
            granted_row = tl.load(grants + grant * 3, mask=grant < num_granted, other=-1)
            granted_index = tl.load(grants + grant * 3 + 1, mask=grant < num_granted, other=-1)
            granted_page = tl.load(grants + grant * 3 + 2, mask=grant < num_granted, other=-1)
            mine = (granted_row[None, :] == owner[:, None]) & (granted_index[None, :] == index[:, None])
            granted = tl.max(tl.where(mine, granted_page[None, :], -1), 1)
            page = tl.where(granted >= 0, granted, page)
        inside = t < num_rows
        known = tl.load(tokens + owner.to(tl.int64) * context + at, mask=valid, other=0)
        tl.store(sequence + t, tl.where(valid, found, -1), mask=inside)
        tl.store(position + t, at, mask=inside)
        tl.store(token + t, known, mask=inside)
        tl.store(place + t, tl.where(valid, page.to(tl.int64) * PAGE + at % PAGE, -1), mask=inside)
    else:
        n = (tl.program_id(0) - token_programs) * TOKENS + tl.arange(0, TOKENS)
        inside = n < num_sequences
        kinds = tl.load(kind + n, mask=inside, other=3)
        real = inside & (kinds != 3)
        owner = tl.load(row + n, mask=real, other=0)
        begun = tl.where(real, _start(kinds, prefill_start, lengths, n, owner, real), 0)
        new = tl.load(cu_tokens + n + 1, mask=real, other=0) - tl.load(cu_tokens + n, mask=real, other=0)
        one_by_one = real & (kinds <= 1)
        waiting = tl.load(untaken + owner, mask=one_by_one, other=0)
        due = (waiting + 1 >= EVERY) | ((begun + owner) % EVERY == 0) | (tl.load(counts + 1) <= FEW)
        store = one_by_one & due
        tl.store(untaken + owner, tl.where(store | (kinds == 2), 0, waiting + 1), mask=real)
        tl.store(start + n, begun, mask=inside)
        tl.store(length + n, begun + new, mask=inside)
        tl.store(pending + n, waiting, mask=inside)
        tl.store(stores + n, store.to(tl.int32), mask=inside)
        real_grant = n < num_granted
        granted_row = tl.load(grants + n * 3, mask=real_grant, other=0)
        granted_row = tl.where(real_grant, granted_row, rows - 1)
        granted_index = tl.load(grants + n * 3 + 1, mask=real_grant, other=0)
        granted_page = tl.load(grants + n * 3 + 2, mask=real_grant, other=0)
        entry = page_table + granted_row.to(tl.int64) * pages + granted_index
        tl.store(entry, granted_page, mask=n < num_grants)


def _launch(
    counts: Tensor,
    kind: Tensor,
    row: Tensor,
    cu_tokens: Tensor,
    prefill_start: Tensor,
    grants: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    untaken: Tensor,
    page_table: Tensor,
    page_size: int,
    every: int,
    few: int,
    num_rows: int,
) -> tuple[Tensor, ...]:
    num_sequences, num_grants = len(kind), len(grants)
    assert tokens.is_contiguous() and page_table.is_contiguous() and grants.is_contiguous()
    start, length, pending, stores = (counts.new_empty(num_sequences) for _ in range(4))
    sequence, position, token = (counts.new_empty(num_rows) for _ in range(3))
    place = counts.new_empty(num_rows, dtype=torch.int64)
    grid = (-(-num_rows // _TOKENS) + -(-max(num_sequences, num_grants) // _TOKENS),)
    _kernel[grid](
        counts, kind, row, cu_tokens, prefill_start, grants, tokens, lengths, untaken, page_table,
        start, length, pending, stores, sequence, position, token, place,
        num_rows, num_sequences, num_grants, len(page_table), tokens.shape[1], page_table.shape[1],
        PAGE=page_size, EVERY=every, FEW=few, TOKENS=_TOKENS, SEARCHED=_SEARCHED, num_warps=4,
    )  # fmt: skip
    return start, length, pending, stores, sequence, position, token, place


def ahead_of_time() -> list[Build]:
    names = _kernel.arg_names
    types = dict.fromkeys(names, "*i32") | {"place": "*i64"}
    types |= dict.fromkeys(("num_rows", "num_sequences", "num_grants", "rows", "context", "pages"), "i32")
    return [Build(_kernel, types, {"PAGE": 64, "EVERY": 4, "FEW": 2, "TOKENS": _TOKENS, "SEARCHED": _SEARCHED})]
