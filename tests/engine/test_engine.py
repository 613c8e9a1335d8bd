"""The engine on a tiny model: faults, books, limits, poison; what preemption must not change."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deltagram import LLM, SamplingParams
from deltagram.attention.indexer import Indexer
from deltagram.engine.engine import MAX_RECORDS, Delta, Engine, Stats, pages_that_fit
from deltagram.engine.request import FinishReason, Request, Status
from deltagram.engine.runner import Runner
from deltagram.engine.tokenizer import Tokenizer
from deltagram.gdn.layer import GatedDeltaNet
from deltagram.layers.mlp import MoE
from deltagram.ngram.layer import PLELayer
from deltagram.step.buckets import Ladder
from deltagram.testing.checkpoints import END_OF_TEXT, END_OF_TURN, write_tiny_checkpoint

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
LONG, SHORT = tuple(range(1, 151)), tuple(b"short")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    return LLM(folder, device="cpu", max_context=256, max_num_sequences=2, max_num_tokens=80, poison=True)


def make(llm: LLM, tokenizer: Tokenizer | None = None, **changes: Any) -> Engine:
    options = {name: changes.pop(name) for name in ("num_pages", "buckets", "ahead") if name in changes}
    settings = dataclasses.replace(llm.settings, **changes)
    return Engine(llm.engine.model, settings, tokenizer or llm.tokenizer, **options)


@pytest.fixture
def engine(llm: LLM) -> Iterator[Engine]:
    engine = make(llm)
    yield engine
    engine.scheduler.check_empty()


def finish(engine: Engine, deltas: list[Delta] | None = None) -> list[Delta]:
    deltas = deltas or []
    while engine.has_work:
        deltas += engine.step()
    return deltas


def tokens_of(request: Request) -> list[int]:
    return request.tokens[len(request.prompt) :]


@pytest.fixture(scope="module")
def alone(llm: LLM) -> dict[tuple[int, ...], list[int]]:
    """Greedy tokens of LONG and SHORT, each run by itself."""
    engine, got = make(llm), {}
    for prompt in (LONG, SHORT):
        request = engine.add_request(prompt, GREEDY, 0)
        finish(engine)
        got[prompt] = tokens_of(request)
    return got


# Faults


@pytest.mark.parametrize("layer", [GatedDeltaNet, MoE, PLELayer, Indexer])
@pytest.mark.parametrize("padded", [False, True])
def test_a_fault_ends_the_step_s_requests_and_no_others(
    llm: LLM, alone: dict[Any, list[int]], monkeypatch: pytest.MonkeyPatch, layer: type, padded: bool
) -> None:
    engine = make(llm, buckets=Ladder((2,), (80,), 2) if padded else None)
    first, second = (engine.add_request(LONG, GREEDY, 0) for _ in range(2))
    waiting = engine.add_request(SHORT, GREEDY, 0)
    while first.num_output < 2:
        engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(layer, "__call__", lambda *arguments: 1 // 0)
        deltas = engine.step()
    failed = {delta.request for delta in deltas}
    assert first in failed and failed <= {first, second} and waiting.status is Status.WAITING
    for delta in deltas:
        assert isinstance(delta.error, ZeroDivisionError) and delta.finish_reason is FinishReason.ERROR
        assert (delta.text, delta.token_ids) == ("", ()) and delta.request.status is Status.FINISHED
    again = engine.add_request(LONG, GREEDY, 0)
    assert all(delta.error is None for delta in finish(engine))
    assert tokens_of(waiting) == alone[SHORT] and tokens_of(again) == alone[LONG]
    engine.scheduler.check_empty()


@pytest.mark.parametrize("ends", [False, True])
def test_a_fault_after_the_step_fails_those_it_reaches(
    engine: Engine, alone: dict[Any, list[int]], monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """The detokenizer of the second request breaks when the first one's token has been handed out."""
    first = engine.add_request(SHORT, dataclasses.replace(GREEDY, max_tokens=2) if ends else GREEDY, 0)
    second = engine.add_request(SHORT, GREEDY, 0)
    engine.step()
    assert second.detokenizer is not None
    monkeypatch.setattr(type(second.detokenizer), "push", push := FailsOnce(second.detokenizer))
    handed_out, *failed = engine.step()
    assert push.failed and handed_out.error is None and handed_out.token_ids == tuple(alone[SHORT][1:2])
    assert {delta.request for delta in failed} == ({second} if ends else {first, second})
    assert all(isinstance(delta.error, UnicodeError) for delta in failed)
    assert first.finish_reason is (FinishReason.LENGTH if ends else FinishReason.ERROR)


class FailsOnce:
    """`Detokenizer.push`, which fails for one of them."""

    def __init__(self, victim: Any) -> None:
        self.victim, self.whole, self.failed = victim, type(victim).push, False

    def __get__(self, instance: Any, owner: type) -> Any:
        def push(*arguments: Any, **options: Any) -> str:
            if instance is self.victim:
                self.failed = True
                raise UnicodeError("broken")
            return self.whole(instance, *arguments, **options)

        return push


