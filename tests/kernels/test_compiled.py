"""How CPU kernels are compiled: when, once, and where they are kept."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from deltagram.testing.checkpoints import write_tiny_checkpoint

AFTER_READY = """
import sys
from deltagram import LLM, SamplingParams
assert "numba" not in sys.modules, "importing deltagram imports numba"
llm = LLM(sys.argv[1], device="cpu", dtype="float32", max_context=256)
from numba.core import event
compiled = []
event.register("numba:compile", type("Listener", (event.Listener,), {
    "on_start": lambda self, e: compiled.append(e), "on_end": lambda self, e: None})())
for params in (SamplingParams(max_tokens=4), SamplingParams(max_tokens=4, top_p=0.5, logprobs=2)):
    llm.generate([[1], list(range(2, 70)), [3, 4]], params)
llm.prompt_logits(list(range(1, 130)))
assert not compiled, compiled
"""


@pytest.mark.parametrize("family", ["qwen3_5", "qwen4_exp"])
def test_nothing_compiles_once_a_model_is_ready(tmp_path: Path, family: str) -> None:
    write_tiny_checkpoint(tmp_path, family)
    subprocess.run([sys.executable, "-c", AFTER_READY, str(tmp_path)], check=True, timeout=240)


def test_a_home_that_cannot_be_written_does_no_harm(tmp_path: Path) -> None:
    """Kernels are then compiled for the process alone."""
    (tmp_path / ".cache").write_text("not a folder")
    call = "rms_norm(torch.ones(1, 4), torch.ones(4), 0, 'compiled')"
    code = f"import torch; from deltagram.kernels.rms_norm import rms_norm; {call}"
    environment = dict(os.environ, HOME=str(tmp_path))
    environment.pop("NUMBA_CACHE_DIR", None)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240, env=environment)
    assert stat.S_ISREG((tmp_path / ".cache").stat().st_mode)
