"""Compiled body of select_blocks.py."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deltagram.kernels._threads import spread, threaded
from deltagram.kernels._vectors import LANES, fma, get, get_int, load, put, put_int, splat, total


@threaded
def _kernel(
    first: int, last: int, scores: int, q: int, heads: int, size: int, block_keys: int, a_page: int, page_table: int,
    pages: int, row: int, sequences: int, cu_tokens: int, position: int, block_size: int, top_k: int, out: int,
) -> None:  # fmt: skip
    n = 0
    for t in range(first, last):
        while n < sequences and t >= get_int(cu_tokens, n + 1):
            n += 1
        chosen = out + 4 * t * top_k
        blocks = (get_int(position, t) + 1) // block_size if n < sequences else 0
        if blocks <= top_k:  # all of them
            for b in range(top_k):
                put_int(chosen, b, b if b < blocks else -1)
            continue
        table = page_table + 4 * get_int(row, n) * pages
        for b in range(blocks):
            key = block_keys + 4 * (get_int(table, b // a_page) * a_page + b % a_page) * size
            score = np.float32(0)
            for h in range(heads):
                a = splat(0.0)
                for i in range(0, size, LANES):
                    a = fma(load(q + 4 * (t * heads + h) * size, i, size), load(key, i, size), a)
                score += max(total(a), np.float32(0))
            put(scores, b, score)
        for j in range(top_k):
            best = 0
            for b in range(1, blocks):
                if get(scores, b) > get(scores, best):
                    best = b
            put_int(chosen, j, best)
            put(scores, best, np.float32(-1))


def select_blocks(
    q: Tensor, block_keys: Tensor, page_table: Tensor, row: Tensor, cu_tokens: Tensor, length: Tensor, position: Tensor,
    block_size: int, top_k: int,
) -> Tensor:  # fmt: skip
    rows, heads, size = q.shape
    assert q.is_contiguous() and block_keys.is_contiguous()
    out = torch.empty(rows, top_k, dtype=torch.int32)
    pages, a_page = page_table.shape[1], block_keys.shape[1]
    spread(
        _kernel, rows, 64, pages * a_page, q.data_ptr(), heads, size, block_keys.data_ptr(), a_page,
        page_table.data_ptr(), pages, row.data_ptr(), len(row), cu_tokens.data_ptr(), position.data_ptr(), block_size,
        top_k, out.data_ptr(),
    )  # fmt: skip
    return out
