"""The core against formulas run token by token in float64: every kind of step, on the CPU path."""

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltagram.step.plan import Bucket, Kind
from deltagram.testing.core_steps import CoreShape, CoreSteps, Part, Stream, exact_bucket, oracle

DECODE, VERIFY, PREFILL = Kind.DECODE, Kind.VERIFY, Kind.PREFILL
SHAPE = CoreShape(heads=1, value_heads=2, key_dim=4, value_dim=8)
CPU = torch.device("cpu")


def make(num_slots: int = 4, max_draft: int = 0, every: int = 1) -> CoreSteps:
    return CoreSteps(SHAPE, num_slots, torch.float64, CPU, max_draft, every=every)


def check(outputs: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(outputs.double(), expected, rtol=1e-9, atol=1e-9)


def state_of(steps: CoreSteps, stream: Stream) -> torch.Tensor:
    return steps.state.recurrent[stream.slot]


def test_prompts_of_every_length_then_a_decode() -> None:
    steps = make(num_slots=130)
    longest = steps.stream(131, 0)
    outputs, states = oracle(steps, longest)
    prompts = [Stream(longest.qkv, longest.a, longest.b, slot) for slot in range(130)]
    results = steps.step([Part(prompt, PREFILL, length) for length, prompt in enumerate(prompts, 1)])
    for length, (prompt, result) in enumerate(zip(prompts, results, strict=True), 1):
        check(result, outputs[:length])
        check(state_of(steps, prompt), states[length - 1])
    for length, result in enumerate(steps.step([Part(prompt, DECODE) for prompt in prompts]), 1):
        check(result, outputs[length : length + 1])


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (64, 1, 5), (3, 64, 64, 1), (2, 1, 60, 7)])
def test_resumed_chunks(sizes: tuple[int, ...]) -> None:
    """Of one token too, and of fewer tokens than the convolution reaches back."""
    steps = make()
    stream = steps.stream(sum(sizes) + 2, 1)
    outputs, states = oracle(steps, stream)
    done = 0
    for size in sizes:
        check(steps.step([Part(stream, PREFILL, size)])[0], outputs[done : done + size])
        done += size
        check(state_of(steps, stream), states[done - 1])
    for t in (done, done + 1):
        check(steps.step([Part(stream, DECODE)])[0], outputs[t : t + 1])


def test_a_prompt_as_long_as_a_verify_row_is_a_prompt() -> None:
    steps = make(max_draft=3)
    prompt, other = steps.stream(6, 0), steps.stream(20, 1)
    steps.step([Part(other, PREFILL, 7)])
    verified, prompted = steps.step([Part(other, VERIFY, 4), Part(prompt, PREFILL, 4)])
    check(verified, oracle(steps, other)[0][7:11])
    outputs, states = oracle(steps, prompt)
    check(prompted, outputs[:4])
    check(state_of(steps, prompt), states[3])


def test_accepted_drafts_reach_the_state_without_another_draft() -> None:
    steps = make(max_draft=3)
    stream = steps.stream(20, 2)
    outputs, states = oracle(steps, stream)
    steps.step([Part(stream, PREFILL, 5)])
    steps.step([Part(stream, VERIFY, 4, num_wrong=1)])  # two of three drafts accepted: tokens 5, 6 and 7
    check(state_of(steps, stream), states[5])
    check(steps.step([Part(stream, DECODE)])[0], outputs[8:9])
    check(state_of(steps, stream), states[8])
    check(steps.step([Part(stream, DECODE)])[0], outputs[9:10])


@pytest.mark.parametrize("every", [2, 3, 5])
def test_a_state_is_stored_every_so_often(every: int) -> None:
    """In turn by those of one start, and never later than that; what is not yet in it is in each output."""
    steps = make(every=every)
    streams = [steps.stream(30, slot) for slot in range(3)]
    expected = [oracle(steps, stream) for stream in streams]
    steps.step([Part(stream, PREFILL, 7) for stream in streams])
    stored = []
    for t in range(7, 30):
        for result, (outputs, _) in zip(steps.step([Part(s, DECODE) for s in streams]), expected, strict=True):
            check(result, outputs[t : t + 1])
        for stream, (_, states) in zip(streams, expected, strict=True):
            check(state_of(steps, stream), states[t - stream.pending])
        stored.append([stream.pending == 0 for stream in streams])
    for turns in zip(*stored, strict=True):
        first = turns.index(True)
        assert first < every and list(turns[first:]) == [i % every == 0 for i in range(len(turns) - first)]
    assert len({turns.index(True) for turns in zip(*stored, strict=True)}) == min(every, 3)


