"""Ranks that hold the tables of one model together generate, each for its own requests, what one process does."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deltagram import LLM, SamplingParams
from deltagram.engine.replicas import Replicas
from deltagram.engine.scheduler import Scheduled
from deltagram.parallel.groups import Group
from deltagram.step.buckets import Ladder
from deltagram.step.plan import Entry, Kind, StepPlan
from deltagram.testing.checkpoints import write_tiny_checkpoint
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
