"""Whoever shares the steps, however they are cut, padded, pushed out or broken off: a request gets what it gets alone.

fp32 on the CPU. A GEMM may round differently with the number of rows, so a token may differ where noise of 1e-4 on the
logits would change it too; such cases are counted, and there must be next to none.
"""

import dataclasses
import random
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltagram import LLM, SamplingParams
from deltagram.engine.engine import Engine
from deltagram.engine.request import FinishReason, Request
from deltagram.step.buckets import ExactBuckets, Ladder
from deltagram.testing.checkpoints import END_OF_TEXT, END_OF_TURN, TINY_SHAPES, write_tiny_checkpoint

NOISE = 1e-4
SCHEDULES = 220
SHAPES = ("qwen4_exp", "qwen4_exp_packed", "qwen4_exp_dense", "qwen3_5", "qwen3_5_moe", "qwen3_next_dense_layers")
CONTEXT = 192
LENGTHS = (1, 2, 3, 5, 31, 56, 58, 60, 62, 63, 64, 65, 120, 122, 124, 126, 127, 128, 130, 170)
VARIANTS = (
    SamplingParams(max_tokens=12, temperature=0),
    SamplingParams(
        max_tokens=10, temperature=0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3, logprobs=2
    ),
    SamplingParams(max_tokens=14, temperature=0.8, seed=11, ignore_eos=True),
    SamplingParams(max_tokens=6, temperature=1.2, top_k=40, top_p=0.9, seed=12, n=2, logprobs=0),
    SamplingParams(
        max_tokens=12,
        min_tokens=3,
        temperature=0.9,
        min_p=0.02,
        frequency_penalty=-0.5,
        seed=13,
        stop_token_ids=tuple(range(40)),
        stop=("e", "xy"),
    ),
)


def prompt_of(length: int, seed: int) -> tuple[int, ...]:
    """Random bytes, and ends of text, which n-grams do not cross."""
    source = random.Random(1000 * length + seed)
    return tuple(
        source.choice((END_OF_TEXT, END_OF_TURN)) if source.random() < 0.05 else source.randrange(256)
        for _ in range(length)
    )


@dataclasses.dataclass(frozen=True)
class Result:
    tokens: tuple[int, ...]
    text: str
    reason: FinishReason | None


class Bench:
    """A model to run schedules on, and the same model again to run requests alone."""

    def __init__(self, folder: Path) -> None:
        options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_context": CONTEXT, "poison": True}
        self.shared, self.single = (LLM(folder, **options, max_num_sequences=1, max_num_tokens=256) for _ in range(2))
        self.alone = cache(self._alone)

    def engine(self, slots: int, max_num_tokens: int, num_pages: int, padded: bool, ahead: bool) -> Engine:
        sizes = {"max_num_sequences": slots, "max_num_tokens": max_num_tokens}
        ladder = Ladder((1, 3, 4), (1, 3, 16, 64, 96, 256), 4)
        return Engine(
            self.shared.engine.model,
            dataclasses.replace(self.shared.settings, **sizes),
            self.shared.tokenizer,
            num_pages=num_pages,
            buckets=ladder if padded else ExactBuckets(),
            ahead=ahead,
        )

    def _alone(self, length: int, seed: int, variant: int, sequence: int) -> Result:
        params = VARIANTS[variant]
        return self.run_alone(prompt_of(length, seed), params, params.seeds()[sequence])

    def run_alone(self, prompt: tuple[int, ...], params: SamplingParams, seed: int) -> Result:
        engine = self.single.engine
        engine.add_request(prompt, params, seed)
        results = Results()
        while engine.has_work:
            results.take(engine.step())
        (result,) = results.values()
        return result

    def is_close(self, request: Request, at: int, tokens: tuple[int, ...]) -> bool:
        """Whether noise on the logits gives a request, alone, the token that it got in company."""
        source = random.Random(at)
        for _ in range(50):
            noise = {token: source.uniform(-NOISE, NOISE) for token in range(264)}
            noisy = self.run_alone(
                request.prompt, dataclasses.replace(request.params, logit_bias=noise, n=1), request.seed
            )
            if noisy.tokens[: at + 1] == tokens[: at + 1]:
                return True
        return False


class Results(dict[int, Result]):
    """What each request, by id, got so far."""

    def take(self, deltas: list[Any]) -> None:
        for delta in deltas:
            assert delta.error is None
            before = self.get(delta.request.id, Result((), "", None))
            assert before.reason is None, "nothing comes after the end"
            params = delta.request.params
            assert [entry.token_id for entry in delta.logprobs] == (
                [] if params.logprobs is None else list(delta.token_ids)
            )
            self[delta.request.id] = Result(
                before.tokens + delta.token_ids, before.text + delta.text, delta.finish_reason
            )


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bench]:
    folder = tmp_path_factory.mktemp("tiny")
    return {shape: Bench(write_tiny_checkpoint(folder / shape, **TINY_SHAPES[shape])) for shape in SHAPES}


