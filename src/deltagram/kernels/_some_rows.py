"""Products of more rows than _few_rows.py takes: up to ROWS_IN_PARTS the library's product of a weight with few outputs
in parts, and up to SOME_ROWS a gated product of our own.

    y = residual + x W^T
    y = silu(gate) * up,  gate | up = x W^T        W holds gate's outputs, then up's

With few outputs the library sums parts of the inputs too, but first copies the residual, and adds up in two launches
more; here one launch adds fp32 parts, in order, to the residual. The gated product has the weight's rows as the tensor
cores' first operand, so that 64 rows of x are enough for a second, and what is said in _few_rows.py of rings and of
tiles holds here too; the extra outputs go through the tensor cores' older instructions, which take 8 at a time. It is
for compute capability 9.0.

Shapes: x [T, K] (rows may be strided), weight [N, K] contiguous, residual [T, N] (rows may be strided). Returns [T, N],
or [T, N / 2] if gated, in x's dtype; sums in fp32, rounded once. K is a multiple of 16;
for parts, of 64.
"""

# mypy: disable-error-code="assignment,misc"
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deltagram.kernels._few_rows import MULTIPROCESSORS, aligned, busiest
from deltagram.kernels._gates import FEW_ROWS, ROWS_IN_PARTS, SOME_ROWS
from deltagram.kernels._gluon import async_copy, check, gl, gluon_jit, mma_v2, wait_then_launch, warpgroups
from deltagram.kernels._triton import Build, dependent_launch, jit, tl


def _between(x: Tensor, most: int) -> bool:
    """Whether a product with x's rows [T, K], up to `most`, may be one for this file."""
    return FEW_ROWS < len(x) <= most and x.dtype in (torch.bfloat16, torch.float16) and x.shape[1] % 16 == 0


