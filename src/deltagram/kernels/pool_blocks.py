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

from deltagram.kernels._triton import Impl, choose, on_cpu


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
    body = choose(impl, index_keys, _reference, _reference, _compiled)
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
