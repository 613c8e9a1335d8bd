"""Ranks that hold the tables of one model together generate, each for its own requests, what one process does."""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deltagram import LLM, SamplingParams
from deltagram.engine.replicas import Replicas, _agree_on_crossover
from deltagram.engine.scheduler import Scheduled
from deltagram.ngram.stores import HostStore
from deltagram.parallel.groups import DisagreementError, Group
from deltagram.step.buckets import Ladder
from deltagram.step.plan import Entry, Kind, StepPlan
from deltagram.testing.alone import text_of
from deltagram.testing.checkpoints import write_tiny_checkpoint
from deltagram.testing.ngram import FORMATS
from deltagram.testing.ranks import Ranks

PROMPTS = ["the cat sat on the mat", "aaaa" * 40, "x", "once upon a time", "to be or not", "gram", "delta " * 15, "end"]
SETTINGS = {"device": "cpu", "dtype": "float32"}
CASES = [
    {"ngram_placement": "device", "ngram_exchange": "collective"},
    {"ngram_placement": "cached:1KiB:disk", "ngram_exchange": "collective", "ngram_split": "rows"},
    {"ngram_placement": "host", "ngram_exchange": "peer"},
    {"ngram_placement": "shared"},
]


def params(greedy: bool) -> SamplingParams:
    return SamplingParams(max_tokens=12, temperature=0.0 if greedy else 0.8, seed=3, ignore_eos=True)


def of_rank(rank: int, size: int) -> list[str]:
    """Rank 1 has one prompt, of ranks 2 and 3 one none: the others go on without them."""
    return {0: PROMPTS[: 6 if size == 2 else 4], 1: PROMPTS[6:7], 2: [], 3: PROMPTS[7:]}[rank]


def generated(
    group: Group, folder: Path, settings: dict[str, str]
) -> tuple[list[tuple[int, ...]], tuple[str, ...], bool]:
    llm = LLM(folder, group=group, **{"dtype": "float32", "max_num_sequences": 3} | settings)
    tokens = []
    for greedy in (True, False):
        prompts = of_rank(group.rank, group.size)
        if prompts:
            tokens += [c.outputs[0].token_ids for c in llm.generate(prompts, params(greedy))]
        else:
            assert llm.assist()
    if group.rank == 0:
        llm.close()
    else:
        assert not llm.assist(), "rank 0 has left"
    return tokens, llm.notes, llm.engine.runner.graphs is not None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def alone(folder):
    """Token ids by prompt and by whether they are greedy, of one process."""
    llm = LLM(folder, **SETTINGS)
    return {
        (prompt, greedy): completion.outputs[0].token_ids
        for greedy in (True, False)
        for prompt, completion in zip(PROMPTS, llm.generate(PROMPTS, params(greedy)), strict=True)
    }


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request):
    with Ranks(request.param) as group:
        yield group


@pytest.mark.parametrize("settings", CASES, ids=lambda case: " ".join(case.values()))
def test_replicas_generate_the_tokens_of_one_process(ranks, folder, alone, settings):
    size = len(ranks.pipes)
    for rank, (tokens, notes, _) in enumerate(ranks.run(generated, folder, settings)):
        prompts = of_rank(rank, size)
        assert tokens == [alone[prompt, greedy] for greedy in (True, False) for prompt in prompts]
        if settings["ngram_placement"] == "shared":
            assert notes[-1] == f"{size} ranks share one copy of the memory tables"
        else:
            way = settings.get("ngram_split", "heads")
            said = f"the memory tables are split by {way} over {size} ranks; exchange: {settings['ngram_exchange']}"
            assert notes[-1] == said


DRAFTING = {"dtype": "float32", "max_context": 256, "max_num_sequences": 3}
DRAFTERS = [
    {"speculation": "mtp", "ngram_exchange": "peer"},
    {"speculation": "prompt_lookup", "ngram_exchange": "collective", "ngram_split": "rows"},
]


