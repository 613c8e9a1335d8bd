"""A product with a weight, and what rides along: a norm of its input, a residual that it adds to.

    y = residual + norm(x) W^T        norm(x) = scale * x / sqrt(mean(x^2) + eps), or x; without a residual, 0

On a CPU, a packed weight's product has bits that do not depend on the number of rows: the compiled body sums over the
inputs in order, whatever rows are beside a row, and reads bf16 weights as they are: a model trained in bf16 that
computes in fp32 moves half the bytes a product in fp32 would.

On a GPU, up to FEW_ROWS rows are a launch of the kernel in _few_rows.py, and more, up to SOME_ROWS, of that in
_some_rows.py if it has compute capability 9.0. Their bits do not depend on the other rows. Still more, fp32, and inputs
that are no multiple of 16, are the library's product, which _parts.py asks for. A norm is a launch before any.

Shapes: x [T, inputs] (rows may be strided), weight [outputs, inputs], a Packed (see _packed.py) or a tensor of x's
dtype, norm (scale fp32 [inputs], eps), residual [T, outputs]. Returns [T, outputs] in x's dtype, whose rows may be
strided.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from deltagram.kernels import _few_rows, _some_rows
from deltagram.kernels._few_rows import few_rows
from deltagram.kernels._norm import Norm, compiled_norm, fused_norm, plain_norm
from deltagram.kernels._packed import Matrix, Packed, dense
from deltagram.kernels._parts import library_product, parts_builds
from deltagram.kernels._some_rows import some_rows
from deltagram.kernels._triton import Build, Impl, choose, on_cpu


def linear(
    x: Tensor, weight: Matrix, norm: Norm | None = None, residual: Tensor | None = None, impl: Impl = None
) -> Tensor:
    """See the file's docstring."""
    body = choose(impl, x, _reference, _launch, _compiled if isinstance(weight, Packed) else None)
    return body(x, weight, norm, residual)


def _reference(x: Tensor, weight: Matrix, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
    y = F.linear(x if norm is None else plain_norm(x, *norm), dense(weight, x))
    return y if residual is None else residual + y


def _compiled(x: Tensor, weight: Matrix, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
    y: Tensor = _compiled_product(x if norm is None else compiled_norm(x, *norm), weight)
    return y if residual is None else residual + y


_compiled_product = on_cpu("linear")


def _launch(x: Tensor, weight: Matrix, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
    matrix = dense(weight, x)
    if few_rows(x):
        return _few_rows.product(x, matrix, norm, residual)
    x = x if norm is None else fused_norm(x, *norm)
    if some_rows(x):
        return _some_rows.product(x, matrix, residual)
    return library_product(x, matrix, residual)


def ahead_of_time() -> list[Build]:
    return _few_rows.product_builds(gated=False) + _some_rows.product_builds(gated=False) + parts_builds()
