"""Every kernel compiles for the GPUs it is meant for. Needs Triton, but no GPU."""

import importlib
import importlib.util
import pkgutil
import re

import pytest

import deltagram.kernels
from deltagram.kernels._triton import Build, compile_ahead

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


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton (no GPU)")
@pytest.mark.parametrize("size", [2560, 1024, 40])
def test_a_norm_of_sums_of_parts_adds_up_as_the_norm_alone(size: int) -> None:
    """The same layout of a row's squares is the same order of their sum: bits that tests on a GPU see equal."""
    from deltagram.kernels import _norm, _parts

    tile, warps = _norm.tile_of(size)
    types = {"x": "*bf16", "out": "*bf16", "weight": "*fp32", "eps": "fp32"}
    types |= dict.fromkeys(("rows", "x_stride", "group_stride"), "i32")
    alone = Build(_norm._kernel, types, {"GROUPS": 1, "SIZE": size, **tile}, {"num_warps": warps})
    fused = next(b for b in _parts.parts_builds() if b.constants["SIZE"] == size and "scale" not in b.constants)
    assert sum_layout(compile_ahead(fused, 90).asm["ttgir"]) == sum_layout(compile_ahead(alone, 90).asm["ttgir"])


def sum_layout(code: str) -> str:
    """The definition of the layout of what the one reduction takes."""
    (operand,) = re.findall(r"\}\) : \(tensor<[^>]*(#\w+)>", code)
    (layout,) = re.findall(rf"^{operand} = (.*)$", code, re.MULTILINE)
    return str(layout)
