"""Compiled body of row_decode.py, for bf16 and fp32 rows without scales."""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._threads import spread, threaded
from deltagram.kernels._vectors import LANES, get_brief, get_int, get_long, load, put, splat, store


@threaded
def _kernel(
    first: int, last: int, scratch: int, table: int, row_bytes: int, ids: int, wide: int, dim: int, brief: int, out: int
) -> None:
    for n in range(first, last):
        row, line = get_long(ids, n) if wide else get_int(ids, n), out + 4 * n * dim
        if row < 0:
            for i in range(0, dim, LANES):
                store(line, i, dim, splat(0.0))
        elif brief:
            for i in range(dim):
                put(line, i, get_brief(table + row * row_bytes, i))
        else:
            for i in range(0, dim, LANES):
                store(line, i, dim, load(table + row * row_bytes, i, dim))


def row_decode(
    table: Tensor, ids: Tensor, values: torch.dtype, dim: int, dtype: torch.dtype, group: int = 0, scale: Tensor |
    None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if out is None:
        out = torch.empty(*ids.shape, dim)
    assert table.is_contiguous() and ids.is_contiguous() and out.is_contiguous()
    spread(
        _kernel, ids.numel(), 512, 0, table.data_ptr(), table.shape[1], ids.data_ptr(), ids.itemsize == 8, dim,
        values == torch.bfloat16, out.data_ptr(),
    )  # fmt: skip
    return out