@functools.cache
def three_streams() -> list[tuple[Stream, torch.Tensor, torch.Tensor]]:
    """Requests, their outputs and their states: the same whatever `max_draft`, which draws no weights."""
    steps = make(num_slots=3)
    streams = [steps.stream(90, slot) for slot in range(3)]
    return [(stream, *oracle(steps, stream)) for stream in streams]


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_any_schedule_gives_each_request_alone(data: st.DataObject) -> None:
    """Chunks, decode, drafts accepted or not, preemption and slots that change hands, in any order and any padding; and
    states that are stored every so often."""
    steps = make(num_slots=3, max_draft=data.draw(st.integers(0, 3)), every=data.draw(st.integers(1, 4)))
    streams = [replace(stream) for stream, _, _ in three_streams()]
    expected = [(outputs, states) for _, outputs, states in three_streams()]
    prompts = [data.draw(st.integers(1, 80)) for _ in streams]
    for _ in range(8):
        parts = []
        for stream, prompt in zip(streams, prompts, strict=True):
            if stream.done and data.draw(st.integers(0, 9)) == 0:
                stream.done = stream.pending = 0  # preempted
            left = prompt - stream.done
            if left > 0:
                parts.append(Part(stream, PREFILL, data.draw(st.integers(1, left))))
            elif stream.done < 86:
                new = 1 + data.draw(st.integers(0, steps.max_draft))
                parts.append(Part(stream, VERIFY if new > 1 else DECODE, new, data.draw(st.integers(0, new - 1))))
        parts = data.draw(st.permutations([part for part in parts if data.draw(st.booleans())]))
        parts.sort(key=lambda part: part.kind)
        tight = exact_bucket(parts)
        bucket = Bucket(
            tight.tokens + data.draw(st.integers(0, 3)), tight.sequences + data.draw(st.integers(1, 2)), True
        )
        begins = [part.stream.done for part in parts]
        for part, begin, result in zip(parts, begins, steps.step(parts, bucket), strict=True):
            check(result, expected[part.stream.slot][0][begin : part.stream.done])
            taken = part.stream.done - part.stream.pending
            check(state_of(steps, part.stream), expected[part.stream.slot][1][taken - 1])


def test_an_empty_step_and_padding_touch_nothing() -> None:
    steps = make(max_draft=2)
    for tensor in (steps.state.recurrent, steps.state.conv, *(steps.state.recent or ())):
        tensor.normal_()
    before = [steps.state.recurrent.clone(), steps.state.conv.clone(), *(x.clone() for x in steps.state.recent or ())]
    for bucket in (Bucket(0, 0, True), Bucket(4, 2, True), Bucket(4, 2, False), Bucket(1, 1, False)):
        steps.step([], bucket)
    stream = steps.stream(3, 1)
    steps.step([Part(stream, PREFILL, 3)], Bucket(9, 5, True))
    after = (steps.state.recurrent, steps.state.conv, *(steps.state.recent or ()))
    others = [0, 2, 3, 4]  # every slot but the one that ran, the pad slot too
    assert all(torch.equal(a[others], b[others]) for a, b in zip(after, before, strict=True))
    assert not torch.equal(after[0][1], before[0][1])


def test_slot_zero_is_a_slot_like_any_other() -> None:
    steps = make()
    stream = steps.stream(9, 0)
    outputs, _ = oracle(steps, stream)
    check(steps.step([Part(stream, PREFILL, 8)], Bucket(64, 3, True))[0], outputs[:8])
    check(steps.step([Part(stream, DECODE)], Bucket(4, 4, False))[0], outputs[8:9])


def test_bf16_state_is_rounded_after_every_token() -> None:
    """So that drafts committed by replay give the state of plain decoding in that setting too."""
    plain = CoreSteps(SHAPE, 2, torch.float32, CPU, 0, torch.bfloat16)
    spoken = CoreSteps(SHAPE, 2, torch.float32, CPU, 3, torch.bfloat16)
    a = plain.stream(12, 0)
    b = Stream(a.qkv, a.a, a.b, 0)
    for steps, stream in ((plain, a), (spoken, b)):
        steps.step([Part(stream, PREFILL, 3)])
    decoded = torch.cat([plain.step([Part(a, DECODE)])[0] for _ in range(9)])
    verified = torch.cat([spoken.step([Part(b, VERIFY, 4, wrong)])[0] for wrong in (0, 1, 3, 2)])
    torch.testing.assert_close(verified[:9], decoded, rtol=1e-6, atol=1e-6)
