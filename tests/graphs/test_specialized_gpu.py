"""Steps of few rows take kernels of their own: against the same model with the library's products, and under load."""

from collections.abc import Iterator

import pytest
import torch

from deltagram import LLM
from deltagram.kernels import _few_rows
from deltagram.testing.step_harness import Mix, StepHarness

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def model() -> Iterator[object]:
    yield LLM(device="cuda", dtype="bfloat16", eager=True, max_num_sequences=1, max_num_tokens=64).engine.model


def logits(harness: StepHarness, mix: Mix) -> torch.Tensor:
    """Of a step on empty pools, uncaptured."""
    runner = harness.runner
    for pool in (*runner._pools, *runner._rings, *runner._page_pools):
        pool.zero_()
    plan = harness.plan(mix, harness.begin(mix)).plan
    with torch.inference_mode(), torch.cuda.stream(runner.stream):
        runner._fill(plan)
        made = runner._forward(plan.bucket)[1]
        runner.buffers.start_over()
    torch.cuda.synchronize()
    return made[: mix.num_tokens].float()


def test_specialized_decode_matches_the_model(model: object, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = StepHarness(model, CUDA, 32, 60, 192, max_draft=5, eager=True, more=64)  # type: ignore[arg-type]
    mixes = [Mix(decode=count) for count in range(1, 33)]
    mixes += [Mix(verify=count, num_draft=drafts) for drafts in range(1, 6) for count in (1, 2, 5, 12, 32)]
    for mix in mixes:
        special = logits(harness, mix)
        with monkeypatch.context() as patch:
            patch.setattr(_few_rows, "FEW_ROWS", 0)
            plain = logits(harness, mix)
        assert special.isfinite().all()
        assert (special - plain).norm() < 0.03 * plain.norm(), mix
        if mix.num_tokens > _few_rows.FEW_ROWS:
            assert torch.equal(special, plain), f"{mix}: both take the library's products"


def test_twelve_requests_of_six_tokens_run_ten_thousand_steps(model: object) -> None:
    """The published stall: a chain beside the layers, and steps of 72 rows and more. Every step reports."""
    mix = Mix(verify=12, num_draft=5)
    harness = StepHarness(model, CUDA, 12, 60, 80, max_draft=5, more=512)  # type: ignore[arg-type]
    harness.capture([harness.bucket(mix)])
    runner = harness.runner
    assert runner.graphs is not None
    requests = harness.begin(mix)
    runner.retire(runner.launch(harness.plan(mix, requests)))
    before = int(runner.buffers.steps)
    with torch.cuda.stream(runner.stream):
        for step in range(10_000):
            if step % 50 == 0:
                runner.history.lengths[:12].fill_(61)  # or they would outgrow the context
            runner.graphs.replay(harness.bucket(mix))
        done = runner.stream.record_event()  # type: ignore[union-attr]
    done.synchronize()
    assert int(runner.buffers.steps) - before == 10_000
