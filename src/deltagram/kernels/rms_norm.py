"""RMS norm over the last dimension, in groups with a weight of their own.

    y = weight * x / sqrt(mean(x^2) + eps)

Shapes: x [T, ..., size]; weight fp32, [size] or [groups, size] for x [T, groups, size]. Returns x's shape and dtype;
arithmetic in fp32 (float64 for float64 inputs). These models' checkpoints hold weight - 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._triton import Impl, choose, on_cpu


def rms_norm(x: Tensor, weight: Tensor, eps: float, impl: Impl = None) -> Tensor:
    """See the file's docstring."""
    return choose(impl, x, _reference, _reference, _compiled)(x, weight, eps)


def _reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    # torch's rms_norm takes twice as long for the few rows of a decode step
    norm = torch.linalg.vector_norm(wide, 2, -1, True)
    return (wide * norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()).mul_(weight.to(wide.dtype)).to(x.dtype)


_compiled = on_cpu("rms_norm")
