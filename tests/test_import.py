"""What importing costs and needs."""

import json
import subprocess
import sys

import pytest

import deltagram


def run(code: str) -> dict[str, object]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return dict(json.loads(done.stdout))


def test_importing_the_package_is_quick_and_brings_nothing_heavy() -> None:
    got = run(
        "import json, sys, time; before = set(sys.modules); t = time.process_time(); import deltagram\n"
        "t = time.process_time() - t; new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(json.dumps({'seconds': t, 'new': sorted(new)}))"
    )
    assert isinstance(got["seconds"], float) and got["seconds"] < 0.5
    assert not {"torch", "triton", "numpy", "tokenizers", "transformers", "jinja2"} & set(got["new"])  # type: ignore[call-overload]


def test_the_front_door_adds_little_to_torch_and_needs_no_triton() -> None:
    """Its own time: what the things it stands on take to import is theirs."""
    got = run(
        "import json, sys, time; sys.modules['triton'] = None\n"
        "import torch, torch._inductor, numpy, tokenizers, jinja2.sandbox, huggingface_hub.utils, safetensors.torch\n"
        "t = time.process_time(); from deltagram import LLM, SamplingParams; t = time.process_time() - t\n"
        "print(json.dumps({'seconds': t, 'names': [LLM.__name__, SamplingParams.__name__],\n"
        "                  'transformers': 'transformers' in sys.modules}))"
    )
    assert isinstance(got["seconds"], float) and got["seconds"] < 0.5
    assert got["names"] == ["LLM", "SamplingParams"] and got["transformers"] is False


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'deltagram' has no attribute 'Model'"):
        _ = deltagram.Model