def test_the_runner_refuses_a_stale_plan(engine: Engine) -> None:
    request = engine.add_request(LONG, GREEDY, 0)
    stale = engine.scheduler.schedule()
    assert stale is not None
    engine.runner.launch(stale)
    with pytest.raises(RuntimeError, match=r"the step starts at 0"):  # the state has gone on
        engine.runner.launch(stale)
    engine.scheduler.retire(stale, {})
    engine.scheduler.preempt(request)
    with pytest.raises(RuntimeError, match=f"is not request {request.id}'s"):
        engine.runner.launch(stale)
    newer = engine.scheduler.schedule()
    assert newer is not None and newer.plan.entries[0].slot == stale.plan.entries[0].slot
    with pytest.raises(RuntimeError, match="generation 1, is not request"):  # the same slot and request, another stay
        engine.runner.launch(stale)
    engine.runner.launch(newer)
    engine.scheduler.retire(newer, {})
    engine.abort(request)


def test_an_abort_ends_a_request_wherever_it_is(engine: Engine) -> None:
    unqueued = engine.make_request(SHORT, GREEDY, 0)
    engine.abort(unqueued)
    assert unqueued.status is Status.NEW
    running, also, waiting = (engine.add_request(LONG, GREEDY, 0) for _ in range(3))
    engine.step()
    for request in (waiting, running, also, running):
        engine.abort(request)
        assert (request.status, request.finish_reason) == (Status.FINISHED, FinishReason.ABORT)
    assert not engine.has_work and engine.step() == []


@pytest.mark.parametrize("stage", ["launch", "retire"])
@pytest.mark.parametrize("ahead", [False, True])
def test_an_interrupt_computes_anew_what_runs(
    llm: LLM, alone: dict[Any, list[int]], monkeypatch: pytest.MonkeyPatch, ahead: bool, stage: str
) -> None:
    """Also of the step that runs while the next one is launched, whose token is on its way."""
    engine, whole, calls = make(llm, ahead=ahead), getattr(Runner, stage), 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (2, 6):
            raise KeyboardInterrupt
        return whole(*arguments)

    monkeypatch.setattr(Runner, stage, interrupted)
    requests = [engine.add_request(prompt, GREEDY, 0) for prompt in (LONG, SHORT)]
    interrupts = 0
    while engine.has_work:
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupts += 1
            assert not engine.scheduler.running and not any(request.in_flight for request in requests)
    assert interrupts == 2 and [tokens_of(request) for request in requests] == [alone[LONG], alone[SHORT]]
    engine.scheduler.check_empty()


# Preemption, padding, poison


def test_prompt_logits_survive_preemption(engine: Engine) -> None:
    wants = [engine.add_request(LONG, dataclasses.replace(GREEDY, max_tokens=1), 0, True) for _ in range(2)]
    engine.step()
    assert wants[1].prompt_logits == [] and len(wants[0].prompt_logits) == 1
    engine.scheduler.preempt(wants[0])
    finish(engine)
    one, other = (torch.cat(request.prompt_logits) for request in wants)
    assert one.shape == other.shape == (len(LONG), 264)
    assert (one - other).abs().max() < 1e-4 * one.abs().max()


def test_padding_writes_nothing(llm: LLM, alone: dict[Any, list[int]]) -> None:
    """The pad slot keeps its poison through padded steps, and so does a page nobody owns."""
    engine = make(llm, buckets=Ladder((2,), (80,), 2), num_pages=4)
    request = engine.add_request(LONG, GREEDY, 0)
    finish(engine)
    assert tokens_of(request) == alone[LONG] and engine.stats.padding_tokens > 80
    for pool in engine.runner._pools:
        assert pool[-1].isnan().all()
    for pool in engine.runner._page_pools:
        assert pool[3].isnan().all() and not pool[0].isnan().any()


def test_freed_slots_and_pages_are_poisoned(llm: LLM) -> None:
    engine = make(llm)
    requests = [engine.add_request(LONG, GREEDY, 0) for _ in range(2)]
    while not requests[1].num_output:
        engine.step()
    slots, pages = [request.slot for request in requests], [page for request in requests for page in request.pages]
    assert len(pages) == 6
    finish(engine)
    later = engine.add_request((1,), GREEDY, 0)
    engine.step()
    assert later.slot in slots and set(later.pages) < set(pages)
    for pool in engine.runner._pools:
        assert all(pool[slot].isnan().all() for slot in slots if slot != later.slot)
    for pool in engine.runner._page_pools:
        assert all(pool[page].isnan().all() for page in pages if page not in later.pages)
    engine.abort(later)


# Books and limits