@jit(do_not_specialize=["rows"])
def _add_kernel(  # type: ignore[no-untyped-def]
    partial,  # fp32 [PARTS, rows, outputs]
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
    y = tl.load(residual + row * stride + n, mask=n < outputs, other=0).to(tl.float32)
    for part in tl.static_range(PARTS):
        y += tl.load(partial + (part * rows + row) * outputs + n, mask=n < outputs, other=0)
    tl.store(out + row * outputs + n, y.to(out.dtype.element_ty), mask=n < outputs)


PARTS = 4
_ADD = {"PARTS": PARTS, "BN": 512}


def library_product(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    """The library's, in parts where that is faster: if 64 outputs each leave half of the multiprocessors idle."""
    if residual is None:
        return F.linear(x, weight)
    few = weight.shape[0] <= 64 * MULTIPROCESSORS // 2 and weight.shape[1] % (16 * PARTS) == 0
    if few and _between(x, ROWS_IN_PARTS):
        return _in_parts(x, weight, residual)
    return torch.addmm(residual, x, weight.t())


def _in_parts(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    (rows, inputs), outputs = x.shape, len(weight)
    ours = x.unflatten(1, (PARTS, inputs // PARTS)).transpose(0, 1)
    theirs = weight.view(outputs, PARTS, inputs // PARTS).permute(1, 2, 0)
    partial = torch.bmm(ours, theirs, out_dtype=torch.float32)  # [PARTS, T, N]
    assert partial.is_contiguous() and residual.stride(1) == 1
    out, pdl = x.new_empty(rows, outputs), dependent_launch(x)
    _add_kernel[(rows, -(-outputs // _ADD["BN"]))](
        partial, residual, out, rows, outputs, residual.stride(0), **_ADD, PDL=pdl, num_warps=2, launch_pdl=pdl
    )
    return out


@gluon_jit
def _fetch(rings, slot, lines, at, known):  # type: ignore[no-untyped-def]
    """Start copying tiles [lines, inputs] of the inputs `at`."""
    for i in gl.static_range(len(rings)):
        async_copy.async_copy_global_to_shared(rings[i].index(slot), lines[i][:, None] + at[None, :], mask=known)


@gluon_jit
def _store(gate, up, first, out, outputs, rows, layout):  # type: ignore[no-untyped-def]
    y = gl.convert_layout(gate / (1 + gl.exp(-gate)) * up, layout)
    n = first + gl.arange(0, y.shape[0], gl.SliceLayout(1, layout))[:, None]
    m = gl.arange(0, y.shape[1], gl.SliceLayout(0, layout))[None, :]
    gl.store(out + m.to(gl.int64) * outputs + n, y.to(out.dtype.element_ty), mask=(n < outputs) & (m < rows))


@gluon_jit(do_not_specialize=["rows"])
def _gated_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    out,
    rows,
    outputs,
    K,
    x_stride,
    BM: gl.constexpr,
    BN: gl.constexpr,
    EX: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BK, BK // 8], [WARPS, 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    wide: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BM, 16])
    slim: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, WARPS], instr_shape=[16, 8])
    write: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, WARPS], [0, 1])
    row: gl.constexpr = gl.SliceLayout(1, copy)
    kind: gl.constexpr = weight.dtype.element_ty
    first = gl.program_id(0) * (BN + EX)
    k = gl.arange(0, BK, gl.SliceLayout(0, copy))

    lines = ()  # gate's, up's, and those of the extra outputs
    rings = ()
    for j in gl.static_range(4 if EX > 0 else 2):
        n = first + j // 2 * BN + gl.arange(0, EX if j >= 2 else BN, row)
        # Past the last output: read one that is there, and drop it.
        lines = lines + (weight + (gl.minimum(n, outputs - 1).to(gl.int64) + j % 2 * outputs) * K,)
        rings = rings + (gl.allocate_shared_memory(kind, [STAGES, n.shape[0], BK], shared),)
    for s in gl.static_range(STAGES - 1):
        _fetch(rings, s, lines, k + s * BK, (k + s * BK < K)[None, :])
    async_copy.commit_group()

    if PDL:
        wait_then_launch()
    m = gl.arange(0, BM, row)
    real = (m < rows)[:, None]
    x_lines = (x + m.to(gl.int64) * x_stride,)
    x_rings = (gl.allocate_shared_memory(kind, [STAGES, BM, BK], shared),)
    for s in gl.static_range(STAGES - 1):
        _fetch(x_rings, s, x_lines, k + s * BK, real & (k + s * BK < K)[None, :])
        async_copy.commit_group()

    gate = gl.zeros([BN, BM], gl.float32, wide)
    up = gate
    if EX > 0:
        gate_ex = gl.zeros([EX, BM], gl.float32, slim)
        up_ex = gate_ex
    for i in range(gl.cdiv(K, BK)):
        slot = i % STAGES
        async_copy.wait_group(STAGES - 2)
        warpgroups.fence_async_shared()
        value = x_rings[0].index(slot).permute((1, 0))
        gate_sum = warpgroups.warpgroup_mma(rings[0].index(slot), value, gate, is_async=True)
        up_sum = warpgroups.warpgroup_mma(rings[1].index(slot), value, up, is_async=True)
        if EX > 0:
            right = value.load(gl.DotOperandLayout(1, slim, 2))
            gate_ex = mma_v2(rings[2].index(slot).load(gl.DotOperandLayout(0, slim, 2)), right, gate_ex)
            up_ex = mma_v2(rings[3].index(slot).load(gl.DotOperandLayout(0, slim, 2)), right, up_ex)
        gate, up = warpgroups.warpgroup_mma_wait(0, deps=(gate_sum, up_sum))
        ahead = i + STAGES - 1
        known = (k + ahead * BK < K)[None, :]
        _fetch(rings, ahead % STAGES, lines, k + ahead * BK, known)
        _fetch(x_rings, ahead % STAGES, x_lines, k + ahead * BK, real & known)
        async_copy.commit_group()
    async_copy.wait_group(0)  # copies past the end write zeros, where the store's layouts are about to change
    _store(gate, up, first, out, outputs, rows, write)
    if EX > 0:
        _store(gate_ex, up_ex, first + BN, out, outputs, rows, slim)


_TILE = {"BM": SOME_ROWS, "BN": 64, "BK": 128, "STAGES": 3, "WARPS": 4}


def _extra(outputs: int) -> int:
    return min((0, 8, 16, 32), key=lambda extra: busiest(outputs, _TILE["BN"] + extra))


def wide_gate(x: Tensor) -> bool:
    """Whether a gated product with x's rows [T, K] is `gated_product`."""
    return _between(x, SOME_ROWS) and torch.cuda.get_device_capability(x.device)[0] == 9


def gated_product(x: Tensor, weight: Tensor) -> Tensor:
    """See the file's docstring."""
    check()
    x, x_stride = aligned(x)
    (rows, inputs), outputs = x.shape, len(weight) // 2
    assert weight.is_contiguous()
    extra, out = _extra(outputs), x.new_empty(rows, outputs)
    _gated_kernel[(-(-outputs // (_TILE["BN"] + extra)),)](
        x, weight, out, rows, outputs, inputs, x_stride, **_TILE, EX=extra, PDL=True, num_warps=4, launch_pdl=True
    )
    return out


def gated_builds() -> list[Build]:
    types = dict.fromkeys(("x", "weight", "out"), "*bf16")
    types |= dict.fromkeys(("rows", "outputs", "K", "x_stride"), "i32")
    return [Build(_gated_kernel, types, _TILE | {"EX": _extra(outputs)}, only=90) for outputs in (9216, 3584)]


def builds_in_parts() -> list[Build]:
    types = {"partial": "*fp32", "residual": "*bf16", "out": "*bf16", "rows": "i32", "outputs": "i32", "stride": "i32"}
    return [Build(_add_kernel, types, _ADD, {"num_warps": 2})]
