"""Faults and interrupts at every stage of a step: nobody gets a wrong token, nothing is lost, nothing leaks.

A fault ends the requests of its step with the error itself and leaves the others right; an interrupt ends nobody, and
every token is handed out once. Interrupts come at lines of the code that keeps the books, one after another, and a
second one may come while the engine recovers from the first.
"""

import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import deltagram
from deltagram import LLM, SamplingParams
from deltagram.attention.cache import PagePool
from deltagram.engine import runner as runner_module
from deltagram.engine.detokenizer import Detokenizer
from deltagram.engine.engine import Delta, Engine
from deltagram.engine.prefix import PrefixCache
from deltagram.engine.request import FinishReason, Request
from deltagram.engine.runner import Runner
from deltagram.engine.scheduler import Scheduler
from deltagram.engine.speculate import Speculation
from deltagram.gdn.state import SlotPool
from deltagram.graphs.buffers import Report, StepBuffers
from deltagram.ngram.run_ahead import RunAhead
from deltagram.step.history import TokenHistory
from deltagram.testing.alone import Alone, text_of
from deltagram.testing.checkpoints import TINY_SHAPES, write_tiny_checkpoint

PARAMS = SamplingParams(max_tokens=7, temperature=0, ignore_eos=True)
STOPPING = SamplingParams(max_tokens=9, min_tokens=2, temperature=0, ignore_eos=True, stop=("\ufffd\ufffd",))
# Two share a beginning, three run at a time, and the pages are too few for them.
ASKED = [
    (text_of(70, 1), PARAMS), (text_of(70, 1) + text_of(20, 2), PARAMS), (text_of(9, 3), STOPPING),
    (text_of(130, 4), PARAMS),
]  # fmt: skip
BOOKS = ("engine", "gdn/state", "attention/cache", "graphs", "step/history", "step/sequences", "ngram/run_ahead")
PLACES = tuple(str(Path(deltagram.__file__).parent / part) for part in BOOKS)
INTERRUPTS = 12  # of each mode
MODES = list(itertools.product(("off", "drafter", "mtp"), (False, True)))
STAGES: list[tuple[Any, str]] = [
    (Engine, "_propose"), (Engine, "_retire"), (Engine, "_record"), (Engine, "_deliver"), (Engine, "_consume"),
    (Engine, "_give"), (Scheduler, "schedule"), (Scheduler, "_plan"), (Scheduler, "_entry"), (Scheduler, "_saved"),
    (Scheduler, "_grow"), (Scheduler, "_take_pages"), (Scheduler, "_admit"), (Scheduler, "_release"),
    (Scheduler, "preempt"), (Scheduler, "take_freed"), (Scheduler, "retire"), (Scheduler, "finish"),
    (PrefixCache, "find"), (PrefixCache, "admit"), (PrefixCache, "reserve"), (PrefixCache, "keep"),
    (PrefixCache, "evict"), (Speculation, "begin"), (Speculation, "num_wanted"), (Speculation, "learn"),
    (Speculation, "follow"), (SlotPool, "take"), (SlotPool, "give_back"), (SlotPool, "advance"), (PagePool, "take"),
    (PagePool, "share"), (PagePool, "give_back"), (Runner, "poison_freed"), (Runner, "launch"), (Runner, "_admit"),
    (Runner, "_share_pages"), (Runner, "_places"), (Runner, "_fill"), (runner_module, "pack"), (StepBuffers, "fill"),
    (TokenHistory, "admit"), (Runner, "_forward"), (RunAhead, "start"), (RunAhead, "take"), (RunAhead, "finish"),
    (Runner, "_commit_here"), (Runner, "_sample_here"), (Runner, "_write"), (Runner, "_draft"), (Runner, "_save"),
    (StepBuffers, "report"), (Runner, "retire"), (RunAhead, "check"), (Report, "tokens"), (Detokenizer, "push"),
]  # fmt: skip


