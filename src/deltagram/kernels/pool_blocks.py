"""The indexer's key of each block of tokens that a step completes.

    block_keys[block] = rope(weight * m / sqrt(mean(m^2) + eps)),  m = mean of the block's raw index keys, in fp32

turned to the block's first position. A block of `block_size` tokens lies within one page.

Shapes: index_keys [pages, page size, D], the raw keys, those of this step written already; block_keys [pages, blocks
a page, D], updated in place; weight fp32 [D]; cos and sin fp32 [positions, dim]; position [T] and cu_tokens [N + 1]
int32; cache_index int64 [T], page * page size + offset of each token. Tokens that end no block, and padding, do
nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._rotary import partner, turn
from deltagram.kernels._triton import Build, Impl, choose, jit, on_cpu, power_of_two, tl


def pool_blocks(
    index_keys: Tensor,
    block_keys: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    cache_index: Tensor,
    cu_tokens: Tensor,
    block_size: int,
    eps: float,
    impl: Impl = None,
) -> None:
    """See the file's docstring."""
    body = choose(impl, index_keys, _reference, _launch, _compiled)
    body(index_keys, block_keys, weight, cos, sin, position, cache_index, cu_tokens, block_size, eps)


def _reference(
    index_keys: Tensor,
    block_keys: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    cache_index: Tensor,
    cu_tokens: Tensor,
    block_size: int,
    eps: float,
) -> None:
    num_tokens, size, dim = int(cu_tokens[-1]), index_keys.shape[-1], cos.shape[-1]
    ends = ((position[:num_tokens] + 1) % block_size == 0).nonzero().squeeze(1)
    last = cache_index[ends]
    members = last[:, None] - torch.arange(block_size - 1, -1, -1, device=last.device)
    raw = index_keys.view(-1, size)[members]
    wide = raw.to(torch.float64 if raw.dtype == torch.float64 else torch.float32)
    mean = wide.mean(1).to(raw.dtype).to(wide.dtype)
    key = (mean * (mean.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(wide.dtype)).to(raw.dtype)
    turned, first = key[:, :dim], position[ends].long() - (block_size - 1)
    halves = torch.cat((-turned[:, dim // 2 :], turned[:, : dim // 2]), -1)
    turned = turned * cos[first].to(key.dtype) + halves * sin[first].to(key.dtype)
    block_keys.view(-1, size)[last // block_size] = torch.cat((turned, key[:, dim:]), -1)


_compiled = on_cpu("pool_blocks")


@jit(do_not_specialize=["num_sequences"], do_not_specialize_on_alignment=["position", "cache_index", "cu_tokens"])
def _kernel(  # type: ignore[no-untyped-def]
    index_keys,
    block_keys,
    weight,
    cos,
    sin,
    position,
    cache_index,
    cu_tokens,
    num_sequences,
    eps,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    last = tl.load(position + t).to(tl.int64)
    if (t >= tl.load(cu_tokens + num_sequences)) | ((last + 1) % BLOCK != 0):
        return
    at = tl.load(cache_index + t)
    member = tl.arange(0, BM)[:, None]
    d = tl.arange(0, BD)
    mixed = partner(d, DIM)
    line = index_keys + (at - (BLOCK - 1) + member) * D
    inside = (member < BLOCK) & (d < D)[None, :]
    raw = tl.load(line + d[None, :], mask=inside, other=0).to(tl.float32)
    raw_mixed = tl.load(line + mixed[None, :], mask=inside, other=0).to(tl.float32)
    mean = (tl.sum(raw, 0, keep_dims=True) / BLOCK).to(index_keys.dtype.element_ty).to(tl.float32)
    mean_mixed = (tl.sum(raw_mixed, 0, keep_dims=True) / BLOCK).to(index_keys.dtype.element_ty).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(mean * mean, 1) / D + eps)
    w = tl.load(weight + d, mask=d < D, other=0)
    w_mixed = tl.load(weight + mixed, mask=d < D, other=0)
    normed, other = mean * scale[:, None] * w[None, :], mean_mixed * scale[:, None] * w_mixed[None, :]
    key = turn(normed, other, d, last - (BLOCK - 1), cos, sin, DIM)
    tl.store(block_keys + at // BLOCK * D + d[None, :], key.to(block_keys.dtype.element_ty), mask=(d < D)[None, :])


def _launch(
    index_keys: Tensor,
    block_keys: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    cache_index: Tensor,
    cu_tokens: Tensor,
    block_size: int,
    eps: float,
) -> None:
    assert index_keys.is_contiguous() and block_keys.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    _kernel[(len(position),)](
        index_keys, block_keys, weight, cos, sin, position, cache_index, cu_tokens, len(cu_tokens) - 1, eps,
        **_sizes(block_size, index_keys.shape[2], cos.shape[1]), num_warps=4,
    )  # fmt: skip


def _sizes(block_size: int, size: int, dim: int) -> dict[str, int]:
    return {"BLOCK": block_size, "D": size, "DIM": dim, "BM": power_of_two(block_size), "BD": power_of_two(size)}


def ahead_of_time() -> list[Build]:
    builds = []
    for dtype, block_size, size, dim in (("*bf16", 64, 128, 64), ("*fp32", 12, 80, 20)):
        types = dict.fromkeys(("index_keys", "block_keys"), dtype) | dict.fromkeys(("weight", "cos", "sin"), "*fp32")
        types |= {"position": "*i32", "cu_tokens": "*i32", "cache_index": "*i64", "num_sequences": "i32", "eps": "fp32"}
        builds.append(Build(_kernel, types, _sizes(block_size, size, dim)))
    return builds
