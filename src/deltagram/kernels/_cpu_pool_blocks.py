"""Compiled body of pool_blocks.py."""

from __future__ import annotations

from torch import Tensor

from deltagram.kernels._threads import spread, threaded
from deltagram.kernels._vectors import LANES, add, get_int, get_long, load, multiply, norm_row, rope_row, splat, store


@threaded
def _kernel(
    first: int, last: int, scratch: int, index_keys: int, block_keys: int, size: int, w: int, eps: float, cos: int,
    sin: int, dim: int, position: int, index: int, cu_tokens: int, sequences: int, block_size: int,
) -> None:  # fmt: skip
    for t in range(first, min(last, get_int(cu_tokens, sequences))):
        end = get_int(position, t) + 1
        if end % block_size != 0:
            continue
        place = get_long(index, t)
        key = block_keys + 4 * (place // block_size) * size
        for i in range(0, size, LANES):
            a = splat(0.0)
            for back in range(block_size - 1, -1, -1):
                a = add(a, load(index_keys + 4 * (place - back) * size, i, size))
            store(key, i, size, multiply(a, splat(1.0 / block_size)))
        norm_row(key, w, size, eps, key)
        at = 4 * (end - block_size) * dim
        rope_row(key, cos + at, sin + at, dim // 2)


def pool_blocks(
    index_keys: Tensor, block_keys: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, position: Tensor, cache_index:
    Tensor, cu_tokens: Tensor, block_size: int, eps: float,
) -> None:  # fmt: skip
    rows = len(position)
    assert index_keys.is_contiguous() and block_keys.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    spread(
        _kernel, rows, rows, 0, index_keys.data_ptr(), block_keys.data_ptr(), index_keys.shape[-1], weight.data_ptr(),
        eps, cos.data_ptr(), sin.data_ptr(), cos.shape[1], position.data_ptr(), cache_index.data_ptr(),
        cu_tokens.data_ptr(), len(cu_tokens) - 1, block_size,
    )  # fmt: skip
