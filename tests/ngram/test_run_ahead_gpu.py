"""Chains that run ahead of the layers give the bits of chains run where they are read."""

import itertools
import time
from pathlib import Path

import pytest
import torch

from deltagram import LLM, SamplingParams
from deltagram.step import segments
from deltagram.testing.checkpoints import TINY_SHAPES, write_tiny_checkpoint

pytestmark = pytest.mark.gpu
PLACEMENTS = ["device", "host", "shared", "disk", "cached:64KiB:host"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "memory", **TINY_SHAPES["qwen4_exp_packed"])


def logits(folder: Path, placement: str, run_ahead: bool, sizes: list[int]) -> list[torch.Tensor]:
    settings = {"ngram_placement": placement, "run_ahead": run_ahead, "max_num_tokens": 400, "max_num_sequences": 4}
    llm = LLM(folder, device="cuda", dtype="bfloat16", max_context=512, **settings)
    generator = torch.Generator().manual_seed(0)
    made = []
    for size in sizes:
        tokens = torch.randint(3, llm.config.vocab_size, (size,), generator=generator).tolist()
        params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=5, ignore_eos=True)
        output = llm.generate([tokens, tokens[: size // 2 + 1]], params)
        entries = [entry for each in output for entry in each.outputs[0].logprobs or ()]
        made.append(torch.tensor([[logprob for _, logprob in entry.top] for entry in entries]))
    assert llm.stats.eager_segments == 0
    llm.engine.scheduler.check_empty()
    return made


def test_ngram_chain_run_ahead_matches_inline(folder: Path) -> None:
    sizes = [1, 2, 6, 48, 96, 384]
    expected = logits(folder, "device", False, sizes)
    for placement, ahead in itertools.product(PLACEMENTS, (True, False)):
        made = logits(folder, placement, ahead, sizes)
        for size, ours, theirs in zip(sizes, made, expected, strict=True):
            assert torch.equal(ours, theirs), (placement, ahead, size)


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
