"""Products of some tens of rows with a weight, on compute capability 9.0.

    y = residual + x W^T                           residual: where given
    y = silu(gate) * up,  gate | up = x W^T        gated: W holds gate's outputs, then up's

As in _few_rows.py the weight's bytes decide the time, and programs read about as much of it each. Here the copies are
the memory accelerator's, which one warp asks for, and the tensor cores read both operands where these have landed: 64
rows of x, padding included, by a tile of outputs. A step's x comes behind its part of the weight and from as far ahead:
the accelerator answers in order, so that x asked for late would wait for weights asked for early.

With few outputs a program's x would be more than its weight. There the inputs are cut into PARTS, each a program, and
one launch more adds them, in order, to the residual, and takes the norm that follows.

A row's bits depend on the weight's shape alone.

Shapes: x [T, K] (rows may be strided), weight [N, K] contiguous, residual [T, N] (rows may be strided), K a multiple of
16. Returns [T, N], or [T, N / 2] if gated, in x's dtype; sums in fp32, rounded once.
"""

# mypy: disable-error-code="assignment,misc"
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deltagram.kernels._few_rows import MULTIPROCESSORS, TILES, aligned
from deltagram.kernels._gates import FEW_ROWS, SOME_ROWS
from deltagram.kernels._gluon import (
    TensorDescriptor,
    check,
    gl,
    gluon_jit,
    mbarrier,
    tma,
    wait,
    wait_then_launch,
    warpgroups,
)
from deltagram.kernels._norm import Norm
from deltagram.kernels._parts import PARTS, add_parts, few_outputs
from deltagram.kernels._triton import Build


@gluon_jit
def _place(step, steps, PARTS):  # type: ignore[no-untyped-def]
    """The tile of a program's step, its part, and its place along the inputs."""
    job = gl.program_id(0) + step // steps * gl.num_programs(0)
    return job // PARTS, job % PARTS, job % PARTS * steps + step % steps


@gluon_jit
def _ask(weight, more, rings, ready, step, steps, outputs, PIECES, BM, BN, EX, BK, BLOCKS, PARTS, STAGES):  # type: ignore[no-untyped-def]
    """Ask for a step's part of the weight, in one piece or in gate's and up's; x is expected with it."""
    tile, _, at = _place(step, steps, PARTS)
    slot, n = step % STAGES, tile * (BN + EX)
    bar = ready.index(slot)
    mbarrier.expect(bar, ((BN + EX) * PIECES + BM) * BK * BLOCKS * 2)
    for block in gl.static_range(BLOCKS):
        k, to = (at * BLOCKS + block) * BK, slot * BLOCKS + block
        for j in gl.static_range(PIECES):
            of_tile = rings[0].index(to).slice(j * BN, BN)
            tma.async_copy_global_to_shared(weight, [n + j * outputs, k], bar, of_tile)
            if EX > 0:
                of_extra = rings[1].index(to).slice(j * EX, EX)
                tma.async_copy_global_to_shared(more, [n + BN + j * outputs, k], bar, of_extra)


@gluon_jit
def _ask_x(x, x_ring, ready, step, steps, BK, BLOCKS, PARTS, STAGES):  # type: ignore[no-untyped-def]
    _, _, at = _place(step, steps, PARTS)
    slot = step % STAGES
    for block in gl.static_range(BLOCKS):
        to = x_ring.index(slot * BLOCKS + block)
        tma.async_copy_global_to_shared(x, [0, (at * BLOCKS + block) * BK], ready.index(slot), to)


