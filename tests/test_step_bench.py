"""`deltagram bench step` on a CPU, its refusals, and its picture."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from deltagram.step_bench import Launch, draw, step

BENCH = [sys.executable, "-c", "from deltagram.cli import main; main()", "bench", "step"]


def test_a_mixed_step_of_the_shipped_model(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    options = ["--device", "cpu", "--batch", "2", "--chunk", "70", "--steps", "4", "--json", str(file)]
    done = subprocess.run([*BENCH, *options], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures == json.loads(file.read_text())
    assert figures["step"] == "2 decode, chunk of 70" and figures["bucket"] == "72x3m"
    assert 0 < figures["host_us"] <= figures["wall_us"] * 1.5 and figures["tokens_per_s"] > 0


def test_what_cannot_be_measured_is_refused() -> None:
    for options, reason in (
        ({"batch": 0}, "a step needs a batch or a chunk"),
        ({"verify": 2, "acceptance": 4.0}, "from 1 to 1 \\+ verify = 3, got 4"),
        ({"timeline": Path("step.svg")}, "a timeline is of a captured step"),
        ({"device": "tin", "batch": 0}, "device must be auto.* got 'tin'\na step needs a batch"),
        ({"device": "cuda:99"}, "device 'cuda:99' asked for, this machine has"),
    ):
        given = {"model": "", "batch": 1, "verify": 0, "acceptance": 1.0, "chunk": 0, "device": "cpu"} | options
        with pytest.raises(ValueError, match=reason):
            step(**given)


def test_the_picture_has_a_box_a_launch() -> None:
    launches = [Launch("a<1>(x)", 0, 0, 5), Launch("b", 1, 1, 3), Launch("a<2>(x)", 0, 5, 9)]
    root = ElementTree.fromstring(draw(launches, "x < y"))
    boxes = [node for node in root.iter() if node.tag.endswith("rect")]
    titles = [node.text for node in root.iter() if node.tag.endswith("title")]
    assert len(boxes) == 3 and titles == ["a: 5.0 us at 0.0", "b: 2.0 us at 1.0", "a: 4.0 us at 5.0"]
    assert boxes[0].get("fill") == boxes[2].get("fill") != boxes[1].get("fill")
    assert boxes[0].get("y") == boxes[2].get("y") != boxes[1].get("y")
