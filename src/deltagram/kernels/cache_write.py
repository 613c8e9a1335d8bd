"""A step's keys, values or index keys into their pages.

    pool[cache_index[t]] = values[t]      for the first cu_tokens[-1] tokens; the others are padding

Shapes: pool [pages, page size, ...], updated in place; values [T, ...] (rows may be strided), a row having the
numbers of a place of the pool; cache_index int64 [T], page * page size + offset; cu_tokens [N + 1] int32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._triton import Build, Impl, choose, jit, on_cpu, tl


def cache_write(pool: Tensor, values: Tensor, cache_index: Tensor, cu_tokens: Tensor, impl: Impl = None) -> None:
    """See the file's docstring."""
    compiled = _compiled if values.dtype == torch.float32 else None
    choose(impl, pool, _reference, _launch, compiled)(pool, values, cache_index, cu_tokens)


def _reference(pool: Tensor, values: Tensor, cache_index: Tensor, cu_tokens: Tensor) -> None:
    num_tokens = int(cu_tokens[-1])
    pool.view(-1, *pool.shape[2:])[cache_index[:num_tokens]] = (
        values[:num_tokens].reshape(num_tokens, *pool.shape[2:]).to(pool.dtype)
    )


_compiled = on_cpu("cache_write")


@jit(do_not_specialize=["num_sequences"], do_not_specialize_on_alignment=["cu_tokens", "cache_index"])
def _kernel(  # type: ignore[no-untyped-def]
    pool, values, cache_index, cu_tokens, num_sequences, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    if t < tl.load(cu_tokens + num_sequences):
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        row = tl.load(values + t * stride + at, mask=at < SIZE)
        tl.store(pool + tl.load(cache_index + t) * SIZE + at, row.to(pool.dtype.element_ty), mask=at < SIZE)


_BLOCK = 1024


def _launch(pool: Tensor, values: Tensor, cache_index: Tensor, cu_tokens: Tensor) -> None:
    rows, size = len(values), values[:1].numel()
    assert pool.is_contiguous() and values.stride(-1) == 1
    assert values.dim() == 2 or values.stride(1) == values.shape[2]
    _kernel[(rows, -(-size // _BLOCK))](
        pool, values, cache_index, cu_tokens, len(cu_tokens) - 1, values.stride(0), SIZE=size, BLOCK=_BLOCK, num_warps=4
    )


def ahead_of_time() -> list[Build]:
    types = {"cache_index": "*i64", "cu_tokens": "*i32", "num_sequences": "i32", "stride": "i32"}
    return [
        Build(_kernel, types | {"pool": dtype, "values": dtype}, {"SIZE": size, "BLOCK": _BLOCK})
        for dtype, size in (("*bf16", 2048), ("*fp32", 20))
    ]
