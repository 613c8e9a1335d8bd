"""Products whose inputs are cut into parts: sums of each, in fp32, and one launch that adds them, in order, to a
residual.

The library's product of some rows with a weight of few outputs does this itself, but first copies the residual, and
adds up in two launches more.

Shapes: partial fp32 [P, T, N] contiguous, residual [T, N] (rows may be strided), x [T, K] (rows may be strided), weight
[N, K]. Returns [T, N] in the residual's or x's dtype, rounded once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deltagram.kernels._few_rows import MULTIPROCESSORS
from deltagram.kernels._gates import FEW_ROWS, ROWS_IN_PARTS
from deltagram.kernels._triton import Build, dependent_launch, jit, tl


@jit(do_not_specialize=["rows"])
def _kernel(  # type: ignore[no-untyped-def]
    partial,
    residual,
    out,
    rows,
    outputs,
    stride,
    PARTS: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    y = tl.zeros([BN], tl.float32)
    if residual is not None:
        y = tl.load(residual + row * stride + n, mask=n < outputs, other=0).to(tl.float32)
    for part in tl.static_range(PARTS):
        y += tl.load(partial + (part * rows + row) * outputs + n, mask=n < outputs, other=0)
    tl.store(out + row * outputs + n, y.to(out.dtype.element_ty), mask=n < outputs)


PARTS = 4  # of the library's products
_TILE = 512


def add_parts(partial: Tensor, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
    """See the file's docstring."""
    parts, rows, outputs = partial.shape
    assert partial.is_contiguous() and (residual is None or residual.stride(1) == 1)
    out, pdl = partial.new_empty(rows, outputs, dtype=dtype), dependent_launch(partial)
    stride = residual.stride(0) if residual is not None else 0
    _kernel[(rows, -(-outputs // _TILE))](
        partial, residual, out, rows, outputs, stride, PARTS=parts, BN=_TILE, PDL=pdl, num_warps=2, launch_pdl=pdl
    )
    return out


def library_product(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    """The library's, in parts where that is faster: if 64 outputs each leave half of the multiprocessors idle."""
    if residual is None:
        return F.linear(x, weight)
    (rows, inputs), outputs = x.shape, len(weight)
    short = FEW_ROWS < rows <= ROWS_IN_PARTS and x.dtype in (torch.bfloat16, torch.float16)
    if not short or outputs > 32 * MULTIPROCESSORS or inputs % (16 * PARTS):
        return torch.addmm(residual, x, weight.t())
    ours = x.unflatten(1, (PARTS, inputs // PARTS)).transpose(0, 1)
    theirs = weight.view(outputs, PARTS, inputs // PARTS).permute(1, 2, 0)
    return add_parts(torch.bmm(ours, theirs, out_dtype=torch.float32), residual, x.dtype)


def parts_builds() -> list[Build]:
    types = {"partial": "*fp32", "residual": "*bf16", "out": "*bf16", "rows": "i32", "outputs": "i32", "stride": "i32"}
    constants: dict[str, object] = {"PARTS": PARTS, "BN": _TILE}
    without: dict[str, object] = {"residual": None}
    return [Build(_kernel, types, one, {"num_warps": 2}) for one in (constants, constants | without)]
