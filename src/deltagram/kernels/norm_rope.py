"""RMS norm of each head, then rotary position embedding: what queries and keys go through.

    n = weight * x / sqrt(mean(x^2) + eps)
    y[i] = n[i] cos[i] - n[i + dim / 2] sin[i];  y[i + dim / 2] = n[i + dim / 2] cos[i] + n[i] sin[i]     for i < dim
    / 2

with cos and sin of the token's position; dimensions from `dim` on pass through.

Shapes: x [T, heads, D] (strided, dimensions side by side), weight fp32 [D], cos and sin fp32 [positions, dim] (their
halves are equal), position [T] int32. Returns [T, heads, D] in x's dtype. Source: RoFormer,
https://arxiv.org/abs/2104.09864.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._triton import Impl, choose, on_cpu


def norm_rope(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, position: Tensor, eps: float, impl: Impl = None
) -> Tensor:
    """See the file's docstring."""
    return choose(impl, x, _reference, _reference, _compiled)(x, weight, cos, sin, position, eps)


def _reference(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, position: Tensor, eps: float) -> Tensor:
    wide, dim = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32), cos.shape[-1]
    normed = (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(wide)).to(x.dtype)
    turned = normed[..., :dim]
    halves = torch.cat((-turned[..., dim // 2 :], turned[..., : dim // 2]), -1)
    at = position.long()
    turned = turned * cos[at][:, None].to(x.dtype) + halves * sin[at][:, None].to(x.dtype)
    return turned if dim == x.shape[-1] else torch.cat((turned, normed[..., dim:]), -1)


_compiled = on_cpu("norm_rope")
