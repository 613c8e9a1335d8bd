"""Steps of few rows take kernels of their own: against the same captured model without them, and under load."""

from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from deltagram import LLM
from deltagram.kernels import _few_rows, _gates, _parts, _some_rows, hyper_mix
from deltagram.kernels.moe import triton as experts
from deltagram.models.base import Model
from deltagram.step.plan import Bucket
from deltagram.testing.step_harness import Mix, StepHarness

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
GATES = (
    (_few_rows, "FEW_ROWS"),
    (_some_rows, "SOME_ROWS"),
    (_parts, "ROWS_IN_PARTS"),
    (hyper_mix, "FEW_HYPER_ROWS"),
    (experts, "FEW_EXPERT_ROWS"),
)
MOST, DRAFTS = 32, 5


def load(device: str) -> Model:
    dtype = "bfloat16" if device == "cuda" else "float32"  # the weights are bf16: on a CPU next to nothing is rounded
    return LLM(device=device, dtype=dtype, eager=True, max_num_sequences=1, max_num_tokens=64).engine.model


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    yield load("cuda")


class Logits:
    """Steps on empty pools, captured on a GPU, and their logits."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self.harness = StepHarness(model, device, MOST, 60, MOST * (1 + DRAFTS), DRAFTS, more=64)
        self.kept: dict[Bucket, Tensor] = {}
        runner = self.harness.runner
        forward = runner._forward

        def keeping(bucket: Bucket, requests: tuple = ()) -> tuple:  # type: ignore[type-arg]
            made = forward(bucket, requests)
            self.kept[bucket] = made[1]  # of a captured step: where each replay leaves them
            return made

        runner._forward = keeping  # type: ignore[method-assign]
        if device.type == "cuda":
            self.harness.capture([bucket for bucket in self.harness.ladder.buckets if not bucket.mixed])

    def __call__(self, mix: Mix) -> Tensor:
        """fp32 [tokens, vocab], on the CPU."""
        runner = self.harness.runner
        with torch.cuda.stream(runner.stream):
            for pool in (*runner._pools, *runner._rings, *runner._page_pools):
                pool.zero_()
        self.harness.retire(runner.launch(self.harness.plan(mix, self.harness.begin(mix))))
        return self.kept[self.harness.bucket(mix)][: mix.num_tokens].float().cpu()


def test_specialized_decode_matches_the_model(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 to 32 requests, of each verify length: bit by bit the captured model without such kernels where a step is too
    large for any; else, of tokens of a kind on average, at most twice as far from the exact logits."""
    special, exact = Logits(model, CUDA), Logits(load("cpu"), torch.device("cpu"))
    with monkeypatch.context() as patch:
        for where, name in GATES:
            patch.setattr(where, name, 0)
        plain = Logits(model, CUDA)
    few = max(_gates.SOME_ROWS, _gates.ROWS_IN_PARTS, _gates.FEW_HYPER_ROWS)
    few = max(few, _gates.FEW_EXPERT_ROWS * 8 // 2)  # a token takes two of eight experts
    errors: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for drafts in range(DRAFTS + 1):
        for count in range(1, MOST + 1):
            mix = Mix(verify=count, num_draft=drafts) if drafts else Mix(decode=count)
            ours, theirs = special(mix), plain(mix)
            assert ours.isfinite().all()
            if special.harness.bucket(mix).tokens > few:
                assert torch.equal(ours, theirs), mix
            else:
                wanted = exact(mix)
                far = [(made - wanted).norm(dim=1) / wanted.norm(dim=1) for made in (ours, theirs)]
                assert far[0].max() < 0.2, mix  # between unrelated logits it is 1 and more
                errors[drafts] += zip(*(each.tolist() for each in far), strict=True)
    for drafts, pairs in errors.items():
        mine, others = (sum(each) / len(pairs) for each in zip(*pairs, strict=True))
        assert mine < 2 * others, (drafts, mine, others)
    assert len(errors) == DRAFTS + 1


def test_twelve_and_more_requests_of_six_tokens_run_ten_thousand_steps(model: Model) -> None:
    """The published stall: a chain beside the layers, and steps of 72 rows and more. Every step reports, and the next
    one is planned and launched meanwhile."""
    mixes = [Mix(verify=count, num_draft=DRAFTS) for count in (12, 13, 16, 24, MOST)]
    harness = StepHarness(model, CUDA, MOST, 60, MOST * (1 + DRAFTS), DRAFTS, acceptance=3.5)
    harness.capture(sorted({harness.bucket(mix) for mix in mixes}, key=lambda bucket: -bucket.tokens))
    before = int(harness.runner.buffers.steps)
    for turn in range(100):
        mix = mixes[turn % len(mixes)]
        requests, flying = harness.begin(mix), None
        for _ in range(100):
            launched = harness.runner.launch(harness.plan(mix, requests))
            if flying is not None:
                harness.retire(flying)
            flying = launched
        assert flying is not None
        harness.retire(flying)
        lengths = harness.runner.history.lengths.tolist()
        assert all(lengths[request.slot] == request.computed + 1 > 60 + 2 * 100 for request in requests)
    assert int(harness.runner.buffers.steps) - before == 10_000
