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
        assert compile_ahead(build, capability).asm["cubin"]
