"""Vectors of 16 fp32 lanes for CPU kernels, and numbers at addresses.

A vector is two or four registers on a machine without AVX-512. Products that are added are fused in the order the
code says and sums over lanes go in one fixed order, so a kernel gives a row the same bits whatever rows are beside
it.

    load(p, i, n)   lanes i .. i + 15 of the fp32 array at address p; those from n on are 0 and not read
    store(p, i, n, v)                                               ... are not written
    get / put       one fp32 number;    get_int / put_int   one int32, as an int;    get_long / put_long   one int64
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from deltagram.kernels._compiled import inlined

LANES = 16
FLOAT, BYTE, INT, LONG = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
VECTOR = ir.VectorType(FLOAT, LANES)


class _VectorType(types.Type):  # type: ignore[misc]
    """16 lanes of fp32."""

    def __init__(self) -> None:
        super().__init__("vector")


vector = _VectorType()


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, VECTOR)


def pointer(builder: Any, address: Any, index: Any, kind: ir.Type) -> Any:
    return builder.gep(builder.inttoptr(address, kind.as_pointer()), [index])


def _reader(numba_type: Any, kind: ir.Type) -> Any:
    @intrinsic
    def read(context: Any, p: Any, i: Any) -> Any:
        def generate(_context: Any, builder: Any, signature: Any, values: Any) -> Any:
            value = builder.load(pointer(builder, values[0], values[1], kind))
            return builder.sext(value, LONG) if kind in (INT, BYTE) else value

        return numba_type(types.int64, types.int64), generate

    return read


def _writer(numba_type: Any, kind: ir.Type) -> Any:
    @intrinsic
    def write(context: Any, p: Any, i: Any, x: Any) -> Any:
        def generate(_context: Any, builder: Any, signature: Any, values: Any) -> Any:
            address, index, value = values
            value = builder.trunc(value, INT) if kind == INT else value
            builder.store(value, pointer(builder, address, index, kind))
            return _context.get_dummy_value()

        return types.void(types.int64, types.int64, numba_type), generate

    return write


get, put = _reader(types.float32, FLOAT), _writer(types.float32, FLOAT)
get_int, put_int = _reader(types.int64, INT), _writer(types.int64, INT)
get_long, put_long = _reader(types.int64, LONG), _writer(types.int64, LONG)
get_byte = _reader(types.int64, BYTE)


@intrinsic
def get_brief(context: Any, p: Any, i: Any) -> Any:
    """The i-th bf16 number at address p."""

    def generate(_context: Any, builder: Any, signature: Any, values: Any) -> Any:
        half = builder.load(pointer(builder, values[0], values[1], ir.IntType(16)), align=2)
        return builder.bitcast(builder.shl(builder.zext(half, INT), INT(16)), FLOAT)

    return types.float32(types.int64, types.int64), generate


def _lanes_below(builder: Any, index: Any, end: Any) -> Any:
    """Which of the lanes index .. index + 15 lie before `end`: <16 x i1>."""
    left = builder.sub(end, index)
    most = ir.Constant(left.type, LANES)
    left = builder.trunc(builder.select(builder.icmp_signed("<", left, most), left, most), INT)
    return builder.icmp_signed("<", ir.Constant(ir.VectorType(INT, LANES), list(range(LANES))), splat_of(builder, left))


def splat_of(builder: Any, value: Any) -> Any:
    kind = ir.VectorType(value.type, LANES)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, INT(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(INT, LANES), [0] * LANES))


def call(builder: Any, name: str, result: ir.Type, arguments: list[Any]) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def vector_at(builder: Any, address: Any, index: Any) -> Any:
    return builder.bitcast(pointer(builder, address, index, FLOAT), VECTOR.as_pointer())


@intrinsic
def load(context: Any, p: Any, i: Any, n: Any) -> Any:
    def generate(_context: Any, builder: Any, signature: Any, values: Any) -> Any:
        address, index, end = values
        at, mask = vector_at(builder, address, index), _lanes_below(builder, index, end)
        return call(
            builder, "llvm.masked.load.v16f32.p0", VECTOR, [at, INT(4), mask, ir.Constant(VECTOR, [0.0] * LANES)]
        )

    return vector(types.int64, types.int64, types.int64), generate


@intrinsic
def store(context: Any, p: Any, i: Any, n: Any, v: Any) -> Any:
    def generate(_context: Any, builder: Any, signature: Any, values: Any) -> Any:
        address, index, end, value = values
        at, mask = vector_at(builder, address, index), _lanes_below(builder, index, end)
        call(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), [value, at, INT(4), mask])
        return _context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, vector), generate


@intrinsic
def splat(context: Any, x: Any) -> Any:
    """One fp32 number in every lane."""
    return vector(types.float32), lambda _context, builder, signature, values: splat_of(builder, values[0])


@intrinsic
def fma(context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    name = "llvm.fma.v16f32"
    return vector(vector, vector, vector), lambda _c, builder, signature, values: call(
        builder, name, VECTOR, list(values)
    )


@intrinsic
def root(context: Any, a: Any) -> Any:
    return vector(vector), lambda _c, builder, signature, values: call(
        builder, "llvm.sqrt.v16f32", VECTOR, list(values)
    )


@intrinsic
def total(context: Any, a: Any) -> Any:
    """The sum of the lanes: halves added until one is left."""

    def generate(_context: Any, builder: Any, signature: Any, values: Any) -> Any:
        value, width = values[0], LANES
        while width > 1:
            width //= 2
            low, high = (
                builder.shuffle_vector(
                    value, value, ir.Constant(ir.VectorType(INT, width), list(range(first, first + width)))
                )
                for first in (0, width)
            )
            value = builder.fadd(low, high)
        return builder.extract_element(value, INT(0))

    return types.float32(vector), generate


@intrinsic
def largest(context: Any, a: Any) -> Any:
    """The largest lane."""
    name = "llvm.vector.reduce.fmax.v16f32"
    return types.float32(vector), lambda _c, builder, signature, values: call(builder, name, FLOAT, list(values))


@intrinsic
def greater(context: Any, a: Any, b: Any) -> Any:
    """The greater of each lane; a NaN of `a` stays."""

    def generate(_context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", *values), values[1], values[0])

    return vector(vector, vector), generate


@intrinsic
def lesser(context: Any, a: Any, b: Any) -> Any:
    """The lesser of each lane; a NaN of `a` stays."""

    def generate(_context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *values), values[1], values[0])

    return vector(vector, vector), generate


def _operator(name: str) -> Any:
    @intrinsic
    def apply(context: Any, a: Any, b: Any) -> Any:
        return vector(vector, vector), lambda _c, builder, signature, values: getattr(builder, name)(*values)

    return apply


add, subtract, multiply, divide = (_operator(name) for name in ("fadd", "fsub", "fmul", "fdiv"))


@intrinsic
def rounded(context: Any, a: Any) -> Any:
    """To the nearest integer, ties to even."""
    return vector(vector), lambda _c, builder, signature, values: call(
        builder, "llvm.rint.v16f32", VECTOR, list(values)
    )


@intrinsic
def power_of_two(context: Any, a: Any) -> Any:
    """2^a of whole numbers a from -126 to 127."""

    def generate(_context: Any, builder: Any, signature: Any, values: Any) -> Any:
        whole = ir.VectorType(INT, LANES)
        exponent = builder.add(builder.fptosi(values[0], whole), ir.Constant(whole, [127] * LANES))
        return builder.bitcast(builder.shl(exponent, ir.Constant(whole, [23] * LANES)), VECTOR)

    return vector(vector), generate


_LOG2_E = math.log2(math.e)
_LN2_HIGH, _LN2_LOW = (
    0.693359375,
    -2.12194440e-4,
)  # their sum is ln 2; the first has few bits, so that n times it is exact
_TAYLOR = tuple(1 / math.factorial(n) for n in range(8))


@inlined
def exp(x):  # type: ignore[no-untyped-def]
    """e^x of every lane to two units in the last place; arguments past +-87 count as +-87."""
    x = lesser(greater(x, splat(-87.0)), splat(87.0))
    n = rounded(multiply(x, splat(_LOG2_E)))
    r = fma(n, splat(-_LN2_LOW), fma(n, splat(-_LN2_HIGH), x))  # |r| <= ln(2) / 2: the series' rest is below 2^-27
    y = fma(r, splat(_TAYLOR[7]), splat(_TAYLOR[6]))
    y = fma(y, r, splat(_TAYLOR[5]))
    y = fma(y, r, splat(_TAYLOR[4]))
    y = fma(y, r, splat(_TAYLOR[3]))
    y = fma(y, r, splat(_TAYLOR[2]))
    y = fma(y, r, splat(1.0))
    y = fma(y, r, splat(1.0))
    return multiply(y, power_of_two(n))


@inlined
def sigmoid(x):  # type: ignore[no-untyped-def]
    return divide(splat(1.0), add(splat(1.0), exp(subtract(splat(0.0), x))))


@inlined
def silu(x):  # type: ignore[no-untyped-def]
    return divide(x, add(splat(1.0), exp(subtract(splat(0.0), x))))


# ---- rows


@inlined
def square_sum(x, n):  # type: ignore[no-untyped-def]
    """Sum of the squares of n numbers at x."""
    a = splat(0.0)
    for i in range(0, n, LANES):
        v = load(x, i, n)
        a = fma(v, v, a)
    return total(a)


@inlined
def inverse_rms(x, n, eps):  # type: ignore[no-untyped-def]
    return np.float32(1) / np.sqrt(square_sum(x, n) / np.float32(n) + np.float32(eps))


@inlined
def norm_row(x, w, n, eps, y):  # type: ignore[no-untyped-def]
    """y = w * x / sqrt(mean(x^2) + eps), n numbers each. y may be x."""
    scale = splat(inverse_rms(x, n, eps))
    for i in range(0, n, LANES):
        store(y, i, n, multiply(multiply(load(x, i, n), scale), load(w, i, n)))


@inlined
def gate_row(h, half, scale, y):  # type: ignore[no-untyped-def]
    """y = silu(h[:half]) * h[half:] * scale: what lies between the products of a gated MLP."""
    s = splat(scale)
    for i in range(0, half, LANES):
        store(y, i, half, multiply(multiply(silu(load(h, i, half)), load(h + 4 * half, i, half)), s))


@inlined
def add_row(x, scale, n, y):  # type: ignore[no-untyped-def]
    """y += scale * x."""
    s = splat(scale)
    for i in range(0, n, LANES):
        store(y, i, n, fma(s, load(x, i, n), load(y, i, n)))


@inlined
def rope_row(x, cos, sin, half):  # type: ignore[no-untyped-def]
    """x turned in place in its first 2 * half dimensions."""
    for i in range(0, half, LANES):
        c, s = load(cos, i, half), load(sin, i, half)
        low, high = load(x, i, half), load(x + 4 * half, i, half)
        store(x, i, half, subtract(multiply(low, c), multiply(high, s)))
        store(x + 4 * half, i, half, fma(high, c, multiply(low, s)))
