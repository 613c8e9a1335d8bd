"""The prefix cache: a hit gives the tokens of a cold run, restores everything or nothing, and keeps its books."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deltagram import SamplingParams
from deltagram.attention.cache import PagePool
from deltagram.engine import prefix as prefix_module
from deltagram.engine.engine import Engine
from deltagram.engine.prefix import PrefixCache, chain
from deltagram.engine.request import Request
from deltagram.engine.runner import Runner
from deltagram.testing.alone import Alone, run, text_of
from deltagram.testing.checkpoints import TINY_SHAPES, write_tiny_checkpoint

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=6, temperature=0.9, ignore_eos=True)


@pytest.fixture(scope="module", params=["qwen4_exp", "qwen4_exp_packed", "qwen3_5"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    folder = tmp_path_factory.mktemp("tiny") / request.param
    return Alone(write_tiny_checkpoint(folder, mtp=True, **TINY_SHAPES[request.param]))


def engine_with(bench: Alone, checkpoints: int, speculation: str = "off", k: int = 3, **options: Any) -> Engine:
    kept = checkpoints * bench.checkpoint_bytes(0 if speculation == "off" else k)
    return bench.engine(speculation, num_draft=k, prefix_cache_bytes=kept, **options)


def ask(engine: Engine, prompt: tuple[int, ...], salt: str = "", params: SamplingParams = GREEDY) -> Request:
    """A request run to its end."""
    request = engine.make_request(prompt, params, 1, salt=salt)
    engine.add(request)
    while engine.has_work:
        assert all(delta.error is None for delta in engine.step())
    return request


@pytest.mark.parametrize("speculation", ["off", "drafter", "mtp", "prompt_lookup"])
@pytest.mark.parametrize(("k", "left"), sorted({(k, left) for k in range(1, 6) for left in (1, k, 1 + k)}))
def test_a_hit_leaves_a_few_tokens(bench: Alone, speculation: str, k: int, left: int) -> None:
    drafter = bench.scripted(0.7, 1) if speculation == "drafter" else None
    engine = engine_with(bench, 4, speculation, k, drafter=drafter)
    for params in (GREEDY, DRAWN):
        hits = engine.stats.prefix_hits
        for own in (5, 6):
            prompt = text_of(128, 3) + text_of(left, own)
            assert ask(engine, prompt, params=params).tokens[len(prompt) :] == list(bench.alone(prompt, params, 1))
        assert engine.stats.prefix_hits == hits + (1 if params is GREEDY else 2)
    assert engine.stats.prefix_tokens == 3 * 128
    engine.scheduler.check_empty()


@pytest.mark.parametrize("speculation", ["off", "drafter", "mtp"])
def test_shared_beginnings_of_1_to_200_tokens(bench: Alone, speculation: str) -> None:
    """Every length, all in one engine, whose pool is too small for all."""
    drafter = bench.scripted(0.7, 1) if speculation == "drafter" else None
    engine = engine_with(bench, 6, speculation, drafter=drafter, slots=4)
    asked = [
        (text_of(200, 9)[:shared] + text_of(own, shared + own), GREEDY, 0)
        for shared in range(1, 201)
        for own in (1, 20)
    ]
    assert run(engine, asked) == [bench.alone(*each) for each in asked]
    stats = engine.stats
    assert stats.prefix_hits > 250 and stats.prefix_evictions > 50
    assert stats.prefix_hits + sum(stats.prefix_misses.values()) == len(asked)
    engine.scheduler.check_empty()


def test_a_preempted_request_goes_on_from_a_checkpoint(bench: Alone) -> None:
    engine = engine_with(bench, 2)
    prompt = text_of(150, 3)
    request = engine.add_request(prompt, GREEDY, 0)
    for _ in range(4):
        engine.step()
    engine.scheduler.preempt(request)
    while engine.has_work:
        engine.step()
    assert request.tokens[150:] == list(bench.alone(prompt, GREEDY, 0))
    assert engine.stats.prefix_hits == 1 and engine.stats.prefix_tokens == 128
    engine.scheduler.check_empty()


def test_every_miss_has_its_reason(bench: Alone) -> None:
    engine = engine_with(bench, 1)
    first, other = text_of(70, 1), text_of(70, 2)
    ask(engine, first[:64])
    ask(engine, first)
    ask(engine, first[:64] + other[:3], salt="another")
    assert engine.stats.prefix_misses == {"too_short": 1, "no_entry": 1, "salt": 1}
    ask(engine, other)  # pushes what the first ones left out
    ask(engine, first)
    wanting = engine.make_request(first, GREEDY, 0, wants_prompt_logits=True)
    engine.add(wanting)
    while engine.has_work:
        engine.step()
    misses = engine.stats.prefix_misses
    assert (misses["no_entry"], misses["evicted"], misses["prompt_logits"]) == (2, 1, 1)
    assert len(wanting.prompt_logits[0]) == 70, "all of them are computed"


def test_a_beginning_is_kept_where_it_is_seen_to_be_shared(bench: Alone) -> None:
    """Long prompts that share 128 tokens: the second one finds nothing there yet, the third one does."""
    engine = engine_with(bench, 8)
    prompts = [text_of(128, 3) + text_of(70, own) for own in (5, 6, 7)]
    for prompt in prompts:
        assert ask(engine, prompt).tokens[198:] == list(bench.alone(prompt, GREEDY, 1))
    assert engine.stats.prefix_misses == {"no_entry": 1, "no_checkpoint": 1}
    assert engine.stats.prefix_hits == 1 and engine.stats.prefix_tokens == 128


def test_salts_share_nothing(bench: Alone) -> None:
    engine = engine_with(bench, 8)
    prompt = text_of(130, 3)
    for salt in ("a", "b", "a", "b", ""):
        ask(engine, prompt, salt)
    assert engine.stats.prefix_hits == 2 and engine.stats.prefix_misses == {"no_entry": 1, "salt": 2}


def test_the_least_recently_used_goes_first() -> None:
    pages = PagePool(8)
    cache = PrefixCache(2, 64, pages)

    def make(number: int) -> Request:
        request = Request(number, text_of(65, number), GREEDY, 0, 99, frozenset())
        cache.find(request)
        cache.admit(request, None)
        request.pages, request.computed = [pages.take(number)], 64
        return request

    one, two, three = (make(number) for number in (1, 2, 3))
    for request in (one, two):
        made, freed = cache.reserve(request)
        assert made is not None and not freed
        cache.keep(made)
    again = Request(4, one.prompt, GREEDY, 0, 99, frozenset())
    found = cache.find(again)
    assert found is not None and found.pages == tuple(one.pages)
    cache.admit(again, found)
    for request in (one, two):
        assert pages.give_back(request.pages, request.id) == []
    made, freed = cache.reserve(three)
    assert made is not None and freed == two.pages, "it was used last when it was made"
    assert cache.find(again) is found and cache.num_evictable_pages == 0, "what is half made may not go"
    cache.drop(made)
    for request in (three, again):
        pages.give_back(request.pages, request.id)
    cache.check()
    assert cache.evict() == list(found.pages) and cache.is_empty
    pages.check_empty()


def test_shared_pages_are_only_read_and_have_one_copy(bench: Alone) -> None:
    engine = engine_with(bench, 2, num_pages=9)
    first = ask(engine, text_of(128, 3) + (1, 2))
    held = [page for page in range(9) if engine.scheduler.pages._holders.get(page)]
    assert len(held) == 2, "the request's own are free again"
    before = [pool[held].clone() for pool in engine.runner._page_pools]
    requests = [engine.add_request(first.prompt[:128] + text_of(3, own), DRAWN, own) for own in range(3)]
    engine.step()
    assert engine.stats.prefix_hits == 3
    assert {tuple(request.pages[:2]) for request in requests} == {tuple(held)}
    assert engine.scheduler.pages.num_free == 9 - 2 - 3
    while engine.has_work:
        engine.step()
    assert all(torch.equal(pool[held], kept) for pool, kept in zip(engine.runner._page_pools, before, strict=True))


def test_requests_get_the_pages_that_the_cache_holds(bench: Alone) -> None:
    """A pool of pages for one request: what was kept must go, and no request is pushed out for it."""
    engine = engine_with(bench, 8, num_pages=4)
    prompts = [text_of(200, number) for number in range(3)]
    assert [ask(engine, prompt).tokens[200:] for prompt in prompts] == [
        list(bench.alone(prompt, GREEDY, 1)) for prompt in prompts
    ]
    assert engine.stats.prefix_evictions >= 2 and engine.stats.preemptions == 0
    engine.scheduler.check_empty()


@pytest.mark.parametrize("how", ["abort", "fail"])
def test_a_checkpoint_counts_once_its_step_has_ended_well(bench: Alone, how: str) -> None:
    engine = engine_with(bench, 2, ahead=True)
    request = engine.add_request(text_of(70, 3), GREEDY, 0)
    if how == "fail":
        engine.runner.retire = lambda launched: (_ for _ in ()).throw(OSError("lost"))  # type: ignore[method-assign]
    engine.step()
    assert engine.prefixes is not None and engine.prefixes.is_empty and engine.prefixes.num_used == 1
    if how == "abort":
        engine.abort(request)
    while engine.has_work:
        engine.step()
    assert engine.prefixes.is_empty
    engine.scheduler.check_empty()


def test_a_request_waits_for_pages_of_a_checkpoint_that_is_not_made_yet(bench: Alone) -> None:
    """Its step still runs, so nothing can be taken from it; and nothing is lost meanwhile."""
    engine = engine_with(bench, 2, ahead=True, num_pages=3, spare_tokens=100)
    first = engine.add_request(text_of(140, 3), GREEDY, 0)
    engine.step()
    engine.abort(first)
    prompt = text_of(180, 4)
    second = engine.add_request(prompt, GREEDY, 0)
    while engine.has_work:
        engine.step()
    assert second.tokens[180:] == list(bench.alone(prompt, GREEDY, 0))
    engine.scheduler.check_empty()


# What would happen without a remedy, one at a time: each must change tokens or the books.


def _no_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages taken for state."""
    monkeypatch.setattr(Runner, "_places", lambda self, slot, index: ([], []))


