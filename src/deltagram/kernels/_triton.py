"""The one place that knows whether Triton is there, and how an op chooses between its reference and its kernel.

Kernel files start with `from __future__ import annotations` and decorate with `jit`, so that they import without
Triton. Each of them lists, in `ahead_of_time()`, the builds that stand for its kernels: one `Build` a set of types and
switches that a launcher can produce. Sizes that follow the step (tokens, sequences) are listed in `do_not_specialize`:
a kernel must not be laid out, and so must not sum, differently in another bucket. `compile_ahead(build, capability)`
compiles one for a GPU that need not be there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl

    TRITON_ERROR = None
    jit = triton.jit
except ImportError as error:
    triton = tl = None
    TRITON_ERROR = error

    def jit(function: Any = None, **options: Any) -> Any:
        """Leaves a kernel as it is: nobody will launch it."""
        return function or (lambda decorated: decorated)


Impl = Literal["reference", "compiled", "triton"] | None
Op = TypeVar("Op", bound=Callable[..., object])


class Build(NamedTuple):
    """One compiled form of a kernel: `types` of its run-time arguments ("*bf16", "i32") and `constants`, both by name,
    the launch's own options, and the one compute capability it is for, if it is not for all."""

    kernel: Any
    types: dict[str, str]
    constants: Mapping[str, object]
    options: Mapping[str, object] = {"num_warps": 4}
    only: int | None = None


def compile_ahead(build: Build, capability: int) -> Any:
    """Compile `build` for compute capability `capability` (80, 90, 100). Needs Triton, but no GPU.

    Pointers and strides count as multiples of 16, as they are at every launch but for odd shapes. Kernels that know
    dependent launch (`PDL`) use it where there is one.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.experimental.gluon._runtime import GluonASTSource

    names = build.kernel.arg_names
    constants = dict(build.constants) | ({"PDL": capability >= 90} if "PDL" in names else {})
    signature = {name: "constexpr" if name in constants else build.types[name] for name in names}
    aligned = [
        (i,)
        for i, parameter in enumerate(build.kernel.params)
        if signature[parameter.name][0] in "*i" and not parameter.do_not_specialize
    ]
    kind = GluonASTSource if build.kernel.is_gluon() else ASTSource
    source = kind(build.kernel, signature, constants, {i: [["tt.divisibility", 16]] for i in aligned})
    return compile(source, target=GPUTarget("cuda", capability, 32), options=dict(build.options))


_COMPILED = frozenset((torch.float32, torch.int32, torch.int64))


def choose(impl: Impl, where: Tensor | torch.device, reference: Op, launch: Op, compiled: Op | None = None) -> Op:
    """The body an op runs, for tensors like `where`: `impl` if given. Else CUDA tensors take the kernel; fp32 (or
    integer) ones on a CPU the compiled body, if the op has one for its arguments; all others the reference.

    Raises ValueError for an unknown `impl` or a compiled body that is not there, RuntimeError where the kernel is
    asked for and cannot be had: never another one than said here.
    """
    cuda = where.is_cuda if isinstance(where, Tensor) else where.type == "cuda"
    if impl is None:
        if not cuda:
            return compiled if compiled is not None and getattr(where, "dtype", None) in _COMPILED else reference
    elif impl == "reference":
        return reference
    elif impl == "compiled":
        if compiled is None or cuda or getattr(where, "dtype", None) not in _COMPILED:
            raise ValueError("impl 'compiled' is for float32 tensors on a CPU, of an op that has such a body")
        return compiled
    elif impl != "triton":
        raise ValueError(f"impl must be 'reference', 'compiled', 'triton' or None, got {impl!r}")
    if launch is not reference and triton is None:
        device = where.device if isinstance(where, Tensor) else where
        raise RuntimeError(
            f"tensors on {device} need Triton, which did not import ({TRITON_ERROR}): pip install 'deltagram[gpu]'"
        )
    return launch


def on_cpu(name: str) -> Any:
    """The compiled body of op `name`, in kernels/_cpu_<name>.py, imported when it is first called."""

    @cache
    def body() -> Any:
        return getattr(import_module(f"deltagram.kernels._cpu_{name}"), name)

    return lambda *arguments: body()(*arguments)


@jit
def prefetch(at, size):  # type: ignore[no-untyped-def]
    """In a kernel for compute capability 9.0 or later: one thread asks for the `size` bytes at `at`, both multiples of
    16, to come to the L2 cache; for none if size < 1."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred first, some;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        setp.gt.and.s32 some, $2, 0, first;
        @some cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [at, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def dependent_launch(where: Tensor) -> bool:
    """Whether kernels on the device of `where` may start while the one before them ends (`launch_pdl`).

    Such a kernel waits (`gdc_wait`) for the one before to end before it reads what a step computes or writes anything:
    only weights, the step's tables and what earlier steps left may be touched earlier. It also lets the next one start.
    One program of it waits at least, so that who waits for it has also waited for all that came before.
    """
    return where.is_cuda and torch.cuda.get_device_capability(where.device) >= (9, 0)


def power_of_two(size: int, least: int = 1) -> int:
    """The smallest power of two that is at least `size` and at least `least`: the side of a tile."""
    return max(least, 1 << (size - 1).bit_length())
