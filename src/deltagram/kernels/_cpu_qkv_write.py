"""Compiled body of qkv_write.py: the two ops it stands for, one after the other."""

from __future__ import annotations

from torch import Tensor

from deltagram.kernels._cpu_cache_write import cache_write
from deltagram.kernels._cpu_norm_rope import norm_rope


def qkv_write(
    q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, position: Tensor,
    cache_index: Tensor, cu_tokens: Tensor, k_cache: Tensor, v_cache: Tensor, eps: float,
) -> Tensor:  # fmt: skip
    query = norm_rope(q, q_weight, cos, sin, position, eps)
    cache_write(k_cache, norm_rope(k, k_weight, cos, sin, position, eps), cache_index, cu_tokens)
    cache_write(v_cache, v, cache_index, cu_tokens)
    return query
