"""A CPU kernel's range, spread over threads that wait for it awake.

Waking a thread takes about as long as a kernel runs. So the threads that help look for the next job a while before
they sleep: all kernels of a step but the first find them awake.

The range is cut into one share a thread, the same rows in every kernel of a layer, which are then in its cache. (With
more and smaller shares weights are read once more for each, which took 2 % of a prefill.) A thread that has done its
own takes others', so one that comes late holds up nobody. They agree through int64 words that all of them see:

    JOB         jobs so far
    DONE        shares of this one that are done
    ENTRY ..    what it is: stable while a share of it is not done
    OWN         of each thread: its share's ticket; whether it sleeps, or is about to; the lock it then waits for

A ticket is the job's number and the threads that may help, or 0. Who puts 0 in its place has the share. A ticket is
never the same twice, so nobody takes a share of one job for that of another.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from deltagram.kernels._compiled import inlined, kept_on_disk
from deltagram.kernels._shared_words import look, post, relax, swap
from deltagram.kernels._vectors import LONG, get, get_long, put_long

JOB, DONE, ENTRY, OWN = 0, 128, 256, 384  # bytes, in lines of memory of their own
TICKET, ASLEEP, LOCK, LINE = 0, 8, 16, 128  # bytes, from OWN + LINE * thread on
_SPINS, _PATIENCE = 4000, 5000  # looks before a waiting thread lets others run, and before it sleeps
_FIELDS = {"int": ("q", "get_long(at, {})"), "float": ("f4x", "get(at, 2 * {})")}

# Python's locks work without Python.
_acquire: Any = types.ExternalFunction("PyThread_acquire_lock", types.int32(types.int64, types.int32))
_release: Any = types.ExternalFunction("PyThread_release_lock", types.void(types.int64))
_give_way: Any = types.ExternalFunction("sched_yield", types.int32())


class Kernel:
    """A compiled kernel(first, last, scratch, *arguments), whose arguments are annotated int (int64) or float (fp32):
    the address of its machine code, and how its arguments lie in memory."""

    def __init__(self, function: Callable[..., None]) -> None:
        kinds = [_FIELDS[kind] for name, kind in function.__annotations__.items() if name != "return"][3:]
        self.layout = struct.Struct("=" + "".join(code for code, _ in kinds))
        self.name = function.__module__
        values = ", ".join(read.format(i) for i, (_, read) in enumerate(kinds))
        source = f"def entry(first, last, scratch, at):\n    kernel(first, last, scratch, {values})"
        names: dict[str, Any] = {"kernel": numba.njit(function, error_model="numpy"), "get": get, "get_long": get_long}
        names["__name__"] = function.__module__
        exec(compile(source, function.__code__.co_filename, "exec"), names)  # kept on disk as if in its file
        names["entry"].__qualname__ = function.__qualname__
        with kept_on_disk() as kept:
            signature = types.void(*(types.int64,) * 4)
            self._compiled = numba.cfunc(signature, cache=kept, error_model="numpy", nopython=True)(names["entry"])
        self.address: int = self._compiled.address


threaded = Kernel


@intrinsic
def _call(context: Any, entry: Any, first: Any, last: Any, scratch: Any, at: Any) -> Any:
    def generate(_context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [LONG] * 4)
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return _context.get_dummy_value()

    return types.void(*(types.int64,) * 5), generate


def _native(count: int) -> Callable[[Any], Any]:
    """A function of `count` int64, called from Python and run without the GIL."""
    with kept_on_disk() as kept:
        kind = types.void(*(types.int64,) * count)
        return numba.njit(kind, cache=kept, nogil=True, error_model="numpy")  # type: ignore[no-any-return]


@inlined
def _wait(looks):  # type: ignore[no-untyped-def]
    """A moment; after a while, also to let others run."""
    if looks < _SPINS:
        relax()
    else:
        _give_way()


@inlined
def _work(words, thread, size):  # type: ignore[no-untyped-def]
    """Do shares of the job until all are taken, the thread's own first."""
    for i in range(size):
        share = (thread + i) % size
        at = words + OWN + LINE * share + TICKET
        ticket = look(at)
        if ticket == 0 or thread >= ticket & 0xFF or not swap(at, ticket, 0):
            continue
        job = words + ENTRY
        entry, arguments, count, shares = get_long(job, 0), get_long(job, 1), get_long(job, 2), get_long(job, 3)
        scratch = get_long(job, 4) + thread * get_long(job, 5)
        _call(entry, count * share // shares, count * (share + 1) // shares, scratch, arguments)
        done = look(words + DONE)
        while not swap(words + DONE, done, done + 1):
            done = look(words + DONE)


@_native(3)
def _serve(words, thread, size):  # type: ignore[no-untyped-def]
    """Help with what comes; sleep when nothing has for a while."""
    own, seen, looks = words + OWN + LINE * thread, 0, 0
    while True:
        job = look(words + JOB)
        if job != seen:
            _work(words, thread, size)
            seen, looks = job, 0
        _wait(looks)
        looks += 1
        if looks == _PATIENCE:
            post(own + ASLEEP, 1)
            if look(words + JOB) == seen or not swap(own + ASLEEP, 1, 0):
                _acquire(get_long(own + LOCK, 0), 1)
            looks = 0


@_native(8)
def _share(words, size, threads, entry, arguments, count, scratch, scratch_bytes):  # type: ignore[no-untyped-def]
    """Post a job, wake who sleeps, and help until it is done."""
    job = words + ENTRY
    put_long(job, 0, entry)
    put_long(job, 1, arguments)
    put_long(job, 2, count)
    put_long(job, 3, threads)
    put_long(job, 4, scratch)
    put_long(job, 5, scratch_bytes)
    post(words + DONE, 0)
    number = look(words + JOB) + 1
    for thread in range(threads):
        post(words + OWN + LINE * thread + TICKET, number << 8 | threads)
    post(words + JOB, number)
    for thread in range(1, threads):
        own = words + OWN + LINE * thread
        if swap(own + ASLEEP, 1, 0):
            _release(get_long(own + LOCK, 0))
    _work(words, 0, size)
    looks = 0
    while look(words + DONE) < threads:
        _wait(looks)
        looks += 1


@_native(4)
def _alone(entry, arguments, count, scratch):  # type: ignore[no-untyped-def]
    _call(entry, 0, count, scratch, arguments)


class _Team:
    """The threads that help the one that calls, with one job at a time."""

    def __init__(self) -> None:
        self.size, self.busy = min(64, os.cpu_count() or 1), threading.Lock()
        self._memory = torch.zeros((OWN + LINE * self.size) // 8, dtype=torch.int64)
        self.words = self._memory.data_ptr()
        python = ctypes.pythonapi
        python.PyThread_allocate_lock.restype = ctypes.c_void_p
        for thread in range(1, self.size):
            lock = python.PyThread_allocate_lock()
            python.PyThread_acquire_lock(ctypes.c_void_p(lock), 1)
            self._memory[(OWN + LINE * thread + LOCK) // 8] = lock
            mine, name = (self.words, thread, self.size), f"deltagram-kernel-{thread}"
            threading.Thread(target=_serve, args=mine, name=name, daemon=True).start()


_team = cache(_Team)


class _Caller(threading.local):
    """A calling thread's memory: the arguments of the kernel it runs, and scratch of each thread that helps. It stays
    where it is, in the caches of who uses it."""

    def __init__(self) -> None:
        self._arguments, self._scratch = ctypes.create_string_buffer(512), torch.empty(0)
        self.arguments = ctypes.addressof(self._arguments)
        self._size = self._threads = 0

    def put(self, kernel: Kernel, *arguments: float) -> None:
        kernel.layout.pack_into(self._arguments, 0, *arguments)

    def scratch(self, size: int, threads: int) -> tuple[int, int]:
        """The address of `size` fp32 numbers of the first thread, and the bytes from one thread's to the next's."""
        if size > self._size or threads > self._threads:
            self._size, self._threads = max(self._size, size + -size % 32 + 32), max(self._threads, threads)
            self._scratch = torch.empty(self._size * self._threads)
        return self._scratch.data_ptr(), 4 * self._size


_caller = _Caller()


def spread(kernel: Kernel, count: int, least: int, scratch: int, *arguments: float) -> None:
    """kernel(first, last, scratch, *arguments) over the range 0 .. count, on as many threads as torch has.

    Each has at least `least` of it. `scratch` is the address of that many fp32 numbers
    of the thread's own.
    """
    _caller.put(kernel, *arguments)
    job = kernel.address, _caller.arguments, count
    threads = min(torch.get_num_threads(), count // least) or 1
    if threads > 1 and (team := _team()).busy.acquire(blocking=False):
        try:
            threads = min(threads, team.size)
            _share(team.words, team.size, threads, *job, *_caller.scratch(scratch, threads))
        finally:
            team.busy.release()
    else:
        _alone(*job, _caller.scratch(scratch, 1)[0])