def completed(llm: LLM, rank: int) -> list[tuple[int, ...]]:
    """What prompts that begin alike, other ones on every rank, are completed by; the last of it repeats itself."""
    prompts = [[*text_of(128, 3), *text_of(5 + i, 10 * rank + i)] for i in range(3)] + [[*text_of(3, rank)] * 20]
    two_tokens = SamplingParams(max_tokens=20, temperature=0.8, seed=3, logit_bias={5: 50.0, 6: 50.0})
    asked = params(True), params(False), two_tokens
    return [c.outputs[0].token_ids for each in asked for c in llm.generate(prompts, each)]


def drafted(group: Group, folder: Path, settings: dict[str, str]) -> tuple[list[tuple[int, ...]], list[int]]:
    """Token ids; and how many tokens were drafted, how many of them accepted, and how many prefixes found."""
    llm = LLM(folder, group=group, adaptive_drafts=False, prefix_cache_bytes=1 << 22, **DRAFTING, **settings)
    tokens = completed(llm, group.rank)
    if group.rank == 0:
        llm.close()
    else:
        assert not llm.assist()
    return tokens, [llm.stats.drafted_tokens, llm.stats.accepted_tokens, llm.stats.prefix_hits]


def read_slowly(group: Group, folder: Path) -> list[int]:
    llm = LLM(folder, group=group, **SETTINGS)
    llm.generate(PROMPTS[0], params(True))
    group.watchdog.deadline, tokens = 1.0, []
    for chunk in llm.stream(PROMPTS[group.rank], params(True)):
        tokens += chunk.token_ids
        if group.rank == 1 and len(tokens) == 3:
            time.sleep(3)
    return tokens


def test_a_rank_whose_stream_is_read_slowly_is_not_missing(folder, alone):
    with Ranks(2) as ranks:
        found = ranks.run(read_slowly, folder)
    assert [tuple(tokens) for tokens in found] == [alone[PROMPTS[rank], True] for rank in range(2)]


def test_replicas_that_draft_and_find_prefixes_generate_the_tokens_of_one_process_that_does_neither(tmp_path):
    write_tiny_checkpoint(tmp_path, mtp=True)
    llm = LLM(tmp_path, device="cpu", **DRAFTING)
    wanted = [completed(llm, rank) for rank in range(2)]
    with Ranks(2) as ranks:
        for settings in DRAFTERS:
            found = ranks.run(drafted, tmp_path, settings)
            assert [tokens for tokens, _ in found] == wanted, settings
            assert all(all(counts) for _, counts in found), (settings, found)


def disagree(group: Group) -> str:
    """What is said where rank 1 has agreed on other things before."""
    replicas = Replicas(group, None)
    replicas.agree(None, False, None)
    if group.rank == 1:
        replicas._history = "1" * 16
    try:
        replicas.agree(None, False, None)
    except DisagreementError as error:
        return str(error)
    return ""


def test_ranks_that_have_agreed_on_other_things_are_told_before_they_step(ranks):
    said = "rank 1 has another history of steps than rank 0; nothing of it was run"
    assert ranks.run(disagree) == [said] * len(ranks.pipes)


def crossovers(group: Group) -> tuple[list[int], int]:
    """Of two tables in host memory, one of them cached and one of whom it is known: what is agreed on, and how often
    this rank measured, which finds something else on every rank."""
    measured = []
    host, known = (HostStore(4, FORMATS["ue8m0"], torch.device("cpu"), crossover) for crossover in (None, 7))
    for store in (host, known):
        store.by_host = object()  # as on a card
        store.measure_crossover = lambda: measured.append(1) or 100 + group.rank  # type: ignore[method-assign]
    _agree_on_crossover([SimpleNamespace(below=host), known], group)  # type: ignore[list-item]
    return [host.crossover, known.crossover], len(measured)


def test_rank_0_measures_for_all_which_lookups_are_gathered(ranks):
    others = len(ranks.pipes) - 1
    assert ranks.run(crossovers) == [([100, 7], 1), *[([100, 7], 0)] * others]


