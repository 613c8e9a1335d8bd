"""Requests with 128k tokens behind them, alone and eight together, on a GPU and on the CPU.

The CPU computes the steps that the GPU has computed, in the same batch: all of them for a request alone; for eight,
whose prompts would take it a minute, from the step that ends the last prompt on, with what the GPU keeps until then.
Compared are the log-probabilities after 128k tokens, and all that the steps leave behind.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from deltagram import LLM, SamplingParams
from deltagram.engine import runner
from deltagram.engine.engine import Engine
from deltagram.engine.runner import Launched, Runner
from deltagram.engine.scheduler import Scheduled
from deltagram.gdn.state import STORED_EVERY
from deltagram.step.buckets import ExactBuckets, Ladder
from deltagram.step.plan import StepPlan
from deltagram.testing.alone import text_of
from deltagram.testing.checkpoints import write_tiny_checkpoint

pytestmark = pytest.mark.gpu
TOKENS, CHUNK, DECODED, MOST = 131072, 8192, 16, 8
CONTEXT = TOKENS + 512
# The indexer looks at 16 of 8,200 blocks; there are memory, residual streams and experts too.
SHAPE: dict[str, Any] = {"indexer_compress_ratio": 16, "indexer_budget": 256, "max_position_embeddings": CONTEXT}
GREEDY = SamplingParams(temperature=0.0, max_tokens=300, logprobs=8, ignore_eos=True)
NEAR = 1e-3


class Pair:
    """A model on a GPU, whose steps are captured, and on a CPU."""

    def __init__(self, gpu: LLM, cpu: LLM) -> None:
        ladder = Ladder((1, MOST), (CHUNK // 4, CHUNK), MOST)
        settings = dataclasses.replace(gpu.settings, eager=False)
        self.engine = Engine(gpu.engine.model, settings, buckets=ladder, ahead=False)
        self.plans: list[StepPlan] = []
        launch, self.here = self.engine.runner.launch, cpu.engine.runner

        def watched(scheduled: Scheduled) -> Launched:
            self.plans.append(scheduled.plan)
            return launch(scheduled)

        self.engine.runner.launch = watched  # type: ignore[method-assign]

    def both(self, texts_alone: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """What steps go on from: here, and there."""
        kept = _texts if texts_alone else _kept
        yield from zip(kept(self.here), kept(self.engine.runner), strict=True)

    @torch.inference_mode()
    def follow(self, tokens: list[int]) -> Tensor:
        """The last step, on the CPU: fp32 [L, vocab], the log-probabilities after its tokens that are sampled after.
        What was sampled is `tokens`."""
        plan = self.plans[-1]
        bucket = ExactBuckets().fit(plan.num_tokens, len(plan.entries), plan.name != "decode", plan.num_samples)
        self.here._fill(dataclasses.replace(plan, bucket=bucket))
        table, logits, _ = self.here._forward(bucket)
        self.here._write(table, torch.tensor(tokens, dtype=torch.int64))
        return logits.log_softmax(-1)


def _texts(of: Runner) -> list[Tensor]:
    return [of.history.tokens, of.history.lengths, of.history.untaken, of.page_table]


def _kept(of: Runner) -> list[Tensor]:
    return [*of._pools, *of._rings, *of._page_pools, *_texts(of)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "long", "qwen4_exp", **SHAPE)
    sizes: dict[str, Any] = {"max_num_sequences": MOST, "max_num_tokens": CHUNK, "dtype": "float32"}
    with pytest.MonkeyPatch.context() as patch:  # the CPU too, or their states would be of different tokens
        patch.setattr(runner, "stored_every", lambda device: STORED_EVERY)
        return Pair(LLM(folder, device="cuda", eager=True, **sizes), LLM(folder, device="cpu", **sizes))


@pytest.mark.parametrize("count", [1, MOST])
def test_tokens_after_128k_tokens_are_those_of_the_cpu(pair: Pair, count: int) -> None:
    engine = pair.engine
    requests = [engine.add_request(text_of(TOKENS + 9 * n, count + n), GREEDY, 0) for n in range(count)]
    first, last = requests[0], requests[-1]
    while last.slot < 0 or last.prefill_target - last.computed > CHUNK - (count - 1):
        begins = first.computed == 0
        assert not [delta for delta in engine.step() if delta.error is not None]
        if count == 1:
            for ours, theirs in pair.both(texts_alone=True) if begins else ():
                ours.copy_(theirs)
            pair.follow([])
    for ours, theirs in pair.both() if count > 1 else ():
        ours.copy_(theirs)
    for step in range(1 + DECODED):
        deltas = engine.step()
        assert [delta.request for delta in deltas] == requests and not any(delta.error for delta in deltas)
        assert (pair.plans[-1].name == "decode") == (step > 0) and last.computed >= TOKENS
        expected = pair.follow([token for delta in deltas for token in delta.token_ids])
        for delta, logprobs in zip(deltas, expected, strict=True):
            (entry,) = delta.logprobs
            tokens, there = zip(*entry.top, strict=True)
            assert (logprobs[list(tokens)] - torch.tensor(there)).abs().max() < NEAR, (step, delta.request.id)
            assert logprobs[entry.token_id] > logprobs.max() - NEAR
    for ours, theirs in pair.both():
        if ours.is_floating_point():  # of 128k tokens one may be near a tie of two experts, and go another way
            far = (ours - theirs.cpu()).abs() > NEAR * ours.abs().max()
            assert far.double().mean() < 1e-3 and theirs.isfinite().all()
        else:
            assert torch.equal(ours, theirs.cpu())
    for request in requests:
        engine.abort(request)
    engine.scheduler.check_empty()
