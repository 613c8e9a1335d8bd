"""The part of Triton whose layouts, shared memory and copies are spelled out, for kernels that must decide when a copy
starts. Like _triton.py, it imports without Triton. Triton's interpreter does not run such kernels."""

from __future__ import annotations

from deltagram.kernels._triton import TRITON_ERROR, jit

try:
    from triton.experimental.gluon import jit as gluon_jit
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper as warpgroups
    from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    GLUON_ERROR = None
except ImportError as error:
    gluon_jit, gl, async_copy, mma_v2, mbarrier, tma, warpgroups = jit, None, None, None, None, None, None
    TensorDescriptor = None
    GLUON_ERROR = error

__all__ = [
    "TensorDescriptor", "async_copy", "check", "gl", "gluon_jit", "mbarrier", "mma_v2", "tma", "wait",
    "wait_then_launch", "warpgroups",
]  # fmt: skip


def check() -> None:
    """Raises RuntimeError where Triton is there without this part."""
    if TRITON_ERROR is None and GLUON_ERROR is not None:
        raise RuntimeError(
            f"this Triton lacks what products on a GPU need ({GLUON_ERROR}): pip install 'deltagram[gpu]'"
        )


@gluon_jit
def wait():  # type: ignore[no-untyped-def]
    """See `dependent_launch`."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon_jit
def launch_dependents():  # type: ignore[no-untyped-def]
    """Let the next kernel in: one program after the other, as they find room."""
    asm: gl.constexpr = "griddepcontrol.launch_dependents; // $0"
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon_jit
def wait_then_launch():  # type: ignore[no-untyped-def]
    """The next kernel is let in once the one before has ended, and not earlier: until then it would only take room."""
    wait()
    launch_dependents()
