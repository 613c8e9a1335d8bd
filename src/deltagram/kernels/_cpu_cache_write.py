"""Compiled body of cache_write.py."""

from __future__ import annotations

from torch import Tensor

from deltagram.kernels._threads import spread, threaded
from deltagram.kernels._vectors import LANES, get_int, get_long, load, store


@threaded
def _kernel(
    first: int, last: int, scratch: int, pool: int, values: int, stride: int, size: int, index: int, cu_tokens: int,
    sequences: int,
) -> None:  # fmt: skip
    for t in range(first, min(last, get_int(cu_tokens, sequences))):
        line = pool + 4 * get_long(index, t) * size
        for i in range(0, size, LANES):
            store(line, i, size, load(values + 4 * t * stride, i, size))


def cache_write(pool: Tensor, values: Tensor, cache_index: Tensor, cu_tokens: Tensor) -> None:
    rows = len(values)
    size = values[:1].numel()
    assert (
        pool.is_contiguous() and values.stride(-1) == 1 and (values.dim() == 2 or values.stride(1) == values.shape[2])
    )
    spread(
        _kernel, rows, 512, 0, pool.data_ptr(), values.data_ptr(), values.stride(0), size, cache_index.data_ptr(),
        cu_tokens.data_ptr(), len(cu_tokens) - 1,
    )  # fmt: skip
