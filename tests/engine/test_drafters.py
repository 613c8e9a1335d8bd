"""What drafts: prompt lookup, what drafts are worth, and what a drafter or its settings are refused for."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deltagram import LLM, SamplingParams
from deltagram.engine.request import Request
from deltagram.engine.speculate import PROBE_AFTER, Gain, PromptLookup, Speculation, StepCost
from deltagram.testing.alone import CONTEXT, text_of
from deltagram.testing.checkpoints import TINY_SHAPES, write_tiny_checkpoint


def test_prompt_lookup_finds_what_followed_last() -> None:
    lookup = PromptLookup()
    assert lookup([1, 2, 3, 4, 9, 2, 3, 4], 2) == [9, 2]
    assert lookup([1, 2, 3, 4, 9, 2, 3, 4, 7, 2, 3, 4], 1) == [7], "the last time"
    assert lookup([1, 2, 3, 4, 9, 2, 3, 4, 7, 2, 3, 4, 8], 3) == []
    assert PromptLookup()([5, 6, 5, 6, 5], 5) == [6, 5, 6, 5, 6], "a period goes on"
    assert PromptLookup()([5], 3) == [] == PromptLookup()([], 3)
    text = list(text_of(300, 1)) * 2
    grown = PromptLookup()
    for length in range(1, len(text), 7):
        assert grown(text[:length], 4) == PromptLookup()(text[:length], 4)
    assert PromptLookup()(text[:400], 5) == text[400:405]


def test_drafts_are_worth_what_they_gain() -> None:
    gain = Gain()
    for _ in range(40):
        gain.learn(3, 4)
    assert gain.worth(5, 0.3) == 5
    for _ in range(40):
        gain.learn(3, 1)
    assert gain.worth(5, 0.3) == 0 and gain.quiet == 0
    for _ in range(PROBE_AFTER):
        gain.learn(0, 1)
    assert gain.worth(5, 0.3) == 1, "now and then one is tried"
    cost = StepCost()
    for tokens in (1, 6, 1, 4):
        cost.learn(tokens, 1e-3 + 2e-4 * tokens)
    cost.learn(1, 1.0)  # somebody else had the machine
    for _ in range(60):
        cost.learn(1, 1.2e-3)
    assert cost.price(1) == pytest.approx(2e-4 / 1.2e-3, rel=0.01)
    assert cost.price(4) == pytest.approx(2e-4 / 4.5e-4, rel=0.01)


def test_the_front_door_takes_a_drafter(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "tiny", **TINY_SHAPES["qwen3_5"])
    options: dict[str, Any] = {"device": "cpu", "max_context": CONTEXT, "num_draft": 2}
    llm = LLM(folder, drafter=lambda tokens, num_draft: [tokens[-1]] * num_draft, **options)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    plain = LLM(folder, **options).generate([1, 2, 3], params)
    assert llm.generate([1, 2, 3], params) == plain and llm.stats.drafted_tokens > 0
    with pytest.raises(ValueError, match="mtp"):
        LLM(folder, speculation="mtp", **options)


def drafted(drafts: Any) -> tuple[int, ...]:
    """What a request has of a drafter's answer, of a vocabulary of 100."""
    request = Request(0, (1, 2), SamplingParams(), 0, 50, frozenset())
    Speculation(3, False, lambda tokens, num_draft: drafts).propose(request, 1, 100)
    return request.drafts


@pytest.mark.parametrize("family", ["qwen3_5", "qwen4_exp"])
def test_a_head_that_nobody_asks_only_remembers(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And has the cache that it would have had, when somebody asks again."""
    folder = write_tiny_checkpoint(tmp_path / "tiny", **TINY_SHAPES[family] | {"mtp": True})
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)

    def run(remembers: bool) -> tuple[Any, list[tuple[int, ...]], int]:
        llm = LLM(
            folder, device="cpu", dtype="float32", max_context=CONTEXT, speculation="mtp", num_draft=2,
            adaptive_drafts=False,
        )  # fmt: skip
        head, scheduler, drafted, remembered = llm.engine.model.mtp, llm.engine.scheduler, [], [0]
        assert head is not None
        draft, remember, wanted = head.draft, head.remember, scheduler._wanted

        def drafting(*arguments: Any) -> Any:
            made = draft(*arguments)
            drafted.append(tuple(made[0].argmax(-1).tolist()))
            return made

        def remembering(*arguments: Any) -> None:
            remembered[0] += 1
            (remember if remembers else draft)(*arguments)

        monkeypatch.setattr(head, "draft", drafting)
        monkeypatch.setattr(head, "remember", remembering)
        later = lambda request, sequences: wanted(request, sequences) if len(request.tokens) > 80 else 0  # noqa: E731
        monkeypatch.setattr(scheduler, "_wanted", later)
        return llm.generate(list(range(5, 75)), params), drafted, remembered[0]

    tokens, drafted, remembered = run(remembers=True)
    assert drafted and remembered > 5
    assert (tokens, drafted, remembered) == run(remembers=False)


def test_drafts_are_whatever_stands_for_integers() -> None:
    for drafts in ([5, 6], np.array([5, 6], np.int16), [np.int64(5), np.uint8(6)], torch.tensor([5, 6])):
        assert drafted(drafts) == (5, 6) and all(type(draft) is int for draft in drafted(drafts))
    assert drafted(range(100)) == (0, 1, 2) and drafted(np.zeros(0, np.int64)) == ()
    for wrong in (5.0, np.float32(5), True, np.True_, "5", None, -1, 100, np.int64(100), [5], np.zeros((1, 2), int)):
        with pytest.raises(ValueError, match="drafts must be token ids from 0 to 99, got "):
            drafted([4, wrong])
    with pytest.raises(ValueError, match="drafts must be token ids from 0 to 99, got True"):
        drafted(torch.tensor([True, False]))
    for answer in (5, None, iter([5]), {5}, np.int64(5), np.array(5), torch.tensor(5)):
        with pytest.raises(ValueError, match="a drafter must return a sequence of token ids, such as a list, got "):
            drafted(answer)


def test_settings_of_speculation_are_checked_together() -> None:
    wrong: dict[str, Any] = {
        "speculation": "guess",
        "num_draft": 6,
        "synthetic_acceptance": 9,
        "prefix_cache_bytes": -1,
    }
    with pytest.raises(ValueError) as error:
        LLM(device="cpu", **wrong, adaptive_drafts=1)
    assert all(name in str(error.value) for name in (*wrong, "adaptive_drafts"))
    with pytest.raises(ValueError, match=r"at least 127.*num_draft drafts"):
        LLM(device="cpu", speculation="prompt_lookup", max_num_tokens=126)
    with pytest.raises(ValueError, match=r"give both, as in LLM\(drafter=f\), or none"):
        LLM(device="cpu", speculation="drafter")
    with pytest.raises(ValueError, match="a drafter must be a function of tokens and a number of drafts, got 5"):
        LLM(device="cpu", drafter=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"checkpoint of .* bytes"):
        LLM(device="cpu", prefix_cache_bytes=10)
    with pytest.raises(ValueError, match="prefix_cache_bytes is 1000000000000000000, more than cpu has free"):
        LLM(device="cpu", prefix_cache_bytes=10**18)  # more than addresses reach