class Letters:
    """A constraint that allows the letters of the alphabet in turn: who is told a token twice says another text."""

    finished = False

    def __init__(self) -> None:
        self.told = 0

    @property
    def allowed(self) -> np.ndarray:
        return np.arange(264) == ord("a") + self.told

    def accept(self, token: int) -> None:
        self.told += 1


class Watched:
    """An engine with the requests of ASKED and one with a constraint, and what came of them."""

    def __init__(self, bench: Alone, speculation: str, ahead: bool) -> None:
        self.bench = bench
        drafter = bench.scripted(0.7, 1) if speculation == "drafter" else None
        kept = 3 * bench.checkpoint_bytes(3 if speculation != "off" else 0)
        self.engine = bench.engine(speculation, 3, 30, 4, False, ahead, drafter, prefix_cache_bytes=kept)
        self.requests = [self.engine.add_request(*asked, 0) for asked in ASKED]
        self.bound = self.engine.make_request(text_of(5, 5), PARAMS, 0, constraint=Letters())
        self.engine.add(self.bound)
        self.deltas: dict[Request, list[Delta]] = {request: [] for request in (*self.requests, self.bound)}
        self.raised = 0

    def run(self) -> None:
        """To the end, whatever is raised by the way."""
        for _ in range(300):
            if not self.engine.has_work:
                return
            try:
                for delta in self.engine.step():
                    self.deltas[delta.request].append(delta)
            except (KeyboardInterrupt, OSError):
                self.raised += 1
        raise AssertionError("it never ends")

    def check(self, expected: list[tuple[tuple[int, ...], str]]) -> int:
        """What came is right, or an error; how many requests ended with one."""
        errors = 0
        for request, deltas in self.deltas.items():
            assert [delta.finish_reason is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
            assert request.finish_reason is deltas[-1].finish_reason
            tokens = tuple(token for delta in deltas for token in delta.token_ids)
            text = "".join(delta.text for delta in deltas)
            if request.finish_reason is FinishReason.ERROR:
                assert "injected" in str(deltas[-1].error) or (self.raised and request is self.bound)
                errors += 1
            elif request is self.bound:
                assert text == "abcdefg"
            else:
                assert request.tokens == [*request.prompt, *tokens]
                alone = expected[request.id]
                assert (tokens, text) == alone or self.bench.is_close(request, tokens, alone[0])
        again = self.engine.add_request(*ASKED[0], 0)
        while self.engine.has_work:
            assert all(delta.error is None for delta in self.engine.step())
        assert tuple(again.tokens[len(again.prompt) :]) == expected[0][0]
        self.engine.scheduler.check_empty()
        return errors


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), mtp=True, **TINY_SHAPES["qwen4_exp"]))


@pytest.fixture(scope="module")
def expected(bench: Alone) -> list[tuple[tuple[int, ...], str]]:
    """Tokens and text of each of ASKED, alone."""
    found = []
    for prompt, params in ASKED:
        tokens, deltas = bench.alone(prompt, params, 0), []
        engine = bench.engine("off", 1)
        engine.add_request(prompt, params, 0)
        while engine.has_work:
            deltas += engine.step()
        found.append((tokens, "".join(delta.text for delta in deltas)))
    return found


