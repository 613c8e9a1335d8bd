"""Products on a GPU, each by the kernel that linear.py says. x [T, K] (rows may be strided), weight [N, K]."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from deltagram.kernels import _few_rows, _some_rows
from deltagram.kernels._few_rows import few_rows
from deltagram.kernels._norm import Norm, fused_norm
from deltagram.kernels._parts import library_product
from deltagram.kernels._some_rows import some_rows


def own_product(x: Tensor, weight: Tensor, gated: bool = False) -> Tensor | None:
    """By a kernel of ours, or None: for the library. `gated`: of a weight of gate and up."""
    if few_rows(x):
        return _few_rows.product(x, weight, gated=gated)
    return _some_rows.product(x, weight, gated=gated)[0] if some_rows(x) else None


def product(x: Tensor, weight: Tensor) -> Tensor:
    y = own_product(x, weight)
    return F.linear(x, weight) if y is None else y


def product_onto(residual: Tensor, x: Tensor, weight: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """y = residual + x W^T, and norm(y)."""
    normed = None
    if few_rows(x):
        y = _few_rows.product(x, weight, residual)
    elif some_rows(x):
        y, normed = _some_rows.product(x, weight, residual, norm=norm)
    else:
        y, normed = library_product(residual, x, weight, norm)
    return y, fused_norm(y, *norm) if normed is None else normed
