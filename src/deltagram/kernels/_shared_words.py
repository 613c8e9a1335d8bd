"""Words that a CPU kernel shares with other threads, and with a device that reads and writes page-locked memory.

All are known by their addresses:

    look(p)  the int64 at address p, before everything that follows;    post(p, x)  writes it, after everything before
    swap(p, old, new)  writes `new` if the word is `old`: whether it was
    sleep_at(p, seen)  until `wake_at(p)`, unless the word is no longer `seen`;    doze(us)  for microseconds
    relax()  a moment, for loops that wait;    give_way()  lets others run
    request(p)  starts to bring a line of memory;    copy(to, p, n)  n bytes;    clear(p, n)  n zero bytes
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from deltagram.kernels._compiled import inlined
from deltagram.kernels._vectors import BYTE, INT, LONG, call, pointer

_ADDRESS = BYTE.as_pointer()
_MACHINE = platform.machine()
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(_MACHINE, 0)
_WAIT_PRIVATE, _WAKE_PRIVATE = 128, 129
_MOMENT = {"x86_64": ("llvm.x86.sse2.pause", []), "aarch64": ("llvm.aarch64.hint", [INT(1)])}.get(_MACHINE)

_system: Any = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))
_usleep: Any = types.ExternalFunction("usleep", types.int32(types.uint32))
_yield: Any = types.ExternalFunction("sched_yield", types.int32())


@intrinsic
def look(context: Any, p: Any) -> Any:
    def generate(_context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load_atomic(pointer(builder, values[0], LONG(0), LONG), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def post(context: Any, p: Any, x: Any) -> Any:
    def generate(_context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.store_atomic(values[1], pointer(builder, values[0], LONG(0), LONG), "seq_cst", 8)
        return _context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def swap(context: Any, p: Any, old: Any, new: Any) -> Any:
    def generate(_context: Any, builder: Any, signature: Any, values: Any) -> Any:
        at = pointer(builder, values[0], LONG(0), LONG)
        return builder.extract_value(builder.cmpxchg(at, values[1], values[2], "seq_cst", "seq_cst"), 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


@intrinsic
def relax(context: Any) -> Any:
    def generate(_context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if _MOMENT is not None:
            call(builder, _MOMENT[0], ir.VoidType(), _MOMENT[1])
        return _context.get_dummy_value()

    return types.void(), generate


@intrinsic
def request(context: Any, p: Any) -> Any:
    def generate(_context: Any, builder: Any, signature: Any, values: Any) -> Any:
        at = builder.inttoptr(values[0], _ADDRESS)
        call(builder, "llvm.prefetch.p0", ir.VoidType(), [at, INT(0), INT(3), INT(1)])
        return _context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def copy(context: Any, to: Any, p: Any, n: Any) -> Any:
    def generate(_context: Any, builder: Any, signature: Any, values: Any) -> Any:
        places = [builder.inttoptr(value, _ADDRESS) for value in values[:2]]
        call(builder, "llvm.memcpy.p0.p0.i64", ir.VoidType(), [*places, values[2], ir.IntType(1)(0)])
        return _context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def clear(context: Any, p: Any, n: Any) -> Any:
    def generate(_context: Any, builder: Any, signature: Any, values: Any) -> Any:
        at = builder.inttoptr(values[0], _ADDRESS)
        call(builder, "llvm.memset.p0.i64", ir.VoidType(), [at, BYTE(0), values[1], ir.IntType(1)(0)])
        return _context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@inlined
def sleep_at(p, seen):  # type: ignore[no-untyped-def]
    _system(_FUTEX, p, _WAIT_PRIVATE, seen & 0xFFFFFFFF, 0, 0, 0)


@inlined
def wake_at(p):  # type: ignore[no-untyped-def]
    _system(_FUTEX, p, _WAKE_PRIVATE, 1 << 30, 0, 0, 0)


@inlined
def give_way():  # type: ignore[no-untyped-def]
    _yield()


@inlined
def doze(us):  # type: ignore[no-untyped-def]
    _usleep(us)
