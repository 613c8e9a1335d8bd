"""The one place that compiles for the CPU: kernels written in Python, made machine code by numba once and kept on disk.

Kernels live in the files _cpu_<name>.py, which an op imports when it first runs on a CPU, as numba takes a third of a
second to import. They work on addresses: tensors come in as `tensor.data_ptr()`, sizes and strides (in elements) as
int. So a kernel has one compiled form, whatever the tensors' layouts, made when its file is imported: nothing
compiles after `compile_kernels`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core import types

_HERE = Path(__file__).parent
Kernel = TypeVar("Kernel", bound=Callable[..., None])


@cache
def _folder() -> Path | None:
    """Where compiled kernels are kept: a folder of their sources' digest, as numba itself does not see that a file
    which another one uses has changed. None where nothing can be written."""
    sources = b"".join(path.read_bytes() for path in sorted(_HERE.glob("_*.py")))
    name = f"{numba.__version__}-{hashlib.blake2b(sources, digest_size=8).hexdigest()}"
    with contextlib.suppress(OSError, RuntimeError):
        folder = Path.home() / ".cache" / "deltagram" / "kernels" / name
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    return None


@contextlib.contextmanager
def kept_on_disk() -> Iterator[bool]:
    """numba reads its cache folder when a function is decorated; NUMBA_CACHE_DIR, if set, stands."""
    before = numba.config.CACHE_DIR
    folder = before or _folder()
    try:
        numba.config.CACHE_DIR = str(folder or "")
        yield folder is not None
    finally:
        numba.config.CACHE_DIR = before


def compiled(kernel: Kernel) -> Kernel:
    """Compile a kernel, whose arguments are annotated int (int64) or float (fp32), and which returns nothing. It runs
    without the GIL."""
    arguments = [
        types.int64 if kind == "int" else types.float32 for kind in kernel.__annotations__.values() if kind != "None"
    ]
    with kept_on_disk() as kept:
        return numba.njit(types.void(*arguments), cache=kept, nogil=True, error_model="numpy")(kernel)  # type: ignore[no-any-return]


def shared(signature: Any) -> Callable[[Any], Any]:
    """Compile a function for kernels to call by its `address`."""
    with kept_on_disk() as kept:
        return numba.cfunc(signature, cache=kept, error_model="numpy", nopython=True)  # type: ignore[no-any-return]


inlined = numba.njit(
    forceinline=True, error_model="numpy"
)  # what kernels are written with; numbers or vectors in and out


def compile_kernels() -> None:
    """Import, and so compile, every CPU kernel: seconds the first time on a machine, else a few hundredths each."""
    folder = _folder()
    if folder is None or not any(folder.rglob("*.nbi")):
        print("compiling kernels for this CPU, once", file=sys.stderr, flush=True)
    for path in sorted(_HERE.glob("_cpu_*.py")):
        importlib.import_module(f"deltagram.kernels.{path.stem}")
