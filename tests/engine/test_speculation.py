"""Whoever drafts, whatever is accepted, and whatever prefixes were kept: a request gets the tokens it gets without.

fp32 on the CPU. A GEMM may round differently with the number of rows, so a token may differ where noise of 1e-4 on the
logits would change it too; such cases are counted, and there must be next to none.
"""

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor

from deltagram import SamplingParams
from deltagram.attention import indexer
from deltagram.engine import runner
from deltagram.engine.engine import Engine
from deltagram.engine.request import FinishReason, Request
from deltagram.engine.runner import Launched
from deltagram.engine.scheduler import Scheduled, Scheduler
from deltagram.kernels.place_drafts import place_drafts
from deltagram.step import sequences
from deltagram.step.plan import Entry, Kind
from deltagram.testing.alone import CONTEXT, Alone, run, text_of
from deltagram.testing.checkpoints import END_OF_TEXT, TINY_SHAPES, write_tiny_checkpoint

SCHEDULES, SCRIPTS = 200, 4
SHAPES = ("qwen4_exp", "qwen4_exp_packed", "qwen3_5", "qwen3_next_dense_layers")
VARIANTS = (
    SamplingParams(max_tokens=14, temperature=0),
    SamplingParams(max_tokens=12, temperature=0, repetition_penalty=1.3, frequency_penalty=0.4, logprobs=2),
    SamplingParams(max_tokens=16, temperature=0.8, top_p=0.9, seed=11, ignore_eos=True),
    SamplingParams(max_tokens=12, min_tokens=3, temperature=0.9, seed=13, stop_token_ids=tuple(range(40)), stop=("e",)),
)
# Two tokens in any order: text that prompt lookup finds again, now and then rightly.
NARROW = SamplingParams(max_tokens=24, temperature=1.5, seed=17, ignore_eos=True, logit_bias={5: 60.0, 9: 60.0})


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Alone]:
    folder = tmp_path_factory.mktemp("tiny")
    return {shape: Alone(write_tiny_checkpoint(folder / shape, mtp=True, **TINY_SHAPES[shape])) for shape in SHAPES}


@dataclasses.dataclass(frozen=True)
class Schedule:
    shape: str
    speculation: str
    num_draft: int
    chance: float
    adaptive: bool
    checkpoints: int
    requests: list[tuple[int, int, int, int]]  # shared beginning, tokens of its own, variant, step it arrives before
    slots: int
    spare_tokens: int
    spare_pages: int
    padded: bool
    ahead: bool
    events: list[tuple[int, str, int]]  # step it comes before, what, whom


schedules = st.builds(
    Schedule,
    shape=st.sampled_from(SHAPES),
    speculation=st.sampled_from(("drafter", "drafter", "mtp", "prompt_lookup", "off")),
    num_draft=st.integers(1, 5),
    chance=st.sampled_from((0.0, 0.5, 0.8, 1.0)),
    adaptive=st.booleans(),
    checkpoints=st.sampled_from((0, 1, 2, 5)),
    requests=st.lists(
        st.tuples(
            st.sampled_from((0, 0, 64, 70, 128)), st.sampled_from((1, 2, 3, 6, 30, 56, 58, 60, 62, 64)),
            st.integers(0, 3), st.integers(0, 12),
        ),
        min_size=2,
        max_size=5,
    ),
    slots=st.sampled_from((1, 2, 3, 4)),
    spare_tokens=st.sampled_from((0, 1, 40, 100)),
    spare_pages=st.sampled_from((0, 0, 1, 2, 4)),
    padded=st.booleans(),
    ahead=st.booleans(),
    events=st.lists(
        st.tuples(st.integers(1, 20), st.sampled_from(("preempt", "preempt", "abort", "break off")), st.integers(0, 9)),
        max_size=3,
    ),
)  # fmt: skip


def make_engine(schedule: Schedule, bench: Alone, num_pages: int) -> Engine:
    drafter = bench.scripted(schedule.chance, len(schedule.requests)) if schedule.speculation == "drafter" else None
    sizes = schedule.slots, schedule.spare_tokens, num_pages, schedule.padded, schedule.ahead, drafter
    options: dict[str, Any] = {"num_draft": schedule.num_draft, "adaptive_drafts": schedule.adaptive}
    kept = schedule.checkpoints * bench.checkpoint_bytes(schedule.num_draft)
    with pytest.MonkeyPatch.context() as patch:
        # What a GPU does, on a CPU: recurrent states are stored after several tokens.
        patch.setattr(runner, "stored_every", lambda device: 1 + len(schedule.requests) % 4)
        engine = bench.engine(schedule.speculation, *sizes, **options, prefix_cache_bytes=kept)
    engine.runner.history.few = len(schedule.requests) % 3
    return engine


