"""The engine on a GPU against the engine on the CPU, on the shipped model."""

import pytest
import torch

from deltagram import LLM, SamplingParams

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


def test_bfloat16_logits_are_near_float32(cpu: LLM) -> None:
    gpu = LLM(device="cuda", dtype="bfloat16")
    tokens = torch.randint(3, cpu.config.vocab_size, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    ours, theirs = gpu.prompt_logits(tokens), cpu.prompt_logits(tokens)
    assert (ours - theirs).norm() < 0.05 * theirs.norm()


def test_sampling_on_the_gpu_follows_the_seed() -> None:
    gpu = LLM(device="cuda", dtype="float32")
    params = SamplingParams(max_tokens=32, temperature=0.8, top_p=0.95, seed=5, ignore_eos=True)
    alone = gpu.generate(PROMPTS[0], params)[0].outputs[0].token_ids
    together = gpu.generate(PROMPTS, params)[0].outputs[0].token_ids
    assert alone == together
