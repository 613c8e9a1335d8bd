"""RMS norm as ops share it: alone (rms_norm.py), and of a sum that a product makes (linear.py, gated_mlp.py)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deltagram.kernels._triton import Build, dependent_launch, jit, on_cpu, power_of_two, tl


class Norm(NamedTuple):
    """What is applied to a product's sum with the residual: weight fp32 [size], and eps."""

    weight: Tensor
    eps: float


compiled_norm = on_cpu("rms_norm")


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In PyTorch: in fp32, or in float64 for float64 inputs."""
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    # torch's rms_norm takes twice as long for the few rows of a decode step
    norm = torch.linalg.vector_norm(wide, 2, -1, True)
    return (wide * norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()).mul_(weight.to(wide.dtype)).to(x.dtype)


@jit
def normed(value, factor, eps, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of rows [ROWS, BS] in fp32, zero past SIZE."""
    rate = 1 / tl.sqrt(tl.sum(value * value, 1) / SIZE + eps)
    return value * rate[:, None] * factor


@jit(do_not_specialize=["rows"])
def _kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    out,
    rows,  # of all groups
    eps,
    x_stride,
    group_stride,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BS)[None, :]
    group = row % GROUPS
    inside = (row < rows) & (column < SIZE)
    factor = tl.load(weight + group * SIZE + column, mask=column < SIZE, other=0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + (row // GROUPS) * x_stride + group * group_stride + column, mask=inside, other=0).to(tl.float32)
    y = normed(value, factor, eps, SIZE)
    tl.store(out + row * SIZE + column, y.to(out.dtype.element_ty), mask=inside)


def tile_of(size: int) -> tuple[dict[str, int], int]:
    """A program's rows and columns, and its warps."""
    columns = power_of_two(size)
    return {"ROWS": max(1, 1024 // columns), "BS": columns}, min(16, max(1, columns // 512))


def fused_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `plain_norm`, in one launch; float64, which no kernel computes in, takes the formula. x: CUDA [T, size] or
    [T, groups, size] with weight [groups, size], or contiguous."""
    if x.dtype == torch.float64:
        return plain_norm(x, weight, eps)
    size = x.shape[-1]
    groups = weight.numel() // size
    if (groups == 1 and x.dim() != 2) or x.dim() > 3:
        x = x.contiguous()
    flat = x if x.dim() == 2 + (groups > 1) else x.view(-1, *weight.shape)
    assert x.stride(-1) == 1 and weight.is_contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.numel() // size
    if rows == 0:
        return out
    tile, warps = tile_of(size)
    pdl = dependent_launch(x)
    _kernel[(-(-rows // tile["ROWS"]),)](
        flat, weight, out, rows, eps, flat.stride(0), flat.stride(1) if groups > 1 else 0, GROUPS=groups, SIZE=size,
        **tile, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def norm_builds() -> list[Build]:
    builds = []
    for dtype, groups, size in (("*bf16", 1, 2560), ("*bf16", 4, 1024), ("*fp32", 1, 96)):
        types = {"x": dtype, "out": dtype, "weight": "*fp32", "rows": "i32", "eps": "fp32"}
        types |= {"x_stride": "i32", "group_stride": "i32"}
        tile, warps = tile_of(size)
        builds.append(Build(_kernel, types, {"GROUPS": groups, "SIZE": size, **tile}, {"num_warps": warps}))
    return builds
