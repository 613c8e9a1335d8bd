"""Products of a few rows with a weight: the weight streams through the chip once, and what follows the product rides
along.

    y = residual + x W^T                           residual: where given
    y = silu(gate) * up,  gate | up = x W^T        gated: W holds gate's outputs, then up's

Such a product is bound by the weight's bytes. Two things decide its time. That memory is never idle: with dependent
launch, programs are in place while the kernel before them runs, and fill their rings with weights before they wait for
it; x follows, in a ring of its own. And that all multiprocessors have as much to read: a program takes `outputs` and
`extra` more, so that programs are as many as an H200's multiprocessors, or few less. Where that leaves few outputs,
warps share the inputs rather than the outputs, and their sums are added at the end.

A row's bits depend on the weight's shape alone: each output sums its inputs in order, in `parts` that are added in
order, whoever the other rows are. A row of NaN stays alone.

Shapes: x [T, K] (rows may be strided), weight [N, K] contiguous, residual [T, N] (rows may be strided), K a multiple of
16. Returns [T, N], or [T, N / 2] if gated, in x's dtype; sums in fp32, rounded once.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deltagram.kernels._gates import FEW_ROWS
from deltagram.kernels._gluon import async_copy, check, gl, gluon_jit, mma_v2, wait_then_launch
from deltagram.kernels._triton import Build, dependent_launch, power_of_two


@gluon_jit
def _outputs(tile, piece, BN, EX, layout):  # type: ignore[no-untyped-def]
    """Of a tile: its first BN, then its extra ones."""
    return tile * (BN + EX) + piece * BN + gl.arange(0, EX if piece > 0 else BN, layout)


@gluon_jit
def _fetch(rings, slot, lines, at, known):  # type: ignore[no-untyped-def]
    """Start copying tiles [parts, lines, inputs] of the inputs `at` [parts, inputs]."""
    for i in gl.static_range(len(rings)):
        source = lines[i][None, :, None] + at[:, None, :]
        async_copy.async_copy_global_to_shared(rings[i].index(slot), source, mask=known)


@gluon_jit(do_not_specialize=["rows"])
def _kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    residual,
    out,
    rows,
    outputs,
    K,
    x_stride,
    residual_stride,
    GATED: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    EX: gl.constexpr,
    PARTS: gl.constexpr,  # of the inputs; a power of two
    PART: gl.constexpr,  # inputs of a part of a tile; at least 64
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    BK: gl.constexpr = PARTS * PART
    PIECES: gl.constexpr = 2 if EX > 0 else 1
    ACROSS: gl.constexpr = min(32 // PARTS, PART // 8)
    copy: gl.constexpr = gl.BlockedLayout([1, 1, 8], [PARTS, 32 // (PARTS * ACROSS), ACROSS], [1, WARPS, 1], [2, 0, 1])
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, order=[2, 1, 0])
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[PARTS, WARPS // PARTS, 1], instr_shape=[1, 16, 8]
    )
    read: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, copy))
    plane: gl.constexpr = gl.SliceLayout(1, copy)
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    summed: gl.constexpr = gl.SliceLayout(0, mma)
    kind: gl.constexpr = weight.dtype.element_ty
    tile = gl.program_id(0)
    part = gl.arange(0, PARTS, gl.SliceLayout(1, plane))
    k = part[:, None] * PART + gl.arange(0, PART, gl.SliceLayout(0, plane))[None, :]

    lines = ()
    rings = ()
    sums = ()
    for j in gl.static_range(2 * PIECES if GATED else PIECES):
        n = _outputs(tile, j % PIECES, BN, EX, read)
        # Past the last output: read one that is there, and drop it.
        lines = lines + (weight + (gl.minimum(n, outputs - 1).to(gl.int64) + j // PIECES * outputs) * K,)
        rings = rings + (gl.allocate_shared_memory(kind, [STAGES, PARTS, n.shape[0], PART], shared),)
        sums = sums + (gl.zeros([PARTS, n.shape[0], BM], gl.float32, mma),)
    for s in gl.static_range(STAGES - 1):
        _fetch(rings, s, lines, k + s * BK, (k + s * BK < K)[:, None, :])
    async_copy.commit_group()

    if PDL:
        wait_then_launch()
    row = gl.arange(0, BM, read)
    real = (row < rows)[None, :, None]
    x_lines = (x + row.to(gl.int64) * x_stride,)
    x_rings = (gl.allocate_shared_memory(kind, [STAGES, PARTS, BM, PART], shared),)
    for s in gl.static_range(STAGES - 1):
        _fetch(x_rings, s, x_lines, k + s * BK, real & (k + s * BK < K)[:, None, :])
        async_copy.commit_group()
    m = gl.arange(0, BM, gl.SliceLayout(0, summed))[None, :]
    kept = ()
    if residual is not None:
        for j in gl.static_range(PIECES):
            n = _outputs(tile, j, BN, EX, gl.SliceLayout(1, summed))[:, None]
            at = residual + m.to(gl.int64) * residual_stride + n
            kept = kept + (gl.load(at, mask=(n < outputs) & (m < rows), other=0),)

    for i in range(gl.cdiv(K, BK)):
        async_copy.wait_group(STAGES - 2)
        value = x_rings[0].index(i % STAGES).permute((0, 2, 1)).load(right)
        new = ()
        for j in gl.static_range(len(sums)):
            new = new + (mma_v2(rings[j].index(i % STAGES).load(left), value, sums[j]),)
        sums = new
        ahead = i + STAGES - 1
        known = (k + ahead * BK < K)[:, None, :]
        _fetch(rings, ahead % STAGES, lines, k + ahead * BK, known)
        _fetch(x_rings, ahead % STAGES, x_lines, k + ahead * BK, real & known)
        async_copy.commit_group()

    async_copy.wait_group(0)  # copies past the end write zeros, where the sums across warps are about to meet
    for j in gl.static_range(PIECES):
        y = gl.sum(sums[j], 0)
        if GATED:
            y = y / (1 + gl.exp(-y)) * gl.sum(sums[j + PIECES], 0)
        if residual is not None:
            y += kept[j].to(gl.float32)
        n = _outputs(tile, j, BN, EX, gl.SliceLayout(1, summed))[:, None]
        at = out + m.to(gl.int64) * outputs + n
        gl.store(at, y.to(out.dtype.element_ty), mask=(n < outputs) & (m < rows))


class Tile(NamedTuple):
    """A program's part of a weight, and how it goes through it."""

    outputs: int
    extra: int
    parts: int


