"""Every kernel compiles for the GPUs it is meant for. Needs Triton, but no GPU."""

import importlib
import importlib.util
import pkgutil

import pytest

import deltagram.kernels
from deltagram.kernels._triton import compile_ahead

OPS = [
    op.name
    for op in pkgutil.iter_modules(deltagram.kernels.__path__)
    if hasattr(importlib.import_module(f"deltagram.kernels.{op.name}"), "ahead_of_time")
]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton (no GPU)")
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("op", OPS)
def test_kernels_compile(op: str, capability: int) -> None:
    builds = importlib.import_module(f"deltagram.kernels.{op}").ahead_of_time()
    assert builds
    for build in builds:
        if build.only in (None, capability):
            assert compile_ahead(build, capability).asm["cubin"]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton (no GPU)")
def test_descriptors_of_chunk_products_stay_in_uniform_registers() -> None:
    """Tiles whose loop moves them back from vector registers (10 to 39 times) have read outside shared memory, built by
    ptxas 12.8; see docs/gated-delta.md. This is the build for published models."""
    from deltagram.kernels import gated_delta_chunk

    build = next(b for b in gated_delta_chunk.ahead_of_time() if b.kernel is gated_delta_chunk._walk_kernel)
    code = compile_ahead(build, 90).asm["sass"].splitlines()
    products = [i for i, line in enumerate(code) if "HGMMA" in line]
    assert products
    assert sum("R2UR" in line for line in code[products[0] : products[-1]]) <= 4
