"""A step's keys, values or index keys into their pages.

    pool[cache_index[t]] = values[t]      for the first cu_tokens[-1] tokens; the others are padding

Shapes: pool [pages, page size, ...], updated in place; values [T, ...] (rows may be strided), a row having the
numbers of a place of the pool; cache_index int64 [T], page * page size + offset; cu_tokens [N + 1] int32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._triton import Impl, choose, on_cpu


def cache_write(pool: Tensor, values: Tensor, cache_index: Tensor, cu_tokens: Tensor, impl: Impl = None) -> None:
    """See the file's docstring."""
    compiled = _compiled if values.dtype == torch.float32 else None
    choose(impl, pool, _reference, _reference, compiled)(pool, values, cache_index, cu_tokens)


def _reference(pool: Tensor, values: Tensor, cache_index: Tensor, cu_tokens: Tensor) -> None:
    num_tokens = int(cu_tokens[-1])
    pool.view(-1, *pool.shape[2:])[cache_index[:num_tokens]] = (
        values[:num_tokens].reshape(num_tokens, *pool.shape[2:]).to(pool.dtype)
    )


_compiled = on_cpu("cache_write")
