"""A product with a weight, y = x W^T: torch's, or for a packed weight one whose bits do not depend on the number of
rows.

The compiled body sums over the inputs in order, whatever rows are beside a row, and reads bf16 weights as they are: a
model trained in bf16 that computes in fp32 moves half the bytes a product in fp32 would.

Shapes: x [T, inputs] (rows may be strided), weight [outputs, inputs], a Packed (see _packed.py) or a tensor of x's
dtype. Returns [T, outputs] in x's dtype, whose rows may be strided.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from deltagram.kernels._packed import Matrix, Packed, dense
from deltagram.kernels._triton import Impl, choose, on_cpu


def linear(x: Tensor, weight: Matrix, impl: Impl = None) -> Tensor:
    """See the file's docstring."""
    return choose(impl, x, _reference, _reference, _compiled if isinstance(weight, Packed) else None)(x, weight)


def _reference(x: Tensor, weight: Matrix) -> Tensor:
    return F.linear(x, dense(weight, x))


_compiled = on_cpu("linear")
