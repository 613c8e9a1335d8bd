"""Products whose inputs are cut into parts: sums of each, in fp32, and one launch that adds them, in order, to a
residual, and takes the norm that follows.

The library's product of some rows with a weight of few outputs does this itself, but adds up in two launches more.

Shapes: partial fp32 [P, T, N] contiguous, residual [T, N] (rows may be strided), norm (fp32 [N], eps), x [T, K] (rows
may be strided), weight [N, K]. Returns y [T, N] in the residual's or x's dtype, rounded once; and norm(y) of what y was
rounded to, or None without a norm or where no parts are added. With N a multiple of 8 a row's squares are laid out, and
so added, as in fused_norm: the bits are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._few_rows import MULTIPROCESSORS
from deltagram.kernels._gates import FEW_ROWS, ROWS_IN_PARTS
from deltagram.kernels._norm import Norm, normed, tile_of
from deltagram.kernels._triton import Build, dependent_launch, jit, tl


@jit(do_not_specialize=["rows"])
def _kernel(  # type: ignore[no-untyped-def]
    partial,
    residual,
    scale,  # of the norm
    out,
    normed_out,
    rows,
    stride,
    eps,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BS)[None, :]
    inside = (row < rows) & (column < SIZE)
    if scale is not None:
        factor = tl.load(scale + column, mask=column < SIZE, other=0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    y = tl.zeros([ROWS, BS], tl.float32)
    if residual is not None:
        y = tl.load(residual + row * stride + column, mask=inside, other=0).to(tl.float32)
    for part in tl.static_range(PARTS):
        y += tl.load(partial + (part * rows + row) * SIZE + column, mask=inside, other=0)
    rounded = y.to(out.dtype.element_ty)
    tl.store(out + row * SIZE + column, rounded, mask=inside)
    if scale is not None:
        value = normed(rounded.to(tl.float32), factor, eps, SIZE)
        tl.store(normed_out + row * SIZE + column, value.to(normed_out.dtype.element_ty), mask=inside)


PARTS = 4


def few_outputs(outputs: int) -> bool:
    """Whether tiles of 64 outputs, each a program, would leave half of the multiprocessors idle."""
    return outputs <= 32 * MULTIPROCESSORS


def add_parts(
    partial: Tensor, residual: Tensor | None, dtype: torch.dtype, norm: Norm | None = None
) -> tuple[Tensor, Tensor | None]:
    """See the file's docstring."""
    parts, rows, outputs = partial.shape
    assert partial.is_contiguous() and (residual is None or residual.stride(1) == 1)
    out, pdl = partial.new_empty(rows, outputs, dtype=dtype), dependent_launch(partial)
    scale, eps = norm or (None, 0.0)
    after = None if norm is None else torch.empty_like(out)
    tile, warps = tile_of(outputs)
    _kernel[(-(-rows // tile["ROWS"]),)](
        partial, residual, scale, out, after, rows, 0 if residual is None else residual.stride(0), eps, PARTS=parts,
        SIZE=outputs, **tile, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out, after


def library_product(residual: Tensor, x: Tensor, weight: Tensor, norm: Norm) -> tuple[Tensor, Tensor | None]:
    """The library's, of some rows with few outputs in parts."""
    (rows, inputs), outputs = x.shape, len(weight)
    short = FEW_ROWS < rows <= ROWS_IN_PARTS and x.dtype in (torch.bfloat16, torch.float16)
    if not short or not few_outputs(outputs) or inputs % (16 * PARTS):
        return residual.addmm_(x, weight.t()), None  # in place: else the library copies the residual first
    ours = x.unflatten(1, (PARTS, inputs // PARTS)).transpose(0, 1)
    theirs = weight.view(outputs, PARTS, inputs // PARTS).permute(1, 2, 0)
    return add_parts(torch.bmm(ours, theirs, out_dtype=torch.float32), residual, x.dtype, norm)


def parts_builds() -> list[Build]:
    types = dict.fromkeys(("partial", "scale"), "*fp32") | dict.fromkeys(("residual", "out", "normed_out"), "*bf16")
    types |= {"rows": "i32", "stride": "i32", "eps": "fp32"}
    builds = []
    for outputs in (2560, 1024, 40):
        tile, warps = tile_of(outputs)
        constants: dict[str, object] = {"PARTS": PARTS, "SIZE": outputs, **tile}
        without: dict[str, object] = dict.fromkeys(("residual", "scale", "normed_out"))
        builds += [Build(_kernel, types, one, {"num_warps": warps}) for one in (constants, constants | without)]
    return builds
