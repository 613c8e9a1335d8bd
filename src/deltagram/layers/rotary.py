"""Rotary position embedding: half rotation of a head's first dimensions, the rest passed through."""

import math
from typing import Protocol

import torch
from torch import Tensor

from deltagram.kernels.norm_rope import norm_rope
from deltagram.layers.basic import RMSNorm


class RopeFields(Protocol):
    """What a config says of its rotary embedding: see models/config.py."""

    @property
    def theta(self) -> float: ...
    @property
    def type(self) -> str: ...
    @property
    def factor(self) -> float: ...
    @property
    def attention_factor(self) -> float: ...
    @property
    def original_max_position_embeddings(self) -> int: ...
    @property
    def beta_fast(self) -> float: ...
    @property
    def beta_slow(self) -> float: ...
    @property
    def truncate(self) -> bool: ...


class Rotary:
    """cos and sin of every position below `max_context`, for `dim` rotated dimensions. fp32 [max_context, dim]."""

    def __init__(self, rope: RopeFields, dim: int, max_context: int, device: torch.device) -> None:
        self.dim = dim
        angles = torch.arange(max_context, dtype=torch.float32, device=device)[:, None] * frequencies(rope, dim).to(
            device
        )
        angles = torch.cat((angles, angles), -1)
        self.cos, self.sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor

    def normed(self, x: Tensor, norm: RMSNorm, position: Tensor) -> Tensor:
        """x [T, heads, D], normalised and turned to the tokens' positions [T]."""
        return norm_rope(x, norm.scale, self.cos, self.sin, position, norm.eps)


def frequencies(rope: RopeFields, dim: int) -> Tensor:
    """Inverse frequencies fp32 [dim / 2]. Linear scaling divides all of them by `factor`; YaRN, the slow ones alone.

    Source: RoFormer, https://arxiv.org/abs/2104.09864; YaRN, https://arxiv.org/abs/2309.00071, section 3.2.
    """
    plain = rope.theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.type == "default":
        return plain
    if rope.type == "linear":
        return plain / rope.factor
    assert rope.type == "yarn", rope.type

    def turns_at(rotations: float) -> float:  # the dimension that turns `rotations` times over the trained context
        context = rope.original_max_position_embeddings
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = turns_at(rope.beta_fast), turns_at(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    slow = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain * (1 - slow) + plain / rope.factor * slow
