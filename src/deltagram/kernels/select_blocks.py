"""The indexer's choice: the complete blocks of keys that a query attends to.

    score(block) = sum over heads of relu(q_h . key(block)) / sqrt(D)      in fp32

A query at position p sees blocks 0 .. (p + 1) // block_size - 1, those complete at its own position. The `top_k` best
are chosen; of equal scores the lower block number wins.

Shapes: q [T, heads, D]; block_keys [pages, blocks a page, D]; page_table [rows, pages a request], row [N], cu_tokens
[N + 1], length [N], position [T]: int32. Returns int32 [T, top_k], block numbers within the request in no particular
order, -1 where there are fewer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._triton import Impl, choose, on_cpu


def select_blocks(
    q: Tensor,
    block_keys: Tensor,
    page_table: Tensor,
    row: Tensor,
    cu_tokens: Tensor,
    length: Tensor,
    position: Tensor,
    block_size: int,
    top_k: int,
    impl: Impl = None,
) -> Tensor:
    """See the file's docstring."""
    body = choose(impl, q, _reference, _reference, _compiled if block_keys.dtype == torch.float32 else None)
    return body(q, block_keys, page_table, row, cu_tokens, length, position, block_size, top_k)


def _reference(
    q: Tensor,
    block_keys: Tensor,
    page_table: Tensor,
    row: Tensor,
    cu_tokens: Tensor,
    length: Tensor,
    position: Tensor,
    block_size: int,
    top_k: int,
) -> Tensor:
    out = torch.full((q.shape[0], top_k), -1, dtype=torch.int32, device=q.device)
    a_page = block_keys.shape[1]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    for n in (cu_tokens.diff() > 0).nonzero().squeeze(1).tolist():
        tokens = slice(int(cu_tokens[n]), int(cu_tokens[n + 1]))
        num_blocks = int(length[n]) // block_size
        if num_blocks == 0:
            continue
        pages = page_table[int(row[n]), : -(-num_blocks // a_page)].long()
        keys = block_keys[pages].flatten(0, 1)[:num_blocks].to(dtype)
        score = (q[tokens].to(dtype) @ keys.T).relu_().sum(1) / q.shape[2] ** 0.5  # [n, blocks]
        complete = (position[tokens].long() + 1) // block_size
        score.masked_fill_(
            torch.arange(num_blocks, device=q.device) >= complete[:, None], -1
        )  # relu: real scores are >= 0
        best = score.sort(dim=1, descending=True, stable=True)
        chosen = torch.where(best.values >= 0, best.indices, -1)[:, :top_k].int()
        out[tokens, : chosen.shape[1]] = chosen
    return out


_compiled = on_cpu("select_blocks")
