"""`deltagram bench step` on a CPU, its refusals, and its picture."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from deltagram import LLM
from deltagram.step_bench import Launch, draw, launches_of, step
from deltagram.testing.step_harness import Mix, StepHarness

BENCH = [sys.executable, "-c", "from deltagram.cli import main; main()", "bench", "step"]


def test_a_mixed_step_of_the_shipped_model(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    options = ["--device", "cpu", "--batch", "2", "--chunk", "70", "--steps", "4", "--json", str(file)]
    done = subprocess.run([*BENCH, *options], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures == json.loads(file.read_text())
    assert figures["step"] == "2 decode, chunk of 70" and figures["bucket"] == "72x3m"
    assert figures["acceptance"] == 1 and not figures["run_ahead"], "nothing runs beside the layers on a CPU"
    assert 0 < figures["host_us"] <= figures["wall_us"] * 1.5 and figures["tokens_per_s"] > 0


def test_a_verify_step_brings_what_is_asked_and_leaves_it_pending() -> None:
    """With a step in flight while the next is planned. What one accepts is pending in the next."""
    model = LLM(device="cpu", eager=True, max_num_sequences=1).engine.model
    harness = StepHarness(model, torch.device("cpu"), 3, 70, 18, 5, more=400, acceptance=3.5)
    mix = Mix(decode=1, verify=2, num_draft=5)
    requests, flying, brought = harness.begin(mix), None, []
    runner = harness.runner
    for _ in range(30):
        launched = runner.launch(harness.plan(mix, requests))
        if flying is not None:
            harness.retire(flying)
        flying = launched
        brought.append(runner.buffers.tokens[: len(requests), 0].tolist())
        untaken = runner.history.untaken[[request.slot for request in requests]]
        assert untaken.tolist() == [count - 1 for count in brought[-1]]
    assert flying is not None
    harness.retire(flying)
    assert all(one == 1 and {first, second} <= {3, 4} for one, first, second in brought)
    verified = [count for _, *counts in brought for count in counts]
    assert 3.2 < sum(verified) / len(verified) < 3.8
    for request, counts in zip(requests, zip(*brought, strict=True), strict=True):
        assert request.computed == 70 + sum(counts) == int(runner.history.lengths[request.slot]) - 1


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    for options, reason in (
        ({"batch": 0}, "a step needs a batch or a chunk"),
        ({"verify": 2, "acceptance": 4.0}, "from 1 to 1 \\+ verify = 3, got 4"),
        ({"timeline": Path("step.svg")}, "a timeline is of a captured step"),
        ({"verify": 9}, "verify must be from 0 to 5, got 9"),
        ({"output": tmp_path / "no" / "x.json"}, "x.json cannot be written"),
        ({"placement": "attic"}, "ngram_placement is 'attic'"),
        ({"context": 2000}, "at most the model's 2048 positions, got 2000 \\+ 54"),
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


def test_a_timeline_is_that_of_the_second_replay_the_busiest_stream_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what a profiler tells of two replays, in any order, beside what the host did."""
    on_device, on_host = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    one_replay = [("ahead", 9, 1, 4), ("layer", 7, 0, 5), ("layer", 7, 5, 9)]
    made = [(name, stream, at + begin, at + end) for at in (200, 100) for name, stream, begin, end in one_replay]
    events: list[Any] = [
        SimpleNamespace(
            name=name, thread=stream, time_range=SimpleNamespace(start=begin, end=end), device_type=on_device
        )
        for name, stream, begin, end in made
    ]
    events.append(SimpleNamespace(name="launch", device_type=on_host))
    calls: list[str] = []

    class Profile:
        def __enter__(self) -> "Profile":
            calls.append("profile")
            return self

        def __exit__(self, *_: object) -> None:
            calls.append("end")

        def events(self) -> list[Any]:
            return events

    monkeypatch.setattr(torch.profiler, "profile", lambda activities: Profile())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    graph = SimpleNamespace(replay=lambda: calls.append("replay"))
    runner = SimpleNamespace(
        graphs=SimpleNamespace(graphs={"a bucket": graph}), launch=calls.append, retire=lambda launched: None
    )
    harness: Any = SimpleNamespace(
        runner=runner, begin=lambda mix: [], plan=lambda mix, requests: "launch", bucket=lambda mix: "a bucket"
    )
    launches = launches_of(harness, Mix(1))
    assert calls == ["launch", "profile", "replay", "replay", "wait", "end"], "the first step of all is not drawn"
    assert launches == [Launch("layer", 0, 0, 5), Launch("ahead", 1, 1, 4), Launch("layer", 0, 5, 9)]
