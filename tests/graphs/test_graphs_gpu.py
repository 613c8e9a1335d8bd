"""Captured steps against the same steps run eagerly; faults on the host at every stage; what a replay must never do."""

import dataclasses
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deltagram import LLM, SamplingParams
from deltagram.engine import runner as runner_module
from deltagram.engine.engine import Engine
from deltagram.engine.request import FinishReason, Request
from deltagram.engine.runner import Runner
from deltagram.engine.scheduler import Scheduler
from deltagram.graphs.capture import StepGraphs
from deltagram.step.history import TokenHistory
from deltagram.testing.checkpoints import TINY_SHAPES, write_tiny_checkpoint

pytestmark = pytest.mark.gpu
SIZES: dict[str, Any] = {"max_num_sequences": 4, "max_num_tokens": 96, "max_context": 256}
PAGES = 4  # as many as one request may need: some are pushed out
DRAFTS: dict[str, Any] = {"speculation": "prompt_lookup", "num_draft": 3, "adaptive_drafts": False}
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.9, max_tokens=12, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=1.3, top_k=7, frequency_penalty=0.4, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=0.0, logit_bias={5: 2.0}, min_tokens=6, max_tokens=9),
    # Two tokens in any order: text that prompt lookup finds again, now and then rightly.
    SamplingParams(temperature=1.5, logit_bias={5: 60.0, 9: 60.0}, max_tokens=24, ignore_eos=True),
]


class Pair:
    """One model, with an engine that replays graphs; others, made when they are asked for, run the same steps."""

    def __init__(self, folder: Path | None) -> None:
        dtype = "bfloat16" if folder is None else "float32"
        self.llm = LLM(folder, device="cuda", dtype=dtype, eager=True, **SIZES)
        self.vocab = self.llm.config.vocab_size
        self.captured = self.engine(eager=False)  # keeps the pools it was captured with

    def engine(self, **changes: Any) -> Engine:
        settings = dataclasses.replace(self.llm.settings, **changes)
        return Engine(self.llm.engine.model, settings, self.llm.tokenizer, num_pages=PAGES)


def make_pair(folder: Path, shape: str) -> Pair:
    return Pair(None if shape == "shipped" else write_tiny_checkpoint(folder / shape, **TINY_SHAPES[shape]))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A fault on the host is none of the model's: one with memory, an indexer and experts stands for all."""
    yield make_pair(tmp_path_factory.mktemp("tiny"), "qwen4_exp_packed")
    torch.cuda.empty_cache()


def run(engine: Engine, seed: int, vocab: int) -> dict[int, tuple[int, ...]]:
    """A random schedule of requests, with fresh texts and repeated ones, that arrive, are aborted, and are pushed out;
    the tokens of each."""
    draw = random.Random(seed)
    requests: list[Request] = []
    steps = 0
    while len(requests) < 4 or engine.has_work:
        if len(requests) < 4 and draw.random() < 0.5:
            size = draw.choice([1, 5, 52, 60, 63, 64, 65, 120, 190])
            prompt = [draw.randrange(3, vocab) for _ in range(draw.choice([7, size]))] * size
            prompt = prompt[:size]
            requests.append(engine.add_request(prompt, draw.choice(PARAMS), draw.getrandbits(40)))
        event = draw.random()
        if requests and event < 0.06:
            engine.drain()
            if event < 0.03:
                engine.abort(draw.choice(requests))
            elif engine.scheduler.running:
                engine.scheduler.preempt(draw.choice(engine.scheduler.running))
        for delta in engine.step():
            assert delta.error is None, delta.error
        steps += 1
        assert steps < 1000
    engine.scheduler.check_empty()
    return {n: tuple(request.tokens) for n, request in enumerate(requests)}


@pytest.mark.parametrize("shape", ["shipped", "qwen4_exp_packed", "qwen3_5", "qwen3_5_moe", "qwen3_next_packed"])
def test_captured_is_eager_and_all_of_a_step_is_one_graph(tmp_path: Path, shape: str) -> None:
    """64 schedules, every other one with drafts, all with few pages."""
    pair = make_pair(tmp_path, shape)
    for drafts, captured in ({}, pair.captured), (DRAFTS, pair.engine(eager=False, **DRAFTS)):
        eager = pair.engine(eager=True, **drafts)
        for seed in range(bool(drafts), 64, 2):
            assert run(captured, seed, pair.vocab) == run(eager, seed, pair.vocab), seed
        stats = captured.stats
        assert stats.eager_segments == 0 and stats.preemptions > 15
        assert {record["kind"] for record in stats.steps} == {"prefill", "decode", "mixed"}
        assert not drafts or (stats.drafted_tokens > 120 and stats.accepted_tokens > 40)