def _no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """State taken for pages: the row has those of whoever had it before."""

    def stale(self: Runner, request: Request) -> None:
        self.page_table[request.slot] = len(self._page_pools[0]) - 1

    monkeypatch.setattr(Runner, "_share_pages", stale)


def _not_the_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recurrent states without the inputs of convolutions."""
    places = Runner._places
    monkeypatch.setattr(Runner, "_places", lambda *who: tuple(part[::2] for part in places(*who)))


def _late(monkeypatch: pytest.MonkeyPatch) -> None:
    """States of one place, kept for another."""
    reserve = PrefixCache.reserve

    def shifted(self: PrefixCache, request: Request) -> Any:
        made, freed = reserve(self, request)
        if made is not None and request.computed > 64:
            del self._pending[made.key]
            made = dataclasses.replace(made, key=request.chain[0], position=64)
            self._pending[made.key] = made
        return made, freed

    monkeypatch.setattr(PrefixCache, "reserve", shifted)


def _by_last_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beginnings told apart by their last unit alone."""
    plain = chain

    def last(tokens: Any, salt: str, unit: int) -> Any:
        return [plain(tokens[end - unit : end], salt, unit)[0] for end in range(unit, len(tokens) + 1, unit)]

    monkeypatch.setattr(prefix_module, "chain", last)


