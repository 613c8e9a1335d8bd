"""RMS norm over the last dimension, in groups with a weight of their own.

    y = weight * x / sqrt(mean(x^2) + eps)

Shapes: x [T, ..., size]; weight fp32, [size] or [groups, size] for x [T, groups, size]. Returns x's shape and dtype;
arithmetic in fp32 (float64 for float64 inputs). These models' checkpoints hold weight - 1.
"""

from __future__ import annotations

from torch import Tensor

from deltagram.kernels._norm import compiled_norm, fused_norm, norm_builds, plain_norm
from deltagram.kernels._triton import Build, Impl, choose


def rms_norm(x: Tensor, weight: Tensor, eps: float, impl: Impl = None) -> Tensor:
    """See the file's docstring."""
    return choose(impl, x, _reference, fused_norm, compiled_norm)(x, weight, eps)


def _reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return plain_norm(x, weight, eps)


def ahead_of_time() -> list[Build]:
    return norm_builds()
