"""Vectors of 8 int64 lanes for CPU kernels.

All are lane by lane:

    longs(p, i, n)       lanes i .. i + 7 of the int64 array at address p; those from n on are 0 and not read
    put_longs(p, i, n, v)                                              ... are not written
    spread_long(x)       x in every lane;    times, plus, xor   of two
    remainder(x, m, inverse)   x mod m, exact for 0 <= x < 2^63 and MODULI[0] <= m < MODULI[1]; `inverse` has the bits
                               of the fp64 numbers nearest to 1 / m
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from deltagram.kernels._vectors import INT, LONG, call, pointer

EIGHT = 8
MODULI = (1 << 13, 1 << 31)
_LONGS, _INTS = ir.VectorType(LONG, EIGHT), ir.VectorType(INT, EIGHT)
_DOUBLES = ir.VectorType(ir.DoubleType(), EIGHT)
_WHOLE = 1.5 * 2.0**52  # what is added to it is rounded to a whole number, in the sum's low bits


class _LongsType(types.Type):  # type: ignore[misc]
    """8 lanes of int64."""

    def __init__(self) -> None:
        super().__init__("longs")


eight = _LongsType()


@register_model(_LongsType)
class _LongsModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _LONGS)


def _constant(kind: Any, value: Any) -> Any:
    return ir.Constant(kind, [value] * EIGHT)


def _splat(builder: Any, value: Any) -> Any:
    one = builder.insert_element(ir.Constant(_LONGS, ir.Undefined), value, INT(0))
    return builder.shuffle_vector(one, one, _constant(_INTS, 0))


def _place(builder: Any, address: Any, index: Any, end: Any) -> tuple[Any, Any]:
    """Where lane 0 lies, and which of the lanes lie before `end`."""
    at = builder.bitcast(pointer(builder, address, index, LONG), _LONGS.as_pointer())
    lanes = ir.Constant(_LONGS, list(range(EIGHT)))
    return at, builder.icmp_signed("<", lanes, _splat(builder, builder.sub(end, index)))


@intrinsic
def longs(context: Any, p: Any, i: Any, n: Any) -> Any:
    def generate(_context: Any, builder: Any, signature: Any, values: Any) -> Any:
        at, mask = _place(builder, *values)
        return call(builder, "llvm.masked.load.v8i64.p0", _LONGS, [at, INT(8), mask, _constant(_LONGS, 0)])

    return eight(types.int64, types.int64, types.int64), generate


@intrinsic
def put_longs(context: Any, p: Any, i: Any, n: Any, v: Any) -> Any:
    def generate(_context: Any, builder: Any, signature: Any, values: Any) -> Any:
        at, mask = _place(builder, *values[:3])
        call(builder, "llvm.masked.store.v8i64.p0", ir.VoidType(), [values[3], at, INT(8), mask])
        return _context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, eight), generate


@intrinsic
def spread_long(context: Any, x: Any) -> Any:
    return eight(types.int64), lambda _context, builder, signature, values: _splat(builder, values[0])


def _operator(name: str) -> Any:
    @intrinsic
    def apply(context: Any, a: Any, b: Any) -> Any:
        return eight(eight, eight), lambda _context, builder, signature, values: getattr(builder, name)(*values)

    return apply


times, plus, xor = (_operator(name) for name in ("mul", "add", "xor"))


@intrinsic
def remainder(context: Any, x: Any, m: Any, inverse: Any) -> Any:
    """The quotient x / m in fp64 is off by less than 3 * 2^10 / m, and by a half more when it is rounded: x minus m
    times it lies between -m and m. So its low 32 bits are all of it, and m added to a negative one the remainder."""

    def generate(_context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x, modulus = values[0], builder.trunc(values[1], _INTS)
        about = builder.fmul(builder.sitofp(x, _DOUBLES), builder.bitcast(values[2], _DOUBLES))
        whole = builder.bitcast(builder.fadd(about, _constant(_DOUBLES, _WHOLE)), _LONGS)
        rest = builder.sub(builder.trunc(x, _INTS), builder.mul(builder.trunc(whole, _INTS), modulus))
        negative = builder.ashr(rest, _constant(_INTS, 31))
        return builder.sext(builder.add(rest, builder.and_(negative, modulus)), _LONGS)

    return eight(eight, eight, eight), generate