def agreed_buckets(group: Group) -> list[str]:
    """What this rank runs in a few rounds, of captured buckets, as a text."""
    replicas, ladder = Replicas(group, None), Ladder.of(64, 4)

    def scheduled(tokens: int, mixed: bool) -> Scheduled | None:
        if not tokens:
            return None
        kind = Kind.PREFILL if mixed else Kind.DECODE
        sizes = [tokens] if mixed else [1] * tokens
        entries = tuple(Entry(row, 0, row, kind, size, 0) for row, size in enumerate(sizes))
        return Scheduled(StepPlan(5, ladder.fit(tokens, len(sizes), mixed), entries), (), ())

    found = []
    rounds = [((3, False), (1, False)), ((2, False), (40, True)), ((0, False), (2, False)), ((0, False), (0, False))]
    for turn, round in enumerate(rounds):
        own = scheduled(*round[group.rank])
        step = replicas.agree(own, own is not None or (turn == 3 and group.rank == 1), ladder)
        found.append(f"{step.plan.bucket} {step.plan.num_tokens}" if step else f"nothing, anyone={replicas.anyone}")
    return found


def test_ranks_of_captured_steps_run_one_bucket(ranks):
    """A rank without work pads; one that waits for a step in flight keeps the others."""
    if len(ranks.pipes) == 2:
        last = "nothing, anyone=True"
        assert ranks.run(agreed_buckets) == [
            ["3x3t 3", "40x4m 2", "2x2t 0", last],
            ["3x3t 1", "40x4m 40", "2x2t 2", last],
        ]


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from deltagram.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)


def test_the_command_runs_as_several_ranks_and_says_once_on_each_what_cannot_be(folder, alone):
    asked = "generate", PROMPTS[0], "--model", str(folder), "--device", "cpu", "--temperature", "0", "--ranks", "2"
    ran = run_command(*asked, "--max-tokens", "12", "--ignore-eos", "--json", "--set", "ngram_exchange=collective")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("token_ids") == 2, "of the prompt and of the output, once"
    assert str(list(alone[PROMPTS[0], True])) in ran.stdout
    refused = run_command(*asked, "--set", "ngram_exchange=ring")
    assert refused.returncode == 2 and refused.stderr.count("ngram_exchange is 'ring'") == 2
    alone_refused = run_command(*asked[:-2], "--set", "ngram_split=rows")
    assert alone_refused.returncode == 2 and "this process is alone: see --ranks" in alone_refused.stderr


def settings_of_its_own(group: Group, folder: Path) -> str:
    try:
        LLM(folder, group=group, max_num_sequences=2 + (group.rank == 1))
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_of_other_settings_are_refused_on_every_rank(ranks, folder):
    said = ranks.run(settings_of_its_own, folder)
    assert said == ["rank 1 has another model or other settings than rank 0"] * len(ranks.pipes)


@pytest.fixture(scope="module")
def alone_on_a_card(folder):
    """Greedy token ids by prompt, of one process."""
    llm = LLM(folder, device="cuda", dtype="float32")
    completions = llm.generate(PROMPTS, params(True))
    return {prompt: each.outputs[0].token_ids for prompt, each in zip(PROMPTS, completions, strict=True)}


@pytest.fixture(scope="module", params=["cuda:0", "cuda"], ids=["one card", "a card each"])
def cards(request):
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs a card a rank")
    with Ranks(2, request.param) as ranks:
        yield request.param, ranks


@pytest.mark.gpu
@pytest.mark.parametrize("exchange", ["collective", "peer"])
@pytest.mark.parametrize("run_ahead", [True, False], ids=["ahead", "inline"])
def test_replicas_on_cards_generate_the_tokens_of_one_process(cards, folder, alone_on_a_card, exchange, run_ahead):
    """Captured, but for collectives that the host carries; peer memory is enough for steps of so few tokens."""
    device, ranks = cards
    placement = "host" if run_ahead else "device"
    settings = {"ngram_exchange": exchange, "ngram_placement": placement, "run_ahead": run_ahead, "max_num_tokens": 66}
    for rank, (tokens, _, captured) in enumerate(ranks.run(generated, folder, settings)):
        assert captured == (device == "cuda" or exchange == "peer")
        prompts = of_rank(rank, 2)
        assert tokens[: len(prompts)] == [alone_on_a_card[prompt] for prompt in prompts]
