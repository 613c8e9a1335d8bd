"""A product with a weight; and one that adds to a residual, with the norm that follows.

    linear         y = x W^T
    linear_onto    y = residual + x W^T,  norm(y) = scale * y / sqrt(mean(y^2) + eps),  of y as it was rounded

On a CPU, a packed weight's product has bits that do not depend on the number of rows: the compiled body sums over the
inputs in order, whatever rows are beside a row, and reads bf16 weights as they are: a model trained in bf16 that
computes in fp32 moves half the bytes a product in fp32 would.

On a GPU, up to FEW_ROWS rows are a launch of the kernel in _few_rows.py, and more, up to SOME_ROWS, of that in
_some_rows.py if it has compute capability 9.0. Their bits do not depend on the other rows. Still more, fp32, and inputs
that are no multiple of 16, are the library's product, which _parts.py asks for. Sums in parts take the norm where they
are added up; else it is a launch of its own.

Shapes: x [T, inputs] (rows may be strided), weight [outputs, inputs], a Packed (see _packed.py) or a tensor of x's
dtype, norm (scale fp32 [outputs], eps), residual [T, outputs] (rows may be strided), which is used up: y may take its
memory. Returns [T, outputs] in x's dtype, one or two; rows of one may be strided.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from deltagram.kernels import _few_rows, _some_rows
from deltagram.kernels._gpu_products import product, product_onto
from deltagram.kernels._norm import Norm, compiled_norm, plain_norm
from deltagram.kernels._packed import Matrix, Packed, dense
from deltagram.kernels._parts import parts_builds
from deltagram.kernels._triton import Build, Impl, choose, on_cpu


def linear(x: Tensor, weight: Matrix, impl: Impl = None) -> Tensor:
    """See the file's docstring."""
    return choose(impl, x, _reference, _launch, _compiled if isinstance(weight, Packed) else None)(x, weight)


def linear_onto(residual: Tensor, x: Tensor, weight: Matrix, norm: Norm, impl: Impl = None) -> tuple[Tensor, Tensor]:
    """See the file's docstring."""
    compiled = _compiled_onto if isinstance(weight, Packed) else None
    return choose(impl, x, _reference_onto, _launch_onto, compiled)(residual, x, weight, norm)


def _reference(x: Tensor, weight: Matrix) -> Tensor:
    return F.linear(x, dense(weight, x))


def _reference_onto(residual: Tensor, x: Tensor, weight: Matrix, norm: Norm) -> tuple[Tensor, Tensor]:
    y = residual + _reference(x, weight)
    return y, plain_norm(y, *norm)


_compiled = on_cpu("linear")


def _compiled_onto(residual: Tensor, x: Tensor, weight: Matrix, norm: Norm) -> tuple[Tensor, Tensor]:
    y = residual + _compiled(x, weight)
    return y, compiled_norm(y, *norm)


def _launch(x: Tensor, weight: Matrix) -> Tensor:
    return product(x, dense(weight, x))


def _launch_onto(residual: Tensor, x: Tensor, weight: Matrix, norm: Norm) -> tuple[Tensor, Tensor]:
    return product_onto(residual, x, dense(weight, x), norm)


def ahead_of_time() -> list[Build]:
    return _few_rows.product_builds(gated=False) + _some_rows.product_builds(gated=False) + parts_builds()
