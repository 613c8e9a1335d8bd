"""A gated MLP; and one that adds to a residual, with the norm that follows.

    gated_mlp         y = down(silu(gate(x)) * up(x))
    gated_mlp_onto    y = residual + the same, norm(y)        see linear.py, also for how a GPU runs it

Shapes: x [T, H] (rows may be strided), gate_up [2 I outputs, H] (gate's, then up's), down [H outputs, I], Packed or
tensors; norm (scale fp32 [H], eps), residual [T, H], which is used up. Returns [T, H] in x's dtype, one or two; rows of
one may be strided.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from deltagram.kernels import _few_rows, _some_rows
from deltagram.kernels._gpu_products import own_product, product, product_onto
from deltagram.kernels._norm import Norm, compiled_norm, plain_norm
from deltagram.kernels._packed import Matrix, Packed, dense
from deltagram.kernels._triton import Build, Impl, choose, dependent_launch, jit, on_cpu, tl


def gated_mlp(x: Tensor, gate_up: Matrix, down: Matrix, impl: Impl = None) -> Tensor:
    """See the file's docstring."""
    compiled = _compiled if isinstance(gate_up, Packed) and isinstance(down, Packed) else None
    return choose(impl, x, _reference, _launch, compiled)(x, gate_up, down)


def gated_mlp_onto(
    residual: Tensor, x: Tensor, gate_up: Matrix, down: Matrix, norm: Norm, impl: Impl = None
) -> tuple[Tensor, Tensor]:
    """See the file's docstring."""
    compiled = _compiled_onto if isinstance(gate_up, Packed) and isinstance(down, Packed) else None
    return choose(impl, x, _reference_onto, _launch_onto, compiled)(residual, x, gate_up, down, norm)


def _reference(x: Tensor, gate_up: Matrix, down: Matrix) -> Tensor:
    gate, up = F.linear(x, dense(gate_up, x)).chunk(2, -1)
    return F.linear(F.silu(gate).mul_(up), dense(down, x))


def _reference_onto(residual: Tensor, x: Tensor, gate_up: Matrix, down: Matrix, norm: Norm) -> tuple[Tensor, Tensor]:
    y = residual + _reference(x, gate_up, down)
    return y, plain_norm(y, *norm)


_compiled = on_cpu("gated_mlp")


def _compiled_onto(residual: Tensor, x: Tensor, gate_up: Matrix, down: Matrix, norm: Norm) -> tuple[Tensor, Tensor]:
    y = residual + _compiled(x, gate_up, down)
    return y, compiled_norm(y, *norm)


@jit(do_not_specialize=["rows"])
def _kernel(  # type: ignore[no-untyped-def]
    gate_up,
    out,
    rows,
    size,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)[:, None]
    column = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    inside = (row < rows) & (column < size)
    gate = tl.load(gate_up + row * (2 * size) + column, mask=inside, other=0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * size) + size + column, mask=inside, other=0).to(tl.float32)
    y = gate / (1 + tl.exp(-gate)) * up
    tl.store(out + row * size + column, y.to(out.dtype.element_ty), mask=inside)


_TILE = {"BM": 2, "BN": 512}


def _gate(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [T, gate | up], contiguous."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    pdl = dependent_launch(gate_up)
    if rows:
        grid = (-(-rows // _TILE["BM"]), -(-size // _TILE["BN"]))
        _kernel[grid](gate_up, out, rows, size, **_TILE, PDL=pdl, num_warps=4, launch_pdl=pdl)
    return out


def _inner(x: Tensor, gate_up: Matrix) -> Tensor:
    """silu(gate(x)) * up(x), [T, I]."""
    matrix = dense(gate_up, x)
    y = own_product(x, matrix, gated=True)
    return _gate(F.linear(x, matrix)) if y is None else y


def _launch(x: Tensor, gate_up: Matrix, down: Matrix) -> Tensor:
    return product(_inner(x, gate_up), dense(down, x))


def _launch_onto(residual: Tensor, x: Tensor, gate_up: Matrix, down: Matrix, norm: Norm) -> tuple[Tensor, Tensor]:
    return product_onto(residual, _inner(x, gate_up), dense(down, x), norm)


def ahead_of_time() -> list[Build]:
    plain = [
        Build(_kernel, {"gate_up": dtype, "out": dtype, "rows": "i32", "size": "i32"}, dict(_TILE))
        for dtype in ("*bf16", "*fp32")
    ]
    return plain + _few_rows.product_builds(gated=True) + _some_rows.product_builds(gated=True)
