"""The part of Triton whose layouts, shared memory and copies are spelled out, for kernels that must decide when a copy
starts. Like _triton.py, it imports without Triton. Triton's interpreter does not run such kernels."""

from __future__ import annotations

from deltagram.kernels._triton import TRITON_ERROR, jit

try:
    from triton.experimental.gluon import jit as gluon_jit
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper as warpgroups
    from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

    GLUON_ERROR = None
except ImportError as error:
    gluon_jit, gl, async_copy, mma_v2, warpgroups = jit, None, None, None, None
    GLUON_ERROR = error

__all__ = ["async_copy", "check", "gl", "gluon_jit", "mma_v2", "wait_then_launch", "warpgroups"]


def check() -> None:
    """Raises RuntimeError where Triton is there without this part."""
    if TRITON_ERROR is None and GLUON_ERROR is not None:
        raise RuntimeError(
            f"this Triton lacks what products on a GPU need ({GLUON_ERROR}): pip install 'deltagram[gpu]'"
        )


@gluon_jit
def wait_then_launch():  # type: ignore[no-untyped-def]
    """See `dependent_launch`. The next kernel is let in once the one before has ended, and not earlier: until then it
    would only take room."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    asm: gl.constexpr = "griddepcontrol.launch_dependents; // $0"
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
