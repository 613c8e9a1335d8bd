"""RMS norm of heads and half rotation, which several ops do: in plain PyTorch, and for their Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._triton import jit, power_of_two, tl


def normed_and_turned(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, position: Tensor, eps: float) -> Tensor:
    """x [T, heads, D], normalised per head and turned to the tokens' positions: see norm_rope.py."""
    wide, dim = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32), cos.shape[-1]
    normed = (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(wide)).to(x.dtype)
    turned = normed[..., :dim]
    halves = torch.cat((-turned[..., dim // 2 :], turned[..., : dim // 2]), -1)
    at = position.long()
    turned = turned * cos[at][:, None].to(x.dtype) + halves * sin[at][:, None].to(x.dtype)
    return turned if dim == x.shape[-1] else torch.cat((turned, normed[..., dim:]), -1)


@jit
def partner(d, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The dimension that the rotation mixes into dimension `d`; itself where it passes through."""
    return tl.where(d < DIM // 2, d + DIM // 2, tl.where(d < DIM, d - DIM // 2, d))


@jit
def turn(normed, other, d, position, cos, sin, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """`normed` [..., BD] at dimensions `d` [BD], turned; `other` is the same at partner(d). Round once, afterwards."""
    c = tl.load(cos + position * DIM + d, mask=d < DIM, other=1)
    s = tl.load(sin + position * DIM + d, mask=d < DIM, other=0)
    return tl.fma(normed, c[None, :], other * tl.where(d < DIM // 2, -s, s)[None, :])


@jit
def load_and_turn(  # type: ignore[no-untyped-def]
    x, heads, weight, position, cos, sin, eps, D: tl.constexpr, DIM: tl.constexpr, BD: tl.constexpr
):
    """Heads [BH, BD] in fp32, normalised and turned. x: pointers [BH, 1] to their first dimension; heads: bool [BH, 1],
    which are there; position: int64."""
    d = tl.arange(0, BD)
    mixed = partner(d, DIM)
    inside = heads & (d < D)[None, :]
    value = tl.load(x + d[None, :], mask=inside, other=0).to(tl.float32)
    other = tl.load(x + mixed[None, :], mask=inside, other=0).to(tl.float32)
    w = tl.load(weight + d, mask=d < D, other=0)
    w_other = tl.load(weight + mixed, mask=d < D, other=0)
    scale = 1 / tl.sqrt(tl.sum(value * value, 1) / D + eps)
    normed, other = value * scale[:, None] * w[None, :], other * scale[:, None] * w_other[None, :]
    return turn(normed, other, d, position, cos, sin, DIM)


def head_tile(heads: int, size: int) -> dict[str, int]:
    """A program's heads of one token: about 1024 numbers."""
    columns = power_of_two(size)
    return {"BD": columns, "BH": max(1, min(power_of_two(heads), 1024 // columns))}
