"""Causal attention of a step's tokens over their requests' paged keys and values.

    o = softmax(scale * q . k) v    over the tokens at positions up to the query's own

With `selected`, a query that has more complete blocks than the list has places sees only the tokens of the listed
blocks and those after its last complete block (its own included); any other query sees everything. Each key head
serves Hq / Hkv consecutive query heads. With `gate`, the result is multiplied by sigmoid(gate).

Shapes: q [T, Hq, D]; k_cache, v_cache [pages, page size, Hkv, D]; page_table [rows, pages a request], row, kind and
length [N], cu_tokens [N + 1], sequence and position [T]: int32, as in the sequence table; `mixed`, whether the step may
hold prefill sequences, and `max_draft`, the most drafted tokens of a sequence, are the bucket's; selected [T, B] int32,
as `select_blocks` returns it, or None for all; block_size in tokens; gate [T, Hq, D] (strided, dimensions side by side)
or None. Returns [T, Hq, D], zero for padding. What lies in a page past the request's length is never read into the
result, NaN or not. On a GPU a page holds a multiple of 64 tokens.

How the kernels sum, which decides the bits:
- decode and verify tokens, and on a GPU every token of a call with `selected` that does not see everything, are cut
  into parts over the keys, taken on their own (`split.py`, `gather.py`) and put together in order by the program that
  ends last. Where the cuts lie follows from the token's own position alone, so a drafted token has the bits it has when
  decoded.
- prefill tokens otherwise take their keys in order, tile by tile (`prefill.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._triton import Build, Impl, choose, on_cpu
from deltagram.kernels.paged_attention import gather, prefill, split
from deltagram.kernels.paged_attention.reference import _reference


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row: Tensor,
    kind: Tensor,
    cu_tokens: Tensor,
    length: Tensor,
    sequence: Tensor,
    position: Tensor,
    scale: float,
    mixed: bool = True,
    max_draft: int = 0,
    selected: Tensor | None = None,
    block_size: int = 1,
    gate: Tensor | None = None,
    impl: Impl = None,
) -> Tensor:
    """See the file's docstring."""
    body = choose(impl, q, _reference, _launch, _compiled if k_cache.dtype == torch.float32 else None)
    tables = page_table, row, kind, cu_tokens, length, sequence, position
    return body(q, k_cache, v_cache, *tables, scale, mixed, max_draft, selected, block_size, gate)


_compiled = on_cpu("paged_attention")


def _launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row: Tensor,
    kind: Tensor,
    cu_tokens: Tensor,
    length: Tensor,
    sequence: Tensor,
    position: Tensor,
    scale: float,
    mixed: bool = True,
    max_draft: int = 0,
    selected: Tensor | None = None,
    block_size: int = 1,
    gate: Tensor | None = None,
) -> Tensor:
    page_size = k_cache.shape[1]
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and page_table.is_contiguous()
    assert q.stride()[1:] == (q.shape[2], 1) and (gate is None or gate.stride(2) == 1) and page_size % 64 == 0
    out = torch.empty_like(q)
    caches, tables = (k_cache, v_cache, page_table, row, kind), (cu_tokens, length)
    if selected is None:
        dense_until = page_table.shape[1] * page_size
        split.launch(q, *caches, *tables, scale, gate, out, 1 + max_draft)
    else:
        dense_until = (selected.shape[1] + 1) * block_size - 1  # positions below see no more blocks than are listed
        gather.launch(q, *caches, sequence, position, scale, selected, block_size, gate, out)
    if mixed:
        prefill.launch(q, *caches, *tables, scale, dense_until, gate, out)
    return out


def ahead_of_time() -> list[Build]:
    return split.builds() + gather.builds() + prefill.builds()