@gluon_jit
def _load(  # type: ignore[no-untyped-def]
    x,
    weight,
    more,
    rings,
    x_ring,
    ready,
    free,
    outputs,
    steps,
    mine,
    PIECES: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    EX: gl.constexpr,
    BK: gl.constexpr,
    BLOCKS: gl.constexpr,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
):
    for step in range(gl.minimum(mine, STAGES)):
        _ask(weight, more, rings, ready, step, steps, outputs, PIECES, BM, BN, EX, BK, BLOCKS, PARTS, STAGES)
    wait_then_launch()
    for step in range(gl.minimum(mine, STAGES)):
        _ask_x(x, x_ring, ready, step, steps, BK, BLOCKS, PARTS, STAGES)
    for step in range(STAGES, mine):
        mbarrier.wait(free.index(step % STAGES), (step // STAGES - 1) & 1)
        _ask(weight, more, rings, ready, step, steps, outputs, PIECES, BM, BN, EX, BK, BLOCKS, PARTS, STAGES)
        _ask_x(x, x_ring, ready, step, steps, BK, BLOCKS, PARTS, STAGES)


@gluon_jit
def _store(sums, residual, out, first, part, rows, outputs, stride, PIECES, ADDS, BM, BN):  # type: ignore[no-untyped-def]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    n = first + gl.arange(0, BN, gl.SliceLayout(0, layout))[None, :]
    m = gl.arange(0, BM, gl.SliceLayout(1, layout))[:, None]
    known = (n < outputs) & (m < rows)
    if PIECES == 2:
        gate, up = sums.reshape([BM, 2, BN]).permute((0, 2, 1)).split()
        y = gl.convert_layout(gate / (1 + gl.exp(-gate)) * up, layout)
    else:
        y = sums
    if ADDS:
        y += gl.load(residual + m.to(gl.int64) * stride + n, mask=known, other=0).to(gl.float32)
    gl.store(out + (part * rows + m).to(gl.int64) * outputs + n, y.to(out.dtype.element_ty), mask=known)


@gluon_jit
def _multiply(  # type: ignore[no-untyped-def]
    residual,
    out,
    rings,
    x_ring,
    ready,
    free,
    rows,
    outputs,
    stride,
    steps,
    mine,
    PIECES: gl.constexpr,
    ADDS: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    EX: gl.constexpr,
    BLOCKS: gl.constexpr,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN * PIECES, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, max(EX, 8) * PIECES, 16])
    wait()
    for begin in range(0, mine, steps):
        sums = gl.zeros([BM, BN * PIECES], gl.float32, layout)
        extra = gl.zeros([BM, max(EX, 8) * PIECES], gl.float32, narrow)
        for step in range(begin, begin + steps):
            slot = step % STAGES
            mbarrier.wait(ready.index(slot), step // STAGES & 1)
            for block in gl.static_range(BLOCKS):
                at = slot * BLOCKS + block
                value = x_ring.index(at)
                sums = warpgroups.warpgroup_mma(value, rings[0].index(at).permute((1, 0)), sums, is_async=True)
                if EX > 0:
                    extra = warpgroups.warpgroup_mma(value, rings[1].index(at).permute((1, 0)), extra, is_async=True)
            if EX > 0:
                sums, extra = warpgroups.warpgroup_mma_wait(2 * BLOCKS, deps=(sums, extra))
            else:
                sums = warpgroups.warpgroup_mma_wait(BLOCKS, deps=(sums,))
            # The step before has been multiplied.
            mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=step > 0)
        sums, extra = warpgroups.warpgroup_mma_wait(0, deps=(sums, extra))
        tile, part, _ = _place(begin, steps, PARTS)
        first = tile * (BN + EX)
        _store(sums, residual, out, first, part, rows, outputs, stride, PIECES, ADDS, BM, BN)
        if EX > 0:
            _store(extra, residual, out, first + BN, part, rows, outputs, stride, PIECES, ADDS, BM, EX)


@gluon_jit(do_not_specialize=["rows"])
def _kernel(  # type: ignore[no-untyped-def]
    x,  # [BM, BK] of [T, K]
    weight,  # [BN, BK] of [N, K]
    more,  # [EX, BK] of it: a tile's further outputs
    residual,
    out,
    rows,
    outputs,
    stride,  # the residual's
    steps,  # BLOCKS * BK inputs each, that a program takes of a tile of outputs
    jobs,  # tiles times PARTS
    PIECES: gl.constexpr,  # 2 if gated
    ADDS: gl.constexpr,  # the residual
    BM: gl.constexpr,
    BN: gl.constexpr,
    EX: gl.constexpr,
    BK: gl.constexpr,
    BLOCKS: gl.constexpr,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
):
    rings = (gl.allocate_shared_memory(weight.dtype, [STAGES * BLOCKS, BN * PIECES, BK], weight.layout),)
    if EX > 0:
        rings = rings + (gl.allocate_shared_memory(weight.dtype, [STAGES * BLOCKS, EX * PIECES, BK], more.layout),)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES * BLOCKS, BM, BK], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(free.index(s), count=1)
    warpgroups.fence_async_shared()
    mine = gl.cdiv(jobs - gl.program_id(0), gl.num_programs(0)) * steps
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    residual, out, rings, x_ring, ready, free, rows, outputs, stride, steps, mine,
                    PIECES, ADDS, BM, BN, EX, BLOCKS, PARTS, STAGES,
                ),
            ),
            (
                _load,
                (
                    x, weight, more, rings, x_ring, ready, free, outputs, steps, mine,
                    PIECES, BM, BN, EX, BK, BLOCKS, PARTS, STAGES,
                ),
            ),
        ],
        [1],
        [40],
    )  # fmt: skip


