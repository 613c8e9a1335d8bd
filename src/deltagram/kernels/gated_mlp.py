"""A gated MLP, with a norm of its input and a residual that it adds to.

    y = residual + down(silu(gate(n)) * up(n)),  n = norm(x)        see linear.py, also for how a GPU runs it

Shapes: x [T, H] (rows may be strided), gate_up [2 I outputs, H] (gate's, then up's), down [H outputs, I], Packed or
tensors; norm (scale fp32 [H], eps), residual [T, H]. Returns [T, H] in x's dtype, whose rows may be strided.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from deltagram.kernels import _few_rows, _some_rows
from deltagram.kernels._few_rows import few_rows
from deltagram.kernels._norm import Norm, compiled_norm, fused_norm, plain_norm
from deltagram.kernels._packed import Matrix, Packed, dense
from deltagram.kernels._parts import library_product
from deltagram.kernels._some_rows import some_rows
from deltagram.kernels._triton import Build, Impl, choose, dependent_launch, jit, on_cpu, tl


def gated_mlp(
    x: Tensor,
    gate_up: Matrix,
    down: Matrix,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    impl: Impl = None,
) -> Tensor:
    """See the file's docstring."""
    compiled = _compiled if isinstance(gate_up, Packed) and isinstance(down, Packed) else None
    return choose(impl, x, _reference, _launch, compiled)(x, gate_up, down, norm, residual)


def _reference(
    x: Tensor, gate_up: Matrix, down: Matrix, norm: Norm | None = None, residual: Tensor | None = None
) -> Tensor:
    gate, up = F.linear(x if norm is None else plain_norm(x, *norm), dense(gate_up, x)).chunk(2, -1)
    y = F.linear(F.silu(gate).mul_(up), dense(down, x))
    return y if residual is None else residual + y


def _compiled(
    x: Tensor, gate_up: Matrix, down: Matrix, norm: Norm | None = None, residual: Tensor | None = None
) -> Tensor:
    y: Tensor = _compiled_mlp(x if norm is None else compiled_norm(x, *norm), gate_up, down)
    return y if residual is None else residual + y


_compiled_mlp = on_cpu("gated_mlp")


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


def _launch(
    x: Tensor, gate_up: Matrix, down: Matrix, norm: Norm | None = None, residual: Tensor | None = None
) -> Tensor:
    first, second = dense(gate_up, x), dense(down, x)
    if few_rows(x):
        y = _few_rows.product(x, first, norm, gated=True)
    else:
        x = x if norm is None else fused_norm(x, *norm)
        y = _some_rows.product(x, first, gated=True) if some_rows(x) else _gate(F.linear(x, first))
    if few_rows(y):
        return _few_rows.product(y, second, residual=residual)
    return _some_rows.product(y, second, residual) if some_rows(y) else library_product(y, second, residual)


def ahead_of_time() -> list[Build]:
    plain = [
        Build(_kernel, {"gate_up": dtype, "out": dtype, "rows": "i32", "size": "i32"}, dict(_TILE))
        for dtype in ("*bf16", "*fp32")
    ]
    return plain + _few_rows.product_builds(gated=True) + _some_rows.product_builds(gated=True)