def test_nothing_is_kept_for_poison_that_is_off(llm: LLM) -> None:
    engine = make(llm, poison=False)
    for _ in range(5):
        engine.add_request(SHORT, GREEDY, 0)
        finish(engine)
    assert len(engine.scheduler.freed_slots) <= 1 and len(engine.scheduler.freed_pages) <= 1
    assert not any(pool.isnan().any() for pool in engine.runner._pools)


def test_the_counts_add_up(llm: LLM) -> None:
    engine = make(llm, num_pages=4)
    engine.add_request(LONG, GREEDY, 0)
    deltas = finish(engine)
    stats = engine.stats
    assert (stats.prefill_tokens, stats.decode_tokens, stats.padding_tokens) == (150, 7, 0) and len(deltas) == 8
    assert (stats.peak_pages, stats.num_pages, stats.num_steps, stats.preemptions) == (3, 4, 10, 0)
    assert stats.memory_rows == 157 * 8  # two layers, two orders, two heads
    assert [record["tokens"] for record in stats.steps] == [64, 64, 22] + [1] * 7
    assert [record["kind"] for record in stats.steps] == ["prefill"] * 3 + ["decode"] * 7
    assert Stats().steps.maxlen == MAX_RECORDS


def test_the_cache_bounds_the_context(llm: LLM) -> None:
    engine = make(llm, num_pages=1)
    with pytest.raises(ValueError, match="with max_context 256 and a cache of 64 tokens it may have at most 63"):
        engine.add_request(LONG[:64], GREEDY, 0)
    request = engine.add_request(LONG[:60], GREEDY, 0)
    assert [delta.finish_reason for delta in finish(engine)] == [None, None, None, FinishReason.LENGTH]
    assert len(request.tokens) == 64


def test_pages_follow_the_bytes_they_take(llm: LLM) -> None:
    """One attention layer in fp32: keys and values of 2 heads of 32, an index key of 32, a block key every 4 tokens."""
    model, settings = llm.engine.model, llm.settings
    assert pages_that_fit(model, settings) == 2 * 256 // 64  # all that can ever be used
    page = 64 * 4 * (2 * 2 * 32 + 32) + 16 * 4 * 32
    for count in (1, 3):
        assert pages_that_fit(model, dataclasses.replace(settings, cache_bytes=count * page)) == count
        assert pages_that_fit(model, dataclasses.replace(settings, cache_bytes=count * page + page - 1)) == count
    with pytest.raises(ValueError, match=f"cache_bytes must hold a page of 64 tokens, {page} bytes, got {page - 1}"):
        pages_that_fit(model, dataclasses.replace(settings, cache_bytes=page - 1))


def test_end_tokens_outside_the_vocabulary_cannot_come(llm: LLM) -> None:
    """A tokenizer may know an end token that the model has no logit for."""
    tokenizer = Tokenizer(llm.tokenizer.backend, eos_token_ids=(END_OF_TEXT, 1_000_000))
    engine = make(llm, tokenizer)
    assert engine.end_token_ids == (END_OF_TURN, END_OF_TEXT)
    engine.add_request(SHORT, SamplingParams(max_tokens=4, min_tokens=4, temperature=0), 0)
    assert all(delta.error is None for delta in finish(engine))


def test_an_engine_without_a_tokenizer_gives_ids_alone(llm: LLM, alone: dict[Any, list[int]]) -> None:
    engine = Engine(llm.engine.model, llm.settings)
    engine.add_request(SHORT, GREEDY, 0)
    deltas = finish(engine)
    assert [token for delta in deltas for token in delta.token_ids] == alone[SHORT]
    assert not any(delta.text for delta in deltas)


def test_logprobs_are_the_model_s_own(llm: LLM) -> None:
    engine = make(llm)
    params = SamplingParams(max_tokens=3, temperature=0.7, seed=1, logprobs=20, repetition_penalty=1.5, ignore_eos=True)
    request = engine.add_request(SHORT, params, 1)
    entries = [entry for delta in finish(engine) for entry in delta.logprobs]
    whole = make(llm)
    wants = whole.add_request(request.tokens[:-1], GREEDY, 0, wants_prompt_logits=True)
    whole.step()
    expected = torch.cat(wants.prompt_logits)[-3:].log_softmax(-1)
    whole.abort(wants)
    for entry, row, token in zip(entries, expected, tokens_of(request), strict=True):
        assert entry.token_id == token and abs(entry.logprob - row[token]) < 1e-4
        best = row.topk(20)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert torch.allclose(torch.tensor([value for _, value in entry.top]), best.values, atol=1e-4)


def test_a_folder_without_memory_layers_reads_no_rows(tmp_path: Path) -> None:
    llm = LLM(write_tiny_checkpoint(tmp_path, "qwen3_5"), device="cpu", max_num_sequences=1, max_num_tokens=64)
    llm.generate("x", GREEDY)
    assert llm.stats.memory_rows == 0 and llm.stats.decode_tokens == 7