_INPUTS = 64  # of a block: 128 bytes, the widest that the tensor cores read without conflicts
_BLOCKS = 2  # of a step, which costs a wait
_ROOM = 214_000  # bytes of shared memory for rings
# Registers are left for the kernels around it to be in place. One warp more asks for copies.
_OPTIONS = {"num_warps": 4, "maxnreg": 128}


def _constants(outputs: int, inputs: int, gated: bool, adds: bool) -> dict[str, int | bool]:
    """The tile whose busiest multiprocessor has least to read: by the weight's shape alone, since parts decide the
    order of sums."""
    pieces = 2 if gated else 1
    parts = PARTS if not gated and few_outputs(outputs) and inputs >= 4 * PARTS * _INPUTS else 1

    def busiest(tile: tuple[int, int]) -> int:
        return -(-_jobs(outputs, tile, parts) // MULTIPROCESSORS) * (sum(tile) * pieces + SOME_ROWS)

    width, extra = min(TILES, key=busiest)
    stages = _ROOM // (((width + extra) * pieces + SOME_ROWS) * _INPUTS * _BLOCKS * 2)
    sizes = {"BM": SOME_ROWS, "BN": width, "EX": extra, "BK": _INPUTS, "BLOCKS": _BLOCKS}
    return {"PIECES": pieces, "ADDS": adds and parts == 1, **sizes, "PARTS": parts, "STAGES": stages}


def _jobs(outputs: int, tile: tuple[int, int], parts: int) -> int:
    return -(-outputs // sum(tile)) * parts


def some_rows(x: Tensor) -> bool:
    """Whether a product with x's rows [T, K] is one for this file."""
    takes = FEW_ROWS < len(x) <= SOME_ROWS and x.dtype in (torch.bfloat16, torch.float16) and x.shape[1] % 16 == 0
    return takes and torch.cuda.get_device_capability(x.device)[0] == 9


def product(
    x: Tensor, weight: Tensor, residual: Tensor | None = None, gated: bool = False, norm: Norm | None = None
) -> tuple[Tensor, Tensor | None]:
    """See the file's docstring; and norm(y), if a norm is given and the inputs are cut into parts."""
    check()
    x, x_stride = aligned(x)
    (rows, inputs), outputs = x.shape, len(weight) // 2 if gated else len(weight)
    assert weight.is_contiguous() and (residual is None or residual.stride(1) == 1)
    sizes = _constants(outputs, inputs, gated, residual is not None)
    width, extra, parts = sizes["BN"], sizes["EX"], sizes["PARTS"]
    out = x.new_empty(rows, outputs) if parts == 1 else x.new_empty(parts, rows, outputs, dtype=torch.float32)
    jobs, adds = _jobs(outputs, (width, extra), parts), residual if sizes["ADDS"] else None
    _kernel[(min(jobs, MULTIPROCESSORS),)](
        _described(x, x_stride, SOME_ROWS), _described(weight, inputs, width), _described(weight, inputs, extra or 8),
        out if adds is None else adds, out, rows, outputs, 0 if adds is None else adds.stride(0),
        -(-inputs // (_INPUTS * _BLOCKS * parts)), jobs, **sizes, **_OPTIONS, launch_pdl=True,
    )  # fmt: skip
    return (out, None) if parts == 1 else add_parts(out, residual, x.dtype, norm)


def _described(matrix: Tensor, stride: int, rows: int) -> TensorDescriptor:
    """Pieces [rows, _INPUTS] of `matrix`; what is outside of it reads as zeros."""
    return TensorDescriptor(matrix, list(matrix.shape), [stride, 1], [rows, _INPUTS], _layout())


def _layout() -> Any:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def product_builds(gated: bool) -> list[Build]:
    builds = []
    for outputs, inputs in ((9216, 2560), (3584, 1024)) if gated else ((12352, 2560), (2560, 9216), (8224, 1024)):
        sizes = _constants(outputs, inputs, gated, adds=True)
        rows = {"x": SOME_ROWS, "weight": sizes["BN"], "more": sizes["EX"] or 8}
        types = {name: f"tensordesc<bf16[{count}, {_INPUTS}],{_layout()!r}>" for name, count in rows.items()}
        types |= {"residual": "*bf16", "out": "*bf16" if sizes["PARTS"] == 1 else "*fp32"}
        types |= dict.fromkeys(("rows", "outputs", "stride", "steps", "jobs"), "i32")
        builds.append(Build(_kernel, types, sizes, _OPTIONS, only=90))
    return builds