def broken(owner: Any, name: str, at: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have the `at`th call raise; how many there were."""
    whole, calls = getattr(owner, name), [0]

    def call(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            raise error
        return whole(*arguments, **options)

    monkeypatch.setattr(owner, name, staticmethod(call) if type(vars(owner)[name]) is staticmethod else call)
    return calls


@pytest.mark.parametrize(("speculation", "ahead"), MODES)
def test_a_fault_or_interrupt_at_any_stage(
    bench: Alone, expected: list[tuple[tuple[int, ...], str]], speculation: str, ahead: bool
) -> None:
    source, hit, ended = random.Random(f"{speculation} {ahead}"), Counter[type](), 0
    for owner, name in STAGES:
        kind, at = source.choice((OSError, KeyboardInterrupt)), source.choice((1, 2, 3, 5, 8))
        watched = Watched(bench, speculation, ahead)
        with pytest.MonkeyPatch.context() as patched:
            calls = broken(owner, name, at, kind("injected"), patched)
            watched.run()
        errors = watched.check(expected)
        assert bool(errors or watched.raised) == (calls[0] >= at), (owner, name, at, kind)
        hit[kind] += calls[0] >= at
        ended += errors
    assert min(hit[OSError], hit[KeyboardInterrupt]) > 15 and ended > 20, "most stages are reached"


class Lines:
    """Raises KeyboardInterrupt at the `at`th line of the code in PLACES that `step` comes to, 0 for none, and again at
    the `then`th line of the engine's recovery from that."""

    def __init__(self, engine: Engine, at: int, then: int = 0) -> None:
        self.left, self.then, self.step, self.start_over = at, then, engine.step, engine.start_over
        self.engine, self.seen = engine, 0
        engine.step, engine.start_over = self._step, self._start_over  # type: ignore[method-assign]

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *_: object) -> None:
        del self.engine.step, self.engine.start_over

    def _step(self) -> list[Delta]:
        return self._traced(self.step)

    def _start_over(self) -> None:
        if self.left == 0:
            self.left, self.then = self.then, 0
        self._traced(self.start_over)

    def _traced(self, call: Callable[[], Any]) -> Any:
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            return call()
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(PLACES) or frame.f_code is Engine._given.__code__:
            return None  # a signal cannot come within that
        if event == "line":
            self.seen += 1
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self._trace


@pytest.mark.parametrize(("speculation", "ahead"), MODES)
def test_an_interrupt_at_any_line(
    bench: Alone, expected: list[tuple[tuple[int, ...], str]], speculation: str, ahead: bool
) -> None:
    whole = Watched(bench, speculation, ahead)
    with Lines(whole.engine, 0) as lines:
        whole.run()
    assert whole.check(expected) == 0 and whole.raised == 0
    bound = 0
    for n, at in enumerate(range(1, lines.seen, lines.seen // INTERRUPTS)):
        watched = Watched(bench, speculation, ahead)
        with Lines(watched.engine, at, then=at % 40 if n % 2 else 0) as armed:
            watched.run()
        assert watched.raised or armed.left > 0
        bound += watched.check(expected)
    assert bound <= 1, "next to no interrupt comes while a constraint is told a token"


def test_a_text_goes_on_where_it_was_though_a_token_of_it_is_sampled_again(bench: Alone) -> None:
    """The interrupt comes when half a character, or the other half, has been taken in and not been handed out."""
    halves = {0xC3: 60.0, 0xA9: 50.0}
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, logit_bias=halves, repetition_penalty=1.5)
    for at in range(3):
        engine = bench.engine("off", 1)
        engine.add_request(text_of(5, 5), params, 0)
        text, interrupts = "", 0
        with pytest.MonkeyPatch.context() as patched:
            broken(Engine, "_give", at, KeyboardInterrupt(), patched)
            while engine.has_work:
                try:
                    text += "".join(delta.text for delta in engine.step())
                except KeyboardInterrupt:
                    interrupts += 1
        assert text == "\xe9" and interrupts == (at > 0)


def test_a_stream_gets_its_end_though_the_reader_of_another_was_interrupted(
    bench: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that ended it was another stream's, and broke off before it handed anything out."""
    llm = LLM(bench.plain.folder, device="cpu", max_num_sequences=2, max_num_tokens=96, max_context=64)
    short = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    (expected,) = llm.generate([[1, 2, 3]], short)
    reader, other = llm.stream([4, 5, 6], PARAMS), llm.stream([1, 2, 3], short)
    next(reader)
    begun = next(other)
    assert begun.finish_reason is None and next(reader).token_ids, "which came with it"
    with monkeypatch.context() as patched:
        broken(Engine, "_given", 1, KeyboardInterrupt(), patched)
        with pytest.raises(KeyboardInterrupt):
            next(reader)
    (end,) = other
    assert end.finish_reason == "length" and begun.token_ids + end.token_ids == expected.outputs[0].token_ids
    llm.engine.scheduler.check_empty()
