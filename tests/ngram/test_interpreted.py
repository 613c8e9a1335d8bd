"""The memory's kernels under Triton's interpreter, and built for GPUs that need not be there."""

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

OPS = ("ngram_hash", "row_lookup", "row_decode", "engram_fuse", "flag_wait", "host_ask", "cache_probe", "cache_keep")
triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton (no GPU)")


@triton
def test_kernels_read_what_they_should():
    script = Path(__file__).parent / "interpreted.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@triton
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("op", OPS)
def test_kernels_compile_for_every_gpu(op, capability):
    """fp8 rows too where the GPU has no fp8 type, as they are read as bytes; and products keep their small numbers."""
    from deltagram.kernels._triton import compile_ahead

    for build in importlib.import_module(f"deltagram.kernels.{op}").ahead_of_time():
        ptx = compile_ahead(build, capability).asm["ptx"]
        assert op == "engram_fuse" or ".ftz" not in ptx
