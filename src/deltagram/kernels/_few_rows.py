"""Products of a few rows with a weight: the weight streams through the chip once, and everything around the product
rides along.

    y = residual + (scale * x / sqrt(mean(x^2) + eps)) W^T        scale and residual: where given
    y = silu(gate) * up,  gate | up = the same product            gated: W holds gate's outputs, then up's

Such a product is bound by the weight's bytes. What decides its time is how many bytes are on their way at any moment,
so: tiles of a few outputs and many inputs, several of them in flight; the norm's factor, one number a row, is applied
after the product, so that no pass over x precedes it; and with dependent launch programs are in place before the kernel
before them has ended, which needs room beside its own: shared memory for two.

A row's bits depend on the weight's shape alone: each output sums its inputs in order, in `split` parts that are added
in order, whoever the other rows are. A row of NaN stays alone.

Shapes: x [T, K] (rows may be strided), weight [N, K] contiguous, scale fp32 [K], residual [T, N] (rows may be strided).
Returns [T, N], or [T, N / 2] if gated, in x's dtype; sums in fp32, rounded once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deltagram.kernels._gates import FEW_ROWS
from deltagram.kernels._norm import Norm
from deltagram.kernels._triton import Build, dependent_launch, jit, power_of_two, tl


@jit(do_not_specialize=["rows"])
def _kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    scale,
    residual,
    out,
    partial,  # fp32 [SPLIT, tiles, BN, BM]
    arrived,  # [tiles], zero before and after
    rows,
    outputs,
    K,
    eps,
    x_stride,
    residual_stride,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,  # whether tiles of inputs fill a split
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0)
    n = tile * BN + tl.arange(0, BN)
    held = tl.minimum(n, outputs - 1)  # past the last output: read one that is there, and drop it
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    per = tl.cdiv(tl.cdiv(K, BK), SPLIT) * BK
    begin = tl.program_id(1) * per
    end = tl.minimum(begin + per, K)
    line = weight + held[:, None].to(tl.int64) * K
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # not before: who waits takes room, and has nothing to do yet
    x_at = x + m[None, :].to(tl.int64) * x_stride + k[:, None]
    acc = tl.zeros([BN, BM], tl.float32)
    acc_up = tl.zeros([BN, BM], tl.float32)
    squares = tl.zeros([BK, BM], tl.float32)
    for i in tl.range(begin, end, BK, num_stages=STAGES):
        known = (m < rows)[None, :]
        if EVEN:
            w = tl.load(line + (i + k)[None, :])
        else:
            known = known & (i + k < end)[:, None]
            w = tl.load(line + (i + k)[None, :], mask=(i + k < end)[None, :], other=0)
        value = tl.load(x_at + i, mask=known, other=0)
        if scale is not None:
            wide = value.to(tl.float32)
            squares += wide * wide
            factor = tl.load(scale + i + k, mask=i + k < end, other=0)
            value = (wide * factor[:, None]).to(x.dtype.element_ty)
        acc = tl.dot(w, value, acc)
        if GATED:
            above = line + outputs.to(tl.int64) * K + (i + k)[None, :]
            if EVEN:
                w_up = tl.load(above)
            else:
                w_up = tl.load(above, mask=(i + k < end)[None, :], other=0)
            acc_up = tl.dot(w_up, value, acc_up)
    last = True
    if SPLIT > 1:
        spot = tl.arange(0, BN)[:, None] * BM + m[None, :]
        mine = partial + tile * (BN * BM)
        step = tl.num_programs(0) * (BN * BM)
        tl.store(mine + tl.program_id(1) * step + spot, acc)
        tl.debug_barrier()  # the program's stores come before its arrival
        last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLIT - 1
        if last:
            tl.store(arrived + tile, 0)
            acc = tl.zeros([BN, BM], tl.float32)
            for part in tl.static_range(SPLIT):
                acc += tl.load(mine + part * step + spot, cache_modifier=".cg")
    if last:
        if scale is not None:
            rate = (1 / tl.sqrt(tl.sum(squares, 0) / K + eps))[None, :]
            acc *= rate
            acc_up *= rate
        if GATED:
            acc = acc / (1 + tl.exp(-acc)) * acc_up
        inside = (n < outputs)[:, None] & (m < rows)[None, :]
        if residual is not None:
            at = residual + m[None, :].to(tl.int64) * residual_stride + n[:, None]
            acc += tl.load(at, mask=inside, other=0).to(tl.float32)
        at = out + m[None, :].to(tl.int64) * outputs + n[:, None]
        tl.store(at, acc.to(out.dtype.element_ty), mask=inside)


class Tile(NamedTuple):
    """A program's part of a weight, and how it goes through it."""

    outputs: int
    inputs: int
    split: int
    stages: int
    warps: int


