"""What a constraint does to its own sequence, and to nobody else's."""

import numpy as np
import pytest
import torch

from deltagram import LLM, SamplingParams
from deltagram.engine.request import FinishReason
from deltagram.engine.sampler import SampleRow, SamplingTensors, sample
from deltagram.testing.checkpoints import END_OF_TEXT, write_tiny_checkpoint

PROMPT = b"It was a fine morning"


class Digits:
    """Digits, until there are `count` of them; a `broken` one fails at the second."""

    def __init__(self, count: int, broken: bool = False) -> None:
        self.count, self.broken = count, broken
        self.seen: list[int] = []
        self.allowed = np.zeros(264, bool)
        self.allowed[ord("0") : ord("9") + 1] = True

    @property
    def finished(self) -> bool:
        return len(self.seen) == self.count

    def accept(self, token: int) -> None:
        self.seen.append(token)
        if self.broken and len(self.seen) == 2:
            raise ValueError("lost count")


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return LLM(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen4_exp"), device="cpu", poison=True)


def run(llm, constraints, **params):
    """One request for each constraint: (tokens, finish reason, error) of each."""
    params = SamplingParams(**{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True} | params)
    engine = llm.engine
    requests = [engine.make_request(list(PROMPT), params, 7, constraint=each) for each in constraints]
    for request in requests:
        engine.add(request)
    last = {}
    while engine.has_work:
        for delta in engine.step():
            last[delta.request.id] = delta
    engine.scheduler.check_empty()
    return [(r.tokens[len(PROMPT) :], r.finish_reason, last[r.id].error) for r in requests]


SAMPLED = {"temperature": 1.0, "seed": 3}


@pytest.mark.parametrize("params", [{}, SAMPLED, SAMPLED | {"top_k": 2, "min_p": 0.1}])
def test_only_what_is_allowed_is_said_and_neighbours_say_what_they_would(llm, params):
    (alone,) = run(llm, [None], **params)
    free, digits, longer = run(llm, [None, Digits(4), Digits(100)], **params)
    assert free == alone and not all(chr(token).isdigit() for token in free[0])
    assert digits[0] == longer[0][:4] and digits[1] is FinishReason.STOP
    assert all(chr(token).isdigit() for token in longer[0]) and longer[1] is FinishReason.LENGTH
    assert len(longer[0]) == 12


def test_a_broken_constraint_ends_its_own_request_alone(llm):
    (alone,) = run(llm, [Digits(5)])
    broken, fine = run(llm, [Digits(5, broken=True), Digits(5)])
    assert broken[1] is FinishReason.ERROR and str(broken[2]) == "lost count"
    assert fine == alone and fine[1] is FinishReason.STOP


def test_a_preempted_constraint_is_told_each_token_once(llm):
    (alone,) = run(llm, [Digits(9)])
    constraint = Digits(9)
    engine = llm.engine
    params = SamplingParams(max_tokens=12, temperature=0.0)
    request = engine.make_request(list(PROMPT), params, 7, constraint=constraint, salt="someone")
    assert request.salt == "someone"
    engine.add(request)
    for _ in range(4):
        engine.step()
    engine.scheduler.preempt(request)
    while engine.has_work:
        engine.step()
    assert constraint.seen == request.tokens[len(PROMPT) :] == alone[0]


def test_who_has_a_constraint_does_not_draft(llm):
    """What may follow a draft is not known: a draft that its mask forbids would be sampled after all."""
    (expected,) = run(llm, [Digits(9)])
    known = [*PROMPT, *expected[0]]
    asked = []

    def draft(tokens, num_draft):
        asked.append(list(tokens))
        return known[len(tokens) :][:num_draft]

    options = {"speculation": "drafter", "drafter": draft, "num_draft": 3, "adaptive_drafts": False}
    drafting = LLM(llm.folder, device="cpu", poison=True, **options)
    assert run(drafting, [Digits(9)]) == [expected] and not asked and drafting.stats.drafted_tokens == 0
    free, bound = run(drafting, [None, Digits(9)])
    assert bound == expected and asked and drafting.stats.drafted_tokens > 0
    assert all(tokens == [*PROMPT, *free[0]][: len(tokens)] for tokens in asked)


def test_logprobs_are_the_models_own_whatever_is_allowed():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    row = SampleRow(SamplingParams(temperature=0.0, logprobs=2), 0, 0)
    tensors = SamplingTensors.build([row], eos_token_ids=[END_OF_TEXT])
    length = torch.tensor([1])
    allowed = torch.tensor([[True, False, True, False]])
    before = logits.clone()
    output = sample(logits, tensors, length, torch.zeros(1, 4, dtype=torch.int32), length, allowed)
    assert output.tokens.tolist() == [2] and torch.equal(logits, before)
    assert output.top_tokens.tolist() == [[1, 3]]
    assert output.logprobs.tolist() == logits.log_softmax(-1)[:, 2].tolist()