@dataclasses.dataclass(frozen=True)
class Schedule:
    shape: str
    requests: list[tuple[int, int, int, int]]  # prompt length and seed, variant, step it arrives before
    slots: int
    spare_tokens: int
    spare_pages: int
    padded: bool
    ahead: bool  # a step is planned while another runs
    events: list[tuple[int, str, int]]  # step it comes before, what, whom


schedules = st.builds(
    Schedule,
    shape=st.sampled_from(SHAPES),
    requests=st.lists(
        st.tuples(st.sampled_from(LENGTHS), st.integers(0, 1), st.integers(0, len(VARIANTS) - 1), st.integers(0, 12)),
        min_size=2,
        max_size=6,
    ),
    slots=st.sampled_from((1, 2, 3, 4, 4)),
    spare_tokens=st.sampled_from((0, 1, 40, 100)),
    spare_pages=st.sampled_from((0, 0, 1, 1, 2, 3)),
    padded=st.booleans(),
    ahead=st.booleans(),
    events=st.lists(
        st.tuples(st.integers(1, 24), st.sampled_from(("preempt", "preempt", "abort", "break off")), st.integers(0, 9)),
        max_size=4,
    ),
)


def run(schedule: Schedule, bench: Bench, seen: Counter[str]) -> None:
    wanted: dict[int, tuple[Request, Result]] = {}
    pages = max(-(-(length + VARIANTS[variant].max_tokens) // 64) for length, _, variant, _ in schedule.requests)
    max_num_tokens = 63 + schedule.slots + schedule.spare_tokens
    engine = bench.engine(schedule.slots, max_num_tokens, pages + schedule.spare_pages, schedule.padded, schedule.ahead)
    scheduler, results, step = engine.scheduler, Results(), 0
    while engine.has_work or any(arrival >= step for *_, arrival in schedule.requests):
        for length, seed, variant, arrival in schedule.requests:
            if arrival == step:
                params = VARIANTS[variant]
                for sequence, sequence_seed in enumerate(params.seeds()):
                    request = engine.add_request(prompt_of(length, seed), params, sequence_seed)
                    wanted[request.id] = request, bench.alone(length, seed, variant, sequence)
        for when, event, whom in schedule.events:
            if when != step:
                continue
            results.take(engine.drain())
            if event == "preempt" and scheduler.running:
                scheduler.preempt(scheduler.running[whom % len(scheduler.running)])
            elif event == "abort" and wanted:
                engine.abort(wanted[whom % len(wanted)][0])
            elif event == "break off" and (scheduled := scheduler.schedule()) is not None:
                engine.runner.launch(scheduled)  # an interrupt right after
                engine.start_over()
            seen[event] += 1
        before = scheduler.num_preemptions
        results.take(engine.step())
        seen["pushed out"] += scheduler.num_preemptions - before
        step += 1
        assert step < 2000, "no end"
    scheduler.check_empty()
    seen["mixed"] += sum(record["kind"] == "mixed" for record in engine.stats.steps)
    seen["padding"] += engine.stats.padding_tokens
    for number, (request, alone) in wanted.items():
        got = results.get(number, Result((), "", None))
        seen["tokens"] += len(got.tokens)
        if request.finish_reason is FinishReason.ABORT:
            assert got.reason is None
            alone = Result(alone.tokens[: len(got.tokens)], alone.text[: len(got.text)], None)
            seen["aborted"] += 1
        if got != alone:
            differs = (
                at for at, (one, other) in enumerate(zip(got.tokens, alone.tokens, strict=False)) if one != other
            )
            at = next(differs, None)
            assert at is not None and bench.is_close(request, at, got.tokens), f"{request}\n got {got}\nalone {alone}"
            seen["close"] += 1


def test_any_interleaving_equals_each_request_alone(benches: dict[str, Bench]) -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=SCHEDULES, deadline=None, derandomize=True)
    @given(schedules)
    def check(schedule: Schedule) -> None:
        seen["schedules"] += 1
        run(schedule, benches[schedule.shape], seen)

    check()
    assert seen["close"] <= 1
    assert seen["schedules"] >= 200 and seen["tokens"] > 5000
    least = {"preempt": 50, "pushed out": 40, "mixed": 200, "padding": 1000, "aborted": 20, "break off": 20}
    assert all(seen[name] >= count for name, count in least.items()), dict(seen)