def play(schedule: Schedule, bench: Alone, seen: Counter[str]) -> None:
    prompts = [text_of(200, 7)[:shared] + text_of(own, own) for shared, own, *_ in schedule.requests]
    longest = max(len(p) + VARIANTS[r[2]].max_tokens for p, r in zip(prompts, schedule.requests, strict=True))
    engine = make_engine(schedule, bench, -(-longest // 64) + schedule.spare_pages)
    scheduler, step = engine.scheduler, 0
    wanted: dict[int, tuple[Request, tuple[int, ...]]] = {}
    got: dict[int, tuple[int, ...]] = {}
    deltas: list[Any] = []
    while engine.has_work or any(arrival >= step for *_, arrival in schedule.requests):
        for prompt, (_, _, variant, arrival) in zip(prompts, schedule.requests, strict=True):
            if arrival == step:
                params = VARIANTS[variant]
                request = engine.add_request(prompt, params, params.seeds()[0] if params.seed else 0)
                wanted[request.id] = request, bench.alone(prompt, params, request.seed)
        for when, event, whom in schedule.events:
            if when != step:
                continue
            deltas += engine.drain()
            if event == "preempt" and scheduler.running:
                scheduler.preempt(scheduler.running[whom % len(scheduler.running)])
            elif event == "abort" and wanted:
                engine.abort(wanted[whom % len(wanted)][0])
            elif event == "break off" and (scheduled := scheduler.schedule()) is not None:
                engine.runner.launch(scheduled)  # an interrupt right after
                engine.start_over()
            seen[event] += 1
        before = scheduler.num_preemptions
        deltas += engine.step()
        seen["pushed out"] += scheduler.num_preemptions - before
        step += 1
        assert step < 2000, "no end"
    for delta in deltas:
        assert delta.error is None
        got[delta.request.id] = got.get(delta.request.id, ()) + delta.token_ids
    scheduler.check_empty()
    stats = engine.stats
    seen["drafted"] += stats.drafted_tokens
    seen["accepted"] += stats.accepted_tokens
    seen["hits"] += stats.prefix_hits
    seen["evictions"] += stats.prefix_evictions
    for reason, count in stats.prefix_misses.items():
        seen[reason] += count
    for number, (request, alone) in wanted.items():
        tokens = got.get(number, ())
        seen["tokens"] += len(tokens)
        if request.finish_reason is FinishReason.ABORT:
            alone = alone[: len(tokens)]
        if tokens != alone:
            assert bench.is_close(request, tokens, alone), f"{request}\n got {tokens}\nalone {alone}"
            seen["close"] += 1


def test_any_schedule_with_drafts_and_prefixes_equals_each_request_alone(benches: dict[str, Alone]) -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=SCHEDULES, deadline=None, derandomize=True)
    @given(schedules)
    def check(schedule: Schedule) -> None:
        seen["schedules"] += 1
        play(schedule, benches[schedule.shape], seen)

    check()
    print(dict(seen))
    assert seen["close"] <= 1 and seen["schedules"] >= SCHEDULES
    least = {
        "tokens": 4000, "drafted": 2000, "accepted": 400, "hits": 30, "evictions": 20, "preempt": 40, "pushed out": 20,
        "abort": 20, "break off": 20, "no_entry": 20, "no_checkpoint": 5, "evicted": 3, "too_short": 20,
    }  # fmt: skip
    assert all(seen[name] >= count for name, count in least.items()), dict(seen)


@pytest.mark.parametrize("shape", ["qwen4_exp", "qwen3_5"])
@pytest.mark.parametrize("num_draft", range(1, 6))
def test_prompts_of_1_to_16_tokens(benches: dict[str, Alone], shape: str, num_draft: int) -> None:
    """A prompt of 1 + k tokens is a prompt, whatever its steps look like."""
    bench = benches[shape]
    asked = [(text_of(length, length), params, 0) for length in range(1, 17) for params in (VARIANTS[0], NARROW)]
    alone = [bench.alone(*each) for each in asked]
    for speculation, chance in (("drafter", 0.7), ("drafter", 1.0), ("mtp", 0.0), ("prompt_lookup", 0.0)):
        drafter = bench.scripted(chance, 1) if speculation == "drafter" else None
        engine = bench.engine(speculation, 5, drafter=drafter, num_draft=num_draft)
        assert run(engine, asked) == alone, speculation
        engine.scheduler.check_empty()
        if chance == 1.0:
            assert engine.stats.accepted_tokens > 0.9 * engine.stats.drafted_tokens > 60
        assert speculation != "prompt_lookup" or engine.stats.accepted_tokens > 20


def test_right_drafts_save_the_steps_that_they_should(benches: dict[str, Alone]) -> None:
    bench = benches["qwen4_exp"]
    params = SamplingParams(max_tokens=25, temperature=0, ignore_eos=True)
    asked = (text_of(9, 1), params, 0)
    alone = bench.alone(*asked)
    engine = bench.engine("drafter", drafter=lambda tokens, k: _next(bench, tokens, k), num_draft=5)
    assert run(engine, [asked]) == [alone]
    assert engine.stats.num_steps == 1 + 4, "one for the prompt and its token, four for six each"


def _next(bench: Alone, tokens: tuple[int, ...], count: int) -> list[int]:
    text = next(text for text in bench.texts if text[: len(tokens)] == tokens)
    return list(text[len(tokens) :][:count])


@dataclasses.dataclass(frozen=True)
class Script:
    """A long life of one engine."""

    shape: str
    num_draft: int
    chance: float
    adaptive: bool
    slots: int
    padded: bool
    ahead: bool
    checkpoints: int
    disturbed: float  # how often a request is pushed out, and how often one is aborted, a step
    seed: int


scripts = st.builds(
    Script,
    shape=st.sampled_from(SHAPES),
    num_draft=st.integers(1, 5),
    chance=st.sampled_from((0.4, 0.6, 0.9)),
    adaptive=st.booleans(),
    slots=st.integers(1, 4),
    padded=st.booleans(),
    ahead=st.booleans(),
    checkpoints=st.integers(1, 3),
    disturbed=st.sampled_from((0.02, 0.05, 0.1)),
    seed=st.integers(0, 999),
)


def live(script: Script, speculation: str, bench: Alone, seen: Counter[str], close: set[tuple[Any, ...]]) -> None:
    """2,000 steps: requests that come, go, are pushed out, go on from others' beginnings, and drafts of any quality."""
    source = random.Random(script.seed)
    drafter = bench.scripted(script.chance, script.seed) if speculation == "drafter" else None
    kept = script.checkpoints * bench.checkpoint_bytes(script.num_draft)
    options = {"num_draft": script.num_draft, "adaptive_drafts": script.adaptive, "prefix_cache_bytes": kept}
    engine = bench.engine(speculation, script.slots, 0, 9, script.padded, script.ahead, drafter, **options)
    scheduler = engine.scheduler
    asked: dict[int, tuple[Request, tuple[int, ...]]] = {}
    deltas: list[Any] = []
    for _ in range(2000):
        if len(scheduler.running) + len(scheduler.waiting) <= script.slots:
            own = text_of(source.choice((1, 5, 60)), source.randrange(4))
            prompt = text_of(200, 7)[: source.choice((0, 64, 130))] + own
            params = source.choice((*VARIANTS, NARROW))
            request = engine.add_request(prompt, params, params.seed or 0)
            asked[request.id] = request, bench.alone(prompt, params, request.seed)
        for event in (scheduler.preempt, engine.abort):
            if source.random() < script.disturbed:
                deltas += engine.drain()
                if scheduler.running:
                    event(source.choice(scheduler.running))
        deltas += engine.step()
    deltas += engine.drain()
    for request in [*scheduler.running, *scheduler.waiting]:
        engine.abort(request)
    scheduler.check_empty()
    got: dict[int, tuple[int, ...]] = {}
    for delta in deltas:
        assert delta.error is None
        got[delta.request.id] = got.get(delta.request.id, ()) + delta.token_ids
    for number, (request, alone) in asked.items():
        tokens = got.get(number, ())
        alone = alone[: len(tokens)] if request.finish_reason is FinishReason.ABORT else alone
        if tokens != alone:
            assert bench.is_close(request, tokens, alone), f"{request}\n got {tokens}\nalone {alone}"
            close.add((script.shape, request.prompt, request.params.temperature))
    stats = engine.stats
    seen.update(requests=len(asked), drafted=stats.drafted_tokens, accepted=stats.accepted_tokens)
    seen.update(preemptions=stats.preemptions, hits=stats.prefix_hits, evictions=stats.prefix_evictions)


@pytest.mark.parametrize("speculation", ["drafter", "mtp", "prompt_lookup"])
def test_scripts_of_2000_steps_in_one_engine(benches: dict[str, Alone], speculation: str) -> None:
    seen: Counter[str] = Counter()
    close: set[tuple[Any, ...]] = set()  # requests that come again and again, each counted once

    @settings(max_examples=SCRIPTS, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
    @given(scripts)
    def check(script: Script) -> None:
        seen["scripts"] += 1
        live(script, speculation, benches[script.shape], seen, close)

    check()
    print(dict(seen))
    assert len(close) <= 1 and seen["scripts"] == SCRIPTS
    least = {"requests": 300, "drafted": 200, "preemptions": 100, "hits": 100, "evictions": 4}
    least["accepted"] = {"drafter": 200, "prompt_lookup": 50, "mtp": 0}[speculation]
    assert all(seen[name] >= count for name, count in least.items()), dict(seen)


def test_the_distribution_is_that_of_no_speculation(benches: dict[str, Alone]) -> None:
    """Second tokens, each drafted wrong or right, against the probabilities that temperature and top-p leave."""
    bench, choices, count = benches["qwen3_5"], (3, 50, 90, 120, 200, 250), 3000
    bias = {token: 60.0 for token in choices}
    params = SamplingParams(max_tokens=3, temperature=3.0, top_p=0.9, logit_bias=bias, ignore_eos=True)
    source = random.Random(0)
    engine = bench.engine("drafter", 48, 200, drafter=lambda tokens, k: source.choices(choices, k=k), num_draft=2)
    prompt = text_of(7, 3)
    outputs = run(engine, [(prompt, params, seed) for seed in range(count)])
    assert 0.1 < engine.stats.accepted_tokens / engine.stats.drafted_tokens < 0.5
    checked = 0
    for first in choices:
        seconds = Counter(tokens[1] for tokens in outputs if tokens[0] == first)
        logits = bench.plain.prompt_logits((*prompt, first))[-1, list(choices)].double() / params.temperature
        likely = dict(zip(choices, logits.softmax(0).tolist(), strict=True))
        kept, mass = {}, 0.0
        for token in sorted(choices, key=lambda token: -likely[token]):
            if mass < params.top_p:
                kept[token] = likely[token]
            mass += likely[token]
        total = sum(seconds.values())
        assert set(seconds) <= set(kept), "top-p holds"
        if total > 200 and len(kept) > 1:
            expected = [total * kept[token] / sum(kept.values()) for token in kept]
            assert chisquare([seconds[token] for token in kept], expected).pvalue > 1e-3
            checked += 1
    assert checked >= 2


def test_a_drafter_that_fails_ends_its_own_request(benches: dict[str, Alone]) -> None:
    bench = benches["qwen3_5"]
    good, bad, wrong, spent = (text_of(length, length) for length in (5, 6, 7, 8))

    def draft(tokens: tuple[int, ...], num_draft: int) -> Any:
        if tokens[:6] == bad:
            raise KeyError("no idea")
        if tokens[:8] == spent:
            return iter([1, 2])
        return [1 << 40] if tokens[:7] == wrong else []

    engine = bench.engine("drafter", drafter=draft)
    requests = [engine.add_request(prompt, VARIANTS[0], 0) for prompt in (good, bad, wrong, spent)]
    errors: dict[int, Exception] = {}
    while engine.has_work:
        errors |= {delta.request.id: delta.error for delta in engine.step() if delta.error}
    assert tuple(requests[0].tokens) == good + bench.alone(good, VARIANTS[0], 0)
    assert isinstance(errors[requests[1].id], KeyError) and "from 0 to 263" in str(errors[requests[2].id])
    assert "must return a sequence" in str(errors[requests[3].id])
    engine.scheduler.check_empty()


def test_drafts_stop_at_an_end_token_and_at_the_length_limit(benches: dict[str, Alone]) -> None:
    bench = benches["qwen3_5"]
    seen: list[Entry] = []
    engine = bench.engine("drafter", drafter=lambda tokens, k: [1, END_OF_TEXT, 2, 3, 4][:k], num_draft=5)
    launch = engine.runner.launch

    def watch(scheduled: Scheduled) -> Launched:
        seen.append(scheduled.plan.entries[0])
        return launch(scheduled)

    engine.runner.launch = watch  # type: ignore[method-assign]
    prompt = text_of(CONTEXT - 9, 1)
    run(engine, [(prompt, SamplingParams(max_tokens=50, temperature=0, ignore_eos=True), 0)])
    run(engine, [(prompt[:5], SamplingParams(max_tokens=20, temperature=0), 0)])
    ends = [entry.start + entry.num_new for entry in seen if entry.drafts]
    assert max(ends) == CONTEXT - 1, "the token sampled after the last draft is the last that fits"
    assert {entry.drafts for entry in seen if entry.start < 20} <= {(), (1,), (1, END_OF_TEXT)}
    assert any(entry.num_draft == 5 for entry in seen)


def test_synthetic_acceptance(benches: dict[str, Alone]) -> None:
    engine = benches["qwen3_5"].engine(
        "drafter", drafter=lambda tokens, k: [0] * k, num_draft=5, synthetic_acceptance=3.5
    )
    params = SamplingParams(max_tokens=150, temperature=0, ignore_eos=True)
    run(engine, [(text_of(5, seed), params, 0) for seed in range(6)])
    stats = engine.stats
    assert 2.3 < 5 * stats.accepted_tokens / stats.drafted_tokens < 2.7


# What the steps would do without a remedy, one at a time: each must change tokens.


def _no_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted drafts that the next step does not apply."""
    commit = runner.commit_tokens

    def without(*arguments: Any) -> None:
        before = arguments[7].clone()
        commit(*arguments)
        arguments[7].copy_(before)

    monkeypatch.setattr(runner, "commit_tokens", without)


def _kind_by_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 1 + k tokens taken for a verify sequence."""
    kind = Scheduler._kind
    by_shape = staticmethod(lambda request, size: Kind.VERIFY if size == 4 else kind(request, size))
    monkeypatch.setattr(Scheduler, "_kind", by_shape)


def _short_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that overwrite what committed tokens still read."""
    monkeypatch.setattr(runner, "ring_length", lambda reach, max_draft: reach + 1)


def _stale_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that come to the history after the step's tokens were read from it."""
    prepare, late = runner.prepare, []
    monkeypatch.setattr(sequences, "place_drafts", lambda *arguments: late.append(arguments))

    def early(*arguments: Any) -> sequences.SequenceTable:
        table = prepare(*arguments)
        while late:
            place_drafts(*late.pop())
        return table

    monkeypatch.setattr(runner, "prepare", early)


def _first_block_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of index keys that a rejected draft completed, and that is not pooled again."""
    pool, done = indexer.pool_blocks, set()

    def once(raw: Tensor, blocks: Tensor, *rest: Any) -> None:
        position, place, _, size, _ = rest[3:]
        before = blocks.clone()
        pool(raw, blocks, *rest)
        for index in place[(position + 1) % size == 0].tolist():
            block = blocks.data_ptr(), index // size
            if block in done:
                blocks.view(-1, blocks.shape[-1])[block[1]] = before.view(-1, blocks.shape[-1])[block[1]]
            done.add(block)

    monkeypatch.setattr(indexer, "pool_blocks", once)


FAULTS = [_no_pending, _kind_by_shape, _short_rings, _stale_drafts, _first_block_keys]


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_each_remedy_is_needed(
    benches: dict[str, Alone], monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None] | None
) -> None:
    bench = benches["qwen4_exp"]
    params = SamplingParams(max_tokens=60, temperature=0.7, ignore_eos=True)
    asked = [(text_of(length, length), params, 3) for length in (4, 9)]
    alone = [bench.alone(*each) for each in asked]
    turns = iter(range(10_000))  # one draft right and two wrong; every third step drafts nothing

    def draft(tokens: tuple[int, ...], num_draft: int) -> list[int]:
        return [] if next(turns) % 3 == 2 else [*_next(bench, tokens, 1), 0, 0]

    if fault is not None:
        fault(monkeypatch)
    engine, broken = bench.engine("drafter", 2, drafter=draft), False
    try:
        got = run(engine, asked)
    except Exception:  # a missing remedy may break anything
        if fault is None:
            raise
        broken = True
    assert (broken or got != alone) == (fault is not None)


def test_adaptive_drafting_stops_where_it_loses(benches: dict[str, Alone]) -> None:
    bench = benches["qwen3_5"]
    engine = bench.engine("drafter", drafter=lambda tokens, k: [0] * k, adaptive_drafts=True)
    params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True, logit_bias={0: -100})
    run(engine, [(text_of(5, 1), params, 0)])
    assert 0 < engine.stats.drafted_tokens < 60 and engine.stats.accepted_tokens == 0
