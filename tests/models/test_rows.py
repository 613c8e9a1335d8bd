"""A step whose last layer runs the sampled tokens alone gives them what one that runs every token does."""

from pathlib import Path

import pytest
import torch

from deltagram import LLM, SamplingParams
from deltagram.testing.checkpoints import write_tiny_checkpoint


@pytest.mark.parametrize("budget", [32, 4096])
@pytest.mark.parametrize("length", [1, 17, 64, 100, 130])
def test_sampled_tokens_alone(tmp_path: Path, length: int, budget: int) -> None:
    folder = write_tiny_checkpoint(tmp_path, "qwen4_exp", indexer_budget=budget)
    llm = LLM(
        folder, device="cpu", dtype="float32", max_context=256, max_num_sequences=2, max_num_tokens=66, poison=True
    )
    prompt = torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    every = llm.prompt_logits(prompt)[-1].log_softmax(0)
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=5, ignore_eos=True)
    (entry,) = llm.generate([prompt, prompt[:9]], params)[0].outputs[0].logprobs or ()
    assert len(entry.top) == 5
    for token, logprob in entry.top:
        assert logprob == pytest.approx(float(every[token]), abs=1e-5)
