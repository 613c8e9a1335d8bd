"""What of captured steps can be told without a GPU: stale reports, the bound on graphs' memory, named ranges."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deltagram import LLM, SamplingParams
from deltagram.engine.runner import Runner
from deltagram.graphs import capture
from deltagram.graphs.buffers import StepBuffers
from deltagram.graphs.capture import StepGraphs
from deltagram.step.buckets import Ladder
from deltagram.testing.checkpoints import write_tiny_checkpoint


def test_a_report_of_another_step_is_refused() -> None:
    buffers = StepBuffers(4, 2, 0, 0, torch.device("cpu"))
    for number in (1, 2):
        buffers.fill(np.zeros(4, np.int32))
        buffers.steps += 1
        buffers.tokens[0] = torch.tensor([1, 40 + number])
        assert buffers.report().tokens() == [[40 + number], []]
    buffers.fill(np.zeros(4, np.int32))  # and nobody runs it
    with pytest.raises(RuntimeError, match="the report of step 3 says it is step 2's: a buffer is stale"):
        buffers.report().tokens()
    buffers.start_over()
    assert buffers.report().tokens() == [[42], []]


def test_graphs_take_no_more_memory_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a device that has 10 bytes less after each capture."""
    left, told = [1000], []

    class Recorded:
        def __init__(self, pool: object) -> None: ...

        def record(self, run: Callable[[], None]) -> None:
            run()
            left[0] -= 10

    for name, value in (("graph_pool_handle", tuple), ("synchronize", lambda _: None)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (left[0], 1000))
    monkeypatch.setattr(capture, "Piecewise", Recorded)
    buckets, runs = Ladder((1, 2), (64,), 2).buckets, []
    fits = StepGraphs(runs.append, lambda _: None, torch.device("cpu"))
    fits.capture(buckets, 10 * len(buckets), lambda *progress: told.append(progress))
    assert fits.bytes == 10 * len(buckets) and list(fits.graphs) == list(buckets) and len(runs) == 2 * len(buckets)
    assert told == [(n, len(buckets)) for n in range(len(buckets) + 1)]
    tight = StepGraphs(runs.append, lambda _: None, torch.device("cpu"))
    asked = rf"the graphs of 2 of {len(buckets)} step sizes take 20 bytes of device memory, graph_bytes is 19: allow"
    with pytest.raises(ValueError, match=asked):
        tight.capture(buckets, 19, lambda *progress: None)


def test_a_step_and_its_parts_are_named_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a profiler shows them: pushed and popped in pairs, also when a part fails."""
    open_ranges: list[str] = []
    seen: list[str] = []

    def push(name: str) -> None:
        open_ranges.append(name)
        seen.append(" > ".join(open_ranges))

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", open_ranges.pop)
    whole = Runner._range
    on_gpu: Any = SimpleNamespace(stream=object())
    monkeypatch.setattr(Runner, "_range", lambda self, name: whole(on_gpu, name))
    llm = LLM(write_tiny_checkpoint(tmp_path, "qwen3_5"), device="cpu", max_num_sequences=1, max_num_tokens=64)
    request = llm.engine.add_request([1, 2, 3], SamplingParams(max_tokens=2, temperature=0), 0)
    llm.engine.step()
    step, *parts = seen
    assert step.startswith("step 0 prefill ") and open_ranges == []
    assert parts == [f"{step} > {part}" for part in ("prepare", "layers", "logits")]
    monkeypatch.setattr(llm.engine.model, "forward", lambda *_: 1 // 0)
    assert [type(delta.error) for delta in llm.engine.step()] == [ZeroDivisionError] and open_ranges == []
    assert seen[-1].endswith(" > layers") and request.finish_reason == "error"
