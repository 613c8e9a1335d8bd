"""Captured steps against the same steps run eagerly; faults on the host at every stage; what a replay must never do."""

import dataclasses
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
from deltagram.graphs.capture import StepGraphs
from deltagram.step.history import TokenHistory
from deltagram.testing.checkpoints import TINY_SHAPES, write_tiny_checkpoint

pytestmark = pytest.mark.gpu
SIZES: dict[str, Any] = {"max_num_sequences": 4, "max_num_tokens": 96, "max_context": 256}
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.9, max_tokens=12, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=1.3, top_k=7, frequency_penalty=0.4, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=0.0, logit_bias={5: 2.0}, min_tokens=6, max_tokens=9),
]
Texts = dict[int, tuple[tuple[int, ...], str]]


class Pair:
    """One model, with an engine that replays graphs and one that runs the same steps eagerly."""

    def __init__(self, folder: Path | None, shape: str) -> None:
        llm = LLM(folder, device="cuda", dtype="bfloat16" if folder is None else "float32", eager=True, **SIZES)
        settings = dataclasses.replace(llm.settings, eager=False)
        self.captured = Engine(llm.engine.model, settings, llm.tokenizer)  # keeps the pools it was captured with
        self.eager = Engine(llm.engine.model, llm.settings, llm.tokenizer)
        self.vocab = llm.config.vocab_size
        self.shape = shape


@pytest.fixture(scope="module", params=["shipped", "qwen4_exp_packed", "qwen3_5", "qwen3_5_moe", "qwen3_next_packed"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = None
    if request.param != "shipped":
        folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / request.param, **TINY_SHAPES[request.param])
    yield Pair(folder, request.param)
    torch.cuda.empty_cache()


def run(engine: Engine, seed: int, vocab: int) -> dict[int, tuple[int, ...]]:
    """A random schedule of arrivals and aborts; the tokens of each request."""
    draw = random.Random(seed)
    requests: list[Request] = []
    steps = 0
    while len(requests) < 7 or engine.has_work:
        if len(requests) < 7 and draw.random() < 0.4:
            prompt = [draw.randrange(3, vocab) for _ in range(draw.choice([1, 5, 63, 64, 65, 130, 190]))]
            requests.append(engine.add_request(prompt, draw.choice(PARAMS), draw.getrandbits(40)))
        if requests and draw.random() < 0.03:
            engine.drain()
            engine.abort(draw.choice(requests))
        for delta in engine.step():
            assert delta.error is None, delta.error
        steps += 1
        assert steps < 1000
    engine.scheduler.check_empty()
    return {n: tuple(request.tokens) for n, request in enumerate(requests)}


def test_captured_is_eager_and_all_of_a_step_is_one_graph(pair: Pair) -> None:
    before = pair.captured.stats.num_steps
    for seed in range(64 if pair.shape == "shipped" else 8):
        assert run(pair.captured, seed, pair.vocab) == run(pair.eager, seed, pair.vocab), seed
    assert pair.captured.stats.eager_segments == 0 and pair.captured.stats.num_steps > before
    assert {record["kind"] for record in pair.captured.stats.steps} == {"prefill", "decode", "mixed"}


def test_nothing_compiles_after_ready(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    compiled: list[str] = []
    hook = lambda *_, **known: compiled.append(str(known.get("repr")))  # noqa: E731
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", hook)
    reserved = torch.cuda.memory_reserved()
    run(pair.captured, 99, pair.vocab)
    assert compiled == []
    assert torch.cuda.memory_reserved() == reserved, "steps allocate"


STAGES = [
    (Runner, "launch"),
    (TokenHistory, "admit"),
    (Runner, "_fill"),
    (StepGraphs, "replay"),
    (Runner, "retire"),
    (Engine, "_deliver"),
]


@pytest.mark.parametrize(("owner", "name"), STAGES)
def test_a_fault_on_the_host_ends_its_step_s_requests_and_no_others(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
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
            raise OSError("injected")
        return whole(*arguments, **options)

    victim = engine.add_request(prompts[0], PARAMS[0], 1)
    monkeypatch.setattr(owner, name, broken)
    errors = []
    while engine.has_work and not errors:
        errors += [delta for delta in engine.step() if delta.error is not None]
    assert victim.finish_reason is FinishReason.ERROR and "injected" in str(errors[0].error)
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
    engine.runner.buffers.start_over()
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
