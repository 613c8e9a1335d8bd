"""Chains that run ahead of the layers give the bits of chains run where they are read."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from deltagram import LLM, SamplingParams
from deltagram.engine.engine import Engine
from deltagram.step import segments
from deltagram.step.buckets import Ladder
from deltagram.testing.checkpoints import TINY_SHAPES, write_tiny_checkpoint

pytestmark = pytest.mark.gpu
PLACEMENTS = ["device", "host", "shared", "disk", "cached:64KiB:host"]
SIZES = (1, 2, 3, 6, 16, 48, 63, 64, 65, 96, 128, 200, 384)
K = 5
LADDER = Ladder((1, 2, 3, 6, 8, 12, 16, 24), (8, 16, 32, 48, 64, 72, 96, 128, 200, 256, 400), 4, K)
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, logprobs=5, ignore_eos=True)
# Two tokens in any order: text that prompt lookup finds again, now and then rightly.
NARROW = SamplingParams(max_tokens=24, temperature=1.5, logprobs=5, ignore_eos=True, logit_bias={5: 60.0, 9: 60.0})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "memory", **TINY_SHAPES["qwen4_exp_packed"])


def loaded(folder: Path, placement: str) -> LLM:
    sizes: dict[str, Any] = {"max_num_tokens": 400, "max_num_sequences": 4, "max_context": 512}
    return LLM(folder, device="cuda", dtype="bfloat16", eager=True, ngram_placement=placement, **sizes)


def logprobs(llm: LLM, run_ahead: bool) -> list[list[list[float]]]:
    """By size of the prompt: the likeliest tokens' log-probabilities after each token that three requests sample. One
    of them drafts what its text repeats, and samples it often enough."""
    changes: dict[str, Any] = {"eager": False, "run_ahead": run_ahead, "speculation": "prompt_lookup"}
    settings = dataclasses.replace(llm.settings, num_draft=K, adaptive_drafts=False, **changes)
    engine = Engine(llm.engine.model, settings, buckets=LADDER)
    generator = torch.Generator().manual_seed(0)
    made = []
    for size in SIZES:
        text = torch.randint(3, llm.config.vocab_size, (size,), generator=generator).tolist()
        asked = [(text, GREEDY), (text[: size // 2 + 1], GREEDY), ((text[:9] * size)[:size], NARROW)]
        requests = [engine.add_request(prompt, params, size) for prompt, params in asked]
        entries: dict[int, list[float]] = {request.id: [] for request in requests}
        while engine.has_work:
            for delta in engine.step():
                assert delta.error is None, delta.error
                entries[delta.request.id] += [each for entry in delta.logprobs for _, each in entry.top]
        made.append(list(entries.values()))
    stats = engine.stats
    assert stats.eager_segments == 0 and stats.drafted_tokens > 200 and stats.accepted_tokens > 50
    assert {record["kind"] for record in stats.steps} == {"prefill", "decode", "mixed"}
    engine.scheduler.check_empty()
    return made


def test_ngram_chain_run_ahead_matches_inline(folder: Path) -> None:
    """Bit by bit, in every kind of step: prompts, tokens beside them, tokens alone, and drafts that are verified."""
    expected = None
    for placement in PLACEMENTS:
        llm = loaded(folder, placement)
        for ahead in (False, True):
            made = logprobs(llm, ahead)
            expected = expected or made
            for size, ours, theirs in zip(SIZES, made, expected, strict=True):
                assert ours == theirs, (placement, ahead, size)


def test_chains_are_joined_when_a_layer_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(folder, device="cuda", dtype="bfloat16", max_context=512, eager=True)
    model = llm.engine.model
    assert model.run_ahead is not None
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    expected = llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids

    def fails(*_: object) -> None:
        raise OSError("injected")

    layer = model.memory_layers[-1]
    monkeypatch.setattr(type(layer), "__call__", fails)
    with pytest.raises(RuntimeError, match="injected"):
        llm.generate([[5, 6, 7]], params)
    assert not segments._forks and model.run_ahead._ids is None and not model.run_ahead._made
    monkeypatch.undo()
    assert llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids == expected


def test_a_table_that_no_graph_reads_is_looked_up_between_pieces(folder: Path) -> None:
    """A store without a flag wait: its lookups run eagerly, all else is captured, the tokens are the same."""
    from deltagram.ngram.stores import DeviceStore

    plain = LLM(folder, device="cuda", dtype="bfloat16", max_context=512)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    expected = plain.generate([[5, 6, 7, 8]], params)[0].outputs[0].token_ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceStore, "capturable", False)
        began = time.perf_counter()
        llm = LLM(folder, device="cuda", dtype="bfloat16", max_context=512)
        assert llm.generate([[5, 6, 7, 8]], params)[0].outputs[0].token_ids == expected
    tables = len(llm.engine.model.memory_layers)
    assert llm.stats.eager_segments == tables * llm.stats.num_steps and time.perf_counter() - began < 60
