"""The part of Triton whose layouts, shared memory and copies are spelled out, for kernels that must decide when a copy
starts. Like _triton.py, it imports without Triton. Triton's interpreter does not run such kernels."""

from __future__ import annotations

from deltagram.kernels._triton import jit

try:
    from triton.experimental.gluon import jit as gluon_jit
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper as warpgroups
    from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
except ImportError:
    gluon_jit, gl, async_copy, mma_v2, warpgroups = jit, None, None, None, None

__all__ = ["async_copy", "gl", "gluon_jit", "mma_v2", "wait_then_launch", "warpgroups"]


@gluon_jit
def wait_then_launch():  # type: ignore[no-untyped-def]
    """See `dependent_launch`. The next kernel is let in once the one before has ended, and not earlier: until then it
    would only take room."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    asm: gl.constexpr = "griddepcontrol.launch_dependents; // $0"
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