WARPS = 4
PART = 128
MULTIPROCESSORS = 132  # of an H200; the same for all GPUs, since it decides the order of sums
ROOM = 205_000  # bytes of shared memory for rings, on an H200
LEAST_ROOM = 131_072  # two stages of the widest tile of gate and up, with 16 rows


TILES = ((64, 0), (64, 8), (64, 16), (64, 32), (32, 0), (32, 8), (32, 16), (16, 0), (16, 8))


def busiest(outputs: int, size: int) -> int:
    """Rows of a weight and of x that the busiest multiprocessor reads, with tiles of `size` outputs and 8 rows of x."""
    return -(-outputs // (size * MULTIPROCESSORS)) * (size + 8)


def tile_of(outputs: int) -> Tile:
    """The tile whose busiest multiprocessor has least to read: by the weight's shape alone, since its parts decide the
    order of sums."""
    width, extra = min(TILES, key=lambda tile: busiest(outputs, sum(tile)))
    return Tile(width, extra, 64 // width)


def aligned(x: Tensor) -> tuple[Tensor, int]:
    """x [T, K] and its stride, so that rows start at a multiple of 32 bytes and none shares another's memory, as copies
    need it."""
    stride = x.stride(0) if len(x) > 1 else x.shape[1]
    assert x.stride(1) == 1
    if stride % 16 or stride < x.shape[1] or x.data_ptr() % 32:
        return x.clone(memory_format=torch.contiguous_format), x.shape[1]
    return x, stride


def few_rows(x: Tensor) -> bool:
    """Whether a product with x's rows [T, K] is one for this file: on GPUs whose shared memory has room for two stages
    of the widest tile, as those of data centres do."""
    takes = 0 < len(x) <= FEW_ROWS and x.dtype in (torch.bfloat16, torch.float16) and x.shape[1] % 16 == 0
    return takes and _room(x.device) >= LEAST_ROOM


def _room(device: torch.device) -> int:
    """Bytes of a program's shared memory that rings may take: what there is, less the sums across warps."""
    memory: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    return memory - 27_000


def product(x: Tensor, weight: Tensor, residual: Tensor | None = None, gated: bool = False) -> Tensor:
    """See the file's docstring."""
    check()
    x, x_stride = aligned(x)
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    assert weight.is_contiguous() and (residual is None or residual.stride(1) == 1)
    out = x.new_empty(rows, outputs)
    tile, pdl = tile_of(outputs), dependent_launch(x)
    _kernel[(-(-outputs // (tile.outputs + tile.extra)),)](
        x, weight, residual, out, rows, outputs, inputs, x_stride, residual.stride(0) if residual is not None else 0,
        **_constants(tile, inputs, power_of_two(rows, 8), gated, _room(x.device)), PDL=pdl, num_warps=WARPS,
        launch_pdl=pdl,
    )  # fmt: skip
    return out


def _constants(tile: Tile, inputs: int, padded: int, gated: bool, room: int = ROOM) -> dict[str, object]:
    stage = ((tile.outputs + tile.extra) * (2 if gated else 1) + padded) * tile.parts * PART * 2
    steps = -(-inputs // (tile.parts * PART))
    if steps * stage <= room:  # small products: the kernels around get a part
        room = min(room, 160_000)
    stages = max(2, min(room // stage, steps + 1))
    sizes = {"BM": padded, "BN": tile.outputs, "EX": tile.extra, "PARTS": tile.parts, "PART": PART}
    return {"GATED": gated, **sizes, "STAGES": stages, "WARPS": WARPS}


def product_builds(gated: bool) -> list[Build]:
    builds = []
    for outputs, inputs, rows, residual in ((9216, 2560, 8, False), (12352, 2560, 16, False), (2560, 9216, 16, True)):
        types = dict.fromkeys(("x", "weight", "residual", "out"), "*bf16")
        types |= dict.fromkeys(("rows", "outputs", "K", "x_stride", "residual_stride"), "i32")
        constants = _constants(tile_of(outputs), inputs, rows, gated) | ({} if residual else {"residual": None})
        builds.append(Build(_kernel, types, constants, {"num_warps": WARPS}))
    return builds