@pytest.mark.parametrize(("shape", "speculation"), [("qwen4_exp", "mtp"), ("qwen3_5", "drafter")])
def test_nothing_compiles_after_ready(tmp_path: Path, shape: str, speculation: str) -> None:
    """Whatever a step holds. In a fresh process, whose kernels nobody has compiled: here others have run it all."""
    folder = write_tiny_checkpoint(tmp_path / shape, mtp=True, **TINY_SHAPES[shape])
    command = [sys.executable, str(Path(__file__).parent / "run_all_kinds.py"), str(folder), speculation]
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["before"] > 10, "the listener counts"
    assert found["after"] == [] and found["bytes"] == 0, "steps compile, or allocate"


STAGES = [
    (Engine, "_propose"),
    (Scheduler, "schedule"),
    (Scheduler, "_plan"),
    (Scheduler, "_admit"),
    (Scheduler, "take_freed"),
    (Runner, "launch"),
    (TokenHistory, "admit"),
    (Runner, "_fill"),
    (StepGraphs, "replay"),
    (Runner, "retire"),
    (Scheduler, "retire"),
    (Engine, "_deliver"),
]


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize(("owner", "name"), STAGES)
def test_a_fault_on_the_host_ends_its_step_s_requests_and_leaves_others_right(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, kind: type[BaseException]
) -> None:
    """Two requests run when the third comes, and the fault with it. An interrupt ends nobody."""
    engine, draw = pair.captured, random.Random(3)
    prompts = [[draw.randrange(3, pair.vocab) for _ in range(20 + n)] for n in range(3)]
    expected = []
    for prompt in prompts:
        request = engine.add_request(prompt, PARAMS[0], 1)
        while engine.has_work:
            engine.step()
        expected.append(request.tokens)
    whole, calls = getattr(owner, name), 0

    def broken(*arguments: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise kind("injected")
        return whole(*arguments, **options)

    requests = [engine.add_request(prompt, PARAMS[0], 1) for prompt in prompts[:2]]
    deltas = [delta for _ in range(5) for delta in engine.step()]
    requests.append(engine.add_request(prompts[2], PARAMS[0], 1))
    monkeypatch.setattr(owner, name, broken)
    interrupts = 0
    while engine.has_work:
        try:
            deltas += engine.step()
        except KeyboardInterrupt:
            interrupts += 1
    failed = {delta.request: str(delta.error) for delta in deltas if delta.error is not None}
    assert set(failed.values()) == ({"injected"} if kind is OSError else set()) and interrupts == (kind is not OSError)
    for request, tokens in zip(requests, expected, strict=True):
        given = [token for delta in deltas if delta.request is request for token in delta.token_ids]
        if request in failed:
            assert request.finish_reason is FinishReason.ERROR
        else:
            assert request.tokens == tokens == [*request.prompt, *given]
    after = [engine.add_request(prompt, PARAMS[0], 1) for prompt in prompts]
    while engine.has_work:
        assert not [delta for delta in engine.step() if delta.error is not None]
    assert [request.tokens for request in after] == expected
    engine.scheduler.check_empty()


def test_a_stale_buffer_is_an_error(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose graph was not replayed reports the step before: nobody gets its tokens."""
    engine = pair.captured
    request = engine.add_request([3, 4, 5], PARAMS[0], 1)
    monkeypatch.setattr(StepGraphs, "replay", lambda self, bucket: 0)
    errors = [delta.error for _ in range(4) for delta in engine.step() if delta.error is not None]
    assert request.finish_reason is FinishReason.ERROR and "stale" in str(errors[0])
    monkeypatch.undo()
    later = engine.add_request([3, 4, 5], PARAMS[0], 1)
    while engine.has_work:
        engine.step()
    assert later.finish_reason is FinishReason.LENGTH


DEVICE_FAULT = """
import torch
from deltagram import LLM, SamplingParams
llm = LLM(device="cuda", max_num_sequences=1, max_num_tokens=64, max_context=128)
admit = llm.engine.runner.history.admit
llm.engine.runner.history.admit = lambda row, tokens: admit(row, [2**30] * len(tokens))  # no such word
llm.generate("x", SamplingParams(max_tokens=4))
"""


def test_a_fault_of_the_device_ends_the_process(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", DEVICE_FAULT], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "DeviceFault: the device failed" in done.stderr


def test_a_layer_that_no_graph_holds_runs_between_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user's own layer would: the tokens are the same, and the metric tells."""
    from deltagram.step.segments import eagerly

    plain = LLM(device="cuda", **SIZES)
    expected = plain.generate("It is a truth", PARAMS[0])[0].outputs[0].token_ids
    seen = []
    write = runner_module.Runner._write

    def breaking(self: Runner, table: Any, tokens: torch.Tensor) -> None:
        kept = tokens.clone()
        eagerly(lambda: seen.append(int(kept[0])))
        write(self, table, kept)

    monkeypatch.setattr(runner_module.Runner, "_write", breaking)
    broken = LLM(device="cuda", **SIZES)
    seen.clear()
    assert broken.generate("It is a truth", PARAMS[0])[0].outputs[0].token_ids == expected
    assert tuple(seen[: len(expected)]) == expected
    assert broken.stats.eager_segments == broken.stats.num_steps > 0