def tile_of(outputs: int, inputs: int, gated: bool) -> Tile:
    """By the weight's shape alone, since it decides the order of sums."""
    if gated:
        return Tile(64, 128, 1, 3, 4)
    if outputs >= 100_000:
        return Tile(64, 128, 1, 4, 4)
    if outputs < 4096 and inputs >= 2048:  # few tiles: each is shared by several programs
        return Tile(64, 128, 2, 5, 4) if outputs > 2048 else Tile(64, 128, 4, 3, 4)
    return Tile(64, 128, 1, 5, 4) if inputs <= 1024 else Tile(128, 128, 1, 3, 4)


def few_rows(x: Tensor) -> bool:
    """Whether a product with x's rows [T, K] is one for this file."""
    return 0 < len(x) <= FEW_ROWS and x.dtype in (torch.bfloat16, torch.float16)


_ARRIVED: dict[tuple[int, int], Tensor] = {}


def _counters(weight: Tensor, tiles: int) -> Tensor:
    """The arrival counters of a weight's tiles, which every launch leaves at zero: one set a weight, so that products
    of different weights may run side by side."""
    key = weight.data_ptr(), tiles
    if key not in _ARRIVED:
        assert not torch.cuda.is_current_stream_capturing(), "a product runs once before it is captured"
        _ARRIVED[key] = torch.zeros(tiles, dtype=torch.int32, device=weight.device)
    return _ARRIVED[key]


def product(
    x: Tensor, weight: Tensor, norm: Norm | None = None, residual: Tensor | None = None, gated: bool = False
) -> Tensor:
    """See the file's docstring."""
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    tile = tile_of(outputs, inputs, gated)
    assert x.stride(1) == 1 and weight.is_contiguous() and (residual is None or residual.stride(1) == 1)
    assert tile.split == 1 or (norm is None and not gated)
    out = x.new_empty(rows, outputs)
    tiles, padded = -(-outputs // tile.outputs), power_of_two(rows, 16)
    partial = arrived = None
    if tile.split > 1:
        partial = x.new_empty(tile.split * tiles * tile.outputs * padded, dtype=torch.float32)
        arrived = _counters(weight, tiles)
    scale, eps = norm if norm is not None else (None, 0.0)
    pdl = dependent_launch(x)
    _kernel[(tiles, tile.split)](
        x, weight, scale, residual, out, partial, arrived, rows, outputs, inputs, eps, x.stride(0),
        residual.stride(0) if residual is not None else 0, **_constants(tile, inputs, padded, gated), PDL=pdl,
        num_warps=tile.warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def _constants(tile: Tile, inputs: int, padded: int, gated: bool) -> dict[str, object]:
    sizes = {"BM": padded, "BN": tile.outputs, "BK": tile.inputs}
    how = {"SPLIT": tile.split, "STAGES": tile.stages}
    return {"GATED": gated, "EVEN": inputs % tile.inputs == 0, **sizes, **how}


def product_builds(gated: bool) -> list[Build]:
    builds = []
    for outputs, inputs, rows, norm, residual in ((12352, 2560, 16, True, False), (2560, 4096, 64, False, True)):
        tile = tile_of(outputs, inputs, gated)
        types = dict.fromkeys(("x", "weight", "residual", "out"), "*bf16")
        types |= {"scale": "*fp32", "partial": "*fp32", "arrived": "*i32", "eps": "fp32"}
        types |= dict.fromkeys(("rows", "outputs", "K", "x_stride", "residual_stride"), "i32")
        absent = {"scale": None} if not norm else {}
        absent |= {"residual": None} if not residual else {}
        absent |= {"partial": None, "arrived": None} if tile.split == 1 else {}
        builds.append(Build(_kernel, types, _constants(tile, inputs, rows, gated) | absent, {"num_warps": tile.warps}))
    return builds
