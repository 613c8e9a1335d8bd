"""Products with packed weights for CPU kernels: y = x W^T, weights in panels of 16 outputs (see _packed.py)."""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from deltagram.kernels._compiled import shared
from deltagram.kernels._vectors import FLOAT, INT, LANES, VECTOR, call, pointer, splat_of, vector_at

WIDE = bool(llvm.get_host_cpu_features().get("avx512f"))  # 32 registers of 16 lanes


@intrinsic(prefer_literal=True)
def _tile(
    context: Any, x: Any, x_stride: Any, w: Any, k: Any, y: Any, y_stride: Any, rows: Any, panels: Any, brief: Any
) -> Any:
    """y[r, c] = sum over i < k of x[r, i] * w[c, i], each y[r, c] a vector: the outputs of one panel for one row.

    `rows` of x, `panels` consecutive panels of w; `brief`: they are bf16. All sums stay in registers; each is taken
    over i in order, so it does not depend on the tile.
    """
    count_rows, count_panels, is_brief = rows.literal_value, panels.literal_value, bool(brief.literal_value)
    item = 2 if is_brief else 4

    def generate(_context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x, x_stride, w, k, y, y_stride = values[:6]
        long = x.type
        panel_bytes = builder.mul(k, long(LANES * item))
        starts = [builder.add(w, builder.mul(panel_bytes, long(c))) for c in range(count_panels)]
        lines = [builder.add(x, builder.mul(x_stride, long(4 * r))) for r in range(count_rows)]
        sums = [[cgutils.alloca_once_value(builder, ir.Constant(VECTOR, [0.0] * LANES)) for _ in starts] for _ in lines]
        for one in (one for row in sums for one in row):
            builder.store(ir.Constant(VECTOR, [0.0] * LANES), one)
        with cgutils.for_range(builder, k) as loop:
            weights = []
            for start in starts:
                at = builder.add(start, builder.mul(loop.index, long(LANES * item)))
                if is_brief:
                    half = ir.VectorType(ir.IntType(16), LANES)
                    raw = builder.load(builder.inttoptr(at, half.as_pointer()), align=2)
                    whole = ir.VectorType(INT, LANES)
                    bits = builder.shl(builder.zext(raw, whole), ir.Constant(whole, [16] * LANES))
                    weights.append(builder.bitcast(bits, VECTOR))
                else:
                    weights.append(builder.load(builder.inttoptr(at, VECTOR.as_pointer()), align=4))
            for line, row in zip(lines, sums, strict=True):
                input = splat_of(builder, builder.load(pointer(builder, line, loop.index, FLOAT)))
                for weight, one in zip(weights, row, strict=True):
                    builder.store(call(builder, "llvm.fma.v16f32", VECTOR, [input, weight, builder.load(one)]), one)
        for r, row in enumerate(sums):
            for c, one in enumerate(row):
                at = builder.add(builder.mul(y_stride, long(r)), long(LANES * c))
                builder.store(builder.load(one), vector_at(builder, y, at), align=4)
        return _context.get_dummy_value()

    ints = (types.int64,) * 6
    return types.void(*ints, rows, panels, brief), generate


def _columns(panels: int, brief: bool) -> Any:
    """All rows through `panels` panels, as many rows a tile as registers hold."""
    most = (8 if panels <= 3 else 4 if panels == 4 else 1) if WIDE else (2 if panels <= 3 else 1)
    half = max(1, most // 2)

    @numba.njit(error_model="numpy")
    def columns(x, x_stride, rows, k, w, y, y_stride):  # type: ignore[no-untyped-def]
        t = 0
        while rows - t >= most:
            _tile(x + 4 * t * x_stride, x_stride, w, k, y + 4 * t * y_stride, y_stride, most, panels, brief)
            t += most
        while rows - t >= half:
            _tile(x + 4 * t * x_stride, x_stride, w, k, y + 4 * t * y_stride, y_stride, half, panels, brief)
            t += half
        while t < rows:
            _tile(x + 4 * t * x_stride, x_stride, w, k, y + 4 * t * y_stride, y_stride, 1, panels, brief)
            t += 1

    return columns


def _product(brief: bool) -> Any:
    item = 2 if brief else 4
    eight, four, three, one = (_columns(panels, brief) for panels in (8, 4, 3, 1))

    @numba.njit(error_model="numpy")
    def product(x, x_stride, rows, k, w, outputs, y, y_stride):  # type: ignore[no-untyped-def]
        panels, size = (outputs + LANES - 1) // LANES, k * (LANES * item)
        c = 0
        while rows < 2 and panels - c >= 8:  # one row: sums of more panels hide the time an addition takes
            eight(x, x_stride, rows, k, w + c * size, y + 64 * c, y_stride)
            c += 8
        while rows < 8 and panels - c >= 4:
            four(x, x_stride, rows, k, w + c * size, y + 64 * c, y_stride)
            c += 4
        while panels - c >= 3:
            three(x, x_stride, rows, k, w + c * size, y + 64 * c, y_stride)
            c += 3
        while panels > c:
            one(x, x_stride, rows, k, w + c * size, y + 64 * c, y_stride)
            c += 1

    return product


_of_bf16, _of_fp32 = _product(True), _product(False)


_SIZES = (types.int64,) * 9


@shared(types.void(*_SIZES))
def _product_of(x, x_stride, rows, k, w, brief, outputs, y, y_stride):  # type: ignore[no-untyped-def]
    if brief:
        _of_bf16(x, x_stride, rows, k, w, outputs, y, y_stride)
    else:
        _of_fp32(x, x_stride, rows, k, w, outputs, y, y_stride)


PRODUCT: int = _product_of.address


@intrinsic
def product(
    context: Any,
    f: Any,
    x: Any,
    x_stride: Any,
    rows: Any,
    k: Any,
    w: Any,
    brief: Any,
    outputs: Any,
    y: Any,
    y_stride: Any,
) -> Any:
    """y [rows, outputs] = x [rows, k] W^T, W in panels at address w, bf16 if `brief`. Whole panels are written: a row
    of y has room for `outputs` rounded up to 16. `f` is PRODUCT, which kernels are given and do not contain: it takes
    long to compile."""

    def generate(_context: Any, builder: Any, signature: Any, values: Any) -> Any:
        long = ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [long] * len(_SIZES))
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return _context.get_dummy_value()

    return types.void(types.int64, *_SIZES), generate
