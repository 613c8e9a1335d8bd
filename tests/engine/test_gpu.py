"""The engine on a GPU against the engine on the CPU: the shipped model, and tiny ones of the families."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deltagram import LLM, SamplingParams
from deltagram.engine.engine import Engine
from deltagram.layers.basic import Factory
from deltagram.llm import shipped_model
from deltagram.models.load import build
from deltagram.testing.checkpoints import TINY_SHAPES, write_tiny_checkpoint

pytestmark = pytest.mark.gpu

PROMPTS = ["It is a truth universally acknowledged, that", "And the LORD spake unto", "x", "The heart " * 60]
NEAR = 1e-3  # two logits closer than this may change places between devices


@pytest.fixture(scope="module")
def cpu() -> LLM:
    return LLM(device="cpu", dtype="float32")


def test_float32_tokens_are_those_of_the_cpu(cpu: LLM) -> None:
    gpu = LLM(device="cuda", dtype="float32", max_num_tokens=79, poison=True)
    params = SamplingParams(max_tokens=48, temperature=0.0, logprobs=2, ignore_eos=True)
    for ours, theirs in zip(gpu.generate(PROMPTS, params), cpu.generate(PROMPTS, params), strict=True):
        a, b = ours.outputs[0], theirs.outputs[0]
        assert b.logprobs is not None
        differ = [i for i, pair in enumerate(zip(a.token_ids, b.token_ids, strict=True)) if pair[0] != pair[1]]
        if differ:
            (_, best), (_, second) = b.logprobs[differ[0]].top
            assert best - second < NEAR, f"token {differ[0]} differs, and not in a near tie"
    gpu.engine.scheduler.check_empty()


def test_float32_logits_are_those_of_the_cpu(cpu: LLM) -> None:
    gpu = LLM(device="cuda", dtype="float32", max_num_tokens=128)
    tokens = torch.randint(3, cpu.config.vocab_size, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    ours, theirs = gpu.prompt_logits(tokens), cpu.prompt_logits(tokens)
    assert (ours - theirs).abs().max() < 1e-3 * theirs.abs().max()


def in_float64(plain: LLM) -> LLM:
    """The model of `plain`, an engine on the CPU in bf16, with the same weights, computed in float64."""
    model, settings = plain.engine.model, plain.settings
    wide = build(plain.config, settings.max_context, Factory(settings.device, torch.float64), torch.bfloat16)
    weights, shapes = wide.weights({}), model.weights({})
    for name, weight in shapes.items():
        for ours, theirs in zip(weights[name].parts, weight.parts, strict=True):
            ours.copy_(theirs)
    plain.engine = Engine(wide, dataclasses.replace(settings, dtype=torch.float64, state_dtype=torch.float64))
    return plain


def error(logits: Tensor, exact: Tensor) -> float:
    """Of a token's logits beside their size, on average: one token whose experts are near a tie may count a lot."""
    return float(((logits - exact).norm(dim=1) / exact.norm(dim=1)).mean())


@pytest.mark.parametrize("shape", ["shipped", "qwen4_exp", "qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_bfloat16_logits_are_as_exact_as_plain_ones(tmp_path: Path, shape: str) -> None:
    """As those of PyTorch's own operations in bf16, which a CPU runs; both against float64."""
    folder = shipped_model()
    if shape != "shipped":
        folder = write_tiny_checkpoint(tmp_path / shape, dtype=torch.bfloat16, **TINY_SHAPES[shape])
    plain, gpu = (LLM(folder, device=device, dtype="bfloat16", eager=True) for device in ("cpu", "cuda"))
    tokens = torch.randint(3, plain.config.vocab_size, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    rounded, ours = plain.prompt_logits(tokens), gpu.prompt_logits(tokens)
    exact = in_float64(plain).prompt_logits(tokens)
    assert 1e-3 < error(rounded, exact) < 0.1
    assert error(ours, exact) < 2 * error(rounded, exact)


def test_sampling_on_the_gpu_follows_the_seed() -> None:
    gpu = LLM(device="cuda", dtype="float32")
    params = SamplingParams(max_tokens=32, temperature=0.8, top_p=0.95, seed=5, ignore_eos=True)
    alone = gpu.generate(PROMPTS[0], params)[0].outputs[0].token_ids
    together = gpu.generate(PROMPTS, params)[0].outputs[0].token_ids
    assert alone == together
