"""What a profiler is told of the chains. That they give the bits of chains run where they are read is for a GPU."""

from contextlib import contextmanager

import torch

from deltagram import LLM, SamplingParams
from deltagram.testing.checkpoints import write_tiny_checkpoint


def test_every_chain_is_a_range_of_its_own(tmp_path, monkeypatch):
    said: list[str] = []

    @contextmanager
    def named(name: str):
        said.append(name)
        yield

    write_tiny_checkpoint(tmp_path)
    llm = LLM(tmp_path, device="cpu")
    run_ahead = llm.engine.model.run_ahead
    monkeypatch.setattr(torch.cuda.nvtx, "range", named)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    run_ahead.device = torch.device("cuda")  # nothing of it runs there: chains are inline
    llm.generate("a", SamplingParams(max_tokens=1))
    assert said == [f"memory chain of layer {layer}" for layer in sorted(run_ahead.order)] and said