FAULTS = [_no_states, _no_pages, _not_the_rings, _late, _by_last_unit]


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_each_remedy_is_needed(
    bench: Alone, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None] | None
) -> None:
    if fault is not None:
        fault(monkeypatch)
    engine, broken = engine_with(bench, 4), False
    common = text_of(64, 8)
    asked = [(text_of(64, begin) + common + text_of(own, own), DRAWN, 1) for begin, own in ((1, 2), (1, 3), (2, 4))]
    asked.append((text_of(64, 1) + (1, 2), DRAWN, 1))
    alone = [list(bench.alone(*each)) for each in asked]
    try:
        got = [ask(engine, each[0], params=DRAWN).tokens[len(each[0]) :] for each in asked]
        broken = got != alone
    except (AssertionError, RuntimeError):
        broken = True
    assert broken == (fault is not None)


def test_keys_are_of_whole_units_and_of_all_before() -> None:
    text = text_of(200, 1)
    assert [len(chain(text[:n], "", 64)) for n in (0, 63, 64, 127, 128, 200)] == [0, 0, 1, 1, 2, 3]
    changed = (text[0] + 1, *text[1:])
    pairs = list(zip(chain(text, "", 64), chain(changed, "", 64), strict=True))
    assert all(one != other for one, other in pairs)
    assert chain(text[:128], "x", 64)[1][1] == chain(text, "", 64)[1][1]


def test_the_checkpoints_of_a_folder_are_not_the_cache(tmp_path: Path) -> None:
    """Without memory for it there is no cache, and nothing is counted."""
    bench = Alone(write_tiny_checkpoint(tmp_path / "a", mtp=True, **TINY_SHAPES["qwen3_5"]))
    engine = bench.engine("off")
    ask(engine, text_of(130, 1))
    assert engine.prefixes is None and engine.stats.prefix_misses == {} and engine.stats.max_prefix_checkpoints == 0
