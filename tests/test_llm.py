"""The front door: what it refuses, and that nothing a caller does (closing, ctrl-C, a fault) spoils what follows."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deltagram import LLM, SamplingParams
from deltagram.attention.layer import Attention
from deltagram.testing.checkpoints import END_OF_TURN, write_tiny_checkpoint

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=12, temperature=0.9, seed=5, ignore_eos=True)
PROMPT = list(b"a prompt of some forty tokens, one a byte")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> LLM:
    return LLM(folder, device="cpu", max_context=200, max_num_sequences=4, max_num_tokens=96, poison=True)


@pytest.fixture(scope="module")
def expected(engine: LLM) -> dict[SamplingParams, tuple[int, ...]]:
    return {params: engine.generate(PROMPT, params)[0].outputs[0].token_ids for params in (GREEDY, SEEDED)}


@pytest.fixture
def llm(engine: LLM, expected: dict[SamplingParams, tuple[int, ...]]) -> Iterator[LLM]:
    """The engine, which must be empty and give the same tokens after each test."""
    yield engine
    assert not engine._inboxes
    engine.engine.scheduler.check_empty()
    assert engine.generate([PROMPT], SEEDED)[0].outputs[0].token_ids == expected[SEEDED]


def tokens(llm: LLM, params: SamplingParams, prompt: Any = PROMPT) -> tuple[int, ...]:
    return llm.generate(prompt, params)[0].outputs[0].token_ids


# What is refused


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty: expected at least one character"),
        (["fine", ""], "the prompt is empty"),
        ([[1, 2], []], "the prompt is empty: expected at least one token"),
        ([], r"prompts must be a text, a list of token ids, or a list of these, got \[\]"),
        (None, "prompts must be .* got None"),
        (7, "prompts must be .* got 7"),
        (b"bytes", "prompts must be .* got b'bytes'"),
        ({"prompt": 1}, "prompts must be "),
        ([b"bytes"], "a prompt must be a text or a list of token ids, got b'bytes'"),
        ([1, "two"], r"a list must hold token ids or prompts, not both, got \[1, 'two'\]"),
        (["one", None], "a list must hold token ids or prompts, not both"),
        ([[1], 2], "a list must hold token ids or prompts, not both"),
        ([1, None], "prompt token ids must be integers from 0 to 263, got None"),
        ([1, 2.0], "prompt token ids must be integers from 0 to 263, got 2.0"),
        ([1, math.nan], "prompt token ids must be integers from 0 to 263, got nan"),
        ([True, 2], "prompt token ids must be integers from 0 to 263, got True"),
        ([[1, "2"]], "prompt token ids must be integers from 0 to 263, got '2'"),
        ([[1, [2]]], r"prompt token ids must be integers from 0 to 263, got \[2\]"),
        ([1, -1], "prompt token ids must be integers from 0 to 263, got -1"),
        ([1, 264], "prompt token ids must be integers from 0 to 263, got 264"),
        ([2**70], "prompt token ids must be integers from 0 to 263, got 1180591620717411303424"),
        ([1] * 200, "the prompt has 200 tokens; with max_context 200 and .* it may have at most 199"),
        ("x" * 5000, "the prompt has 5000 tokens"),
        ("a lone \ud800", r"text must be valid Unicode, got the lone surrogate U\+D800"),
    ],
)
def test_a_bad_prompt_is_refused(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(prompt, GREEDY)
    assert not llm.engine.has_work


@pytest.mark.parametrize("prompt", ["", [], None, 7, b"x", [264], [None], ["text"], [1] * 200])
def test_streams_and_prompt_logits_refuse_the_same_at_the_call(llm: LLM, prompt: Any) -> None:
    with pytest.raises(ValueError, match="prompt"):
        llm.stream(prompt, GREEDY)
    with pytest.raises(ValueError, match="prompt"):
        llm.prompt_logits(prompt)


def test_a_stream_of_several_texts_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"one prompt was expected, got \['a', 'b'\]; generate takes several"):
        llm.stream(["a", "b"], GREEDY)  # type: ignore[arg-type]


def test_one_refused_prompt_keeps_all_from_running(llm: LLM) -> None:
    before = llm.stats.num_steps
    with pytest.raises(ValueError, match="got 999"):
        llm.generate([PROMPT, [999], PROMPT], GREEDY)
    assert llm.stats.num_steps == before


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": math.nan}, "temperature must be a finite number of at least 0, got nan"),
        ({"n": 0}, "n must be an integer from 1 to 128, got 0"),
        ({"max_tokens": 0, "top_p": 2}, "max_tokens must be .*; top_p must be "),
        ({"stop": [""]}, "stop must be made of valid Unicode strings of 1 to 256 characters"),
    ],
)
def test_bad_sampling_parameters_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**values)


def test_parameters_that_do_not_fit_the_model_or_the_call_are_refused(llm: LLM) -> None:
    with pytest.raises(
        ValueError, match=r"stop_token_ids must hold token ids below the vocabulary size 264, got \[264\]"
    ):
        llm.generate(PROMPT, SamplingParams(stop_token_ids=[264]))
    with pytest.raises(ValueError, match=r"params must be a SamplingParams or None, got \{'n': 2\}"):
        llm.generate(PROMPT, {"n": 2})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a stream has one sequence: n must be 1, got 2"):
        llm.stream(PROMPT, SamplingParams(n=2))


@pytest.mark.parametrize(
    ("values", "messages"),
    [
        ({"max_contxt": 3, "foo": 1}, ["unknown settings: foo, max_contxt; known are device, dtype, max_context"]),
        ({"max_context": 513}, ["max_context must be at most the model's 512 positions, got 513"]),
        ({"max_context": 1}, ["max_context must be at least 2"]),
        (
            {"max_num_tokens": 66, "max_num_sequences": 4},
            ["max_num_tokens must be at least 67, a prefill chunk of 64 beside a token for each other of"],
        ),
        (
            {"max_num_sequences": 0, "max_num_tokens": 5.0, "max_context": True, "cache_bytes": -1, "poison": 1},
            [
                "max_num_sequences must be a positive integer, got 0",
                "max_num_tokens must be a positive integer, got 5.0",
                "max_context must be a positive integer, got True",
                "cache_bytes must be a positive integer, got -1",
                "poison must be True or False, got 1",
            ],
        ),
        ({"device": "tpu9"}, ["device must be auto, cpu, cuda or cuda:N, got 'tpu9'"]),
        ({"device": "cuda:99"}, ["device 'cuda:99' asked for, this machine has"]),
        (
            {"device": "meta", "dtype": "int8"},
            ["device must be a CPU or a CUDA device", "dtype must be auto, float32 or bf"],
        ),
        ({"dtype": ["float32"]}, ["dtype must be auto, float32 or bfloat16, got ['float32']"]),
        (
            {"ngram_placement": 5, "ngram_split": [], "ngram_exchange": {}},
            ["ngram_placement is 5; expected", "ngram_split is []; expected", "ngram_exchange is {}; expected"],
        ),
        ({"cache_bytes": 10}, ["cache_bytes must hold a page of 64 tokens, "]),
    ],
)
def test_settings_are_refused_all_at_once(folder: Path, values: dict[str, Any], messages: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        LLM(folder, **{"device": "cpu"} | values)
    for message in messages:
        assert message in str(caught.value)


@pytest.mark.parametrize("model", [5, b"bytes", ["folder"]])
def test_what_cannot_name_a_model_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="which cannot be a folder"):
        LLM(model)


def test_a_truncated_checkpoint_is_refused(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        LLM(tmp_path)


# What is accepted


def test_prompts_come_as_texts_ids_and_mixtures_of_both(
    llm: LLM, expected: dict[SamplingParams, tuple[int, ...]]
) -> None:
    text = bytes(PROMPT).decode()
    for prompts in (PROMPT, tuple(PROMPT), text, [text], [PROMPT], (text, PROMPT)):
        for completion in llm.generate(prompts, GREEDY):
            assert completion.prompt_token_ids == tuple(PROMPT)
            assert completion.outputs[0].token_ids == expected[GREEDY]
    many = llm.generate([list(b"x"), text, *[[i] for i in range(9)]], SEEDED)
    assert [len(completion.prompt_token_ids) for completion in many] == [1, len(PROMPT)] + [1] * 9
    assert many[1].outputs[0].token_ids == expected[SEEDED]


def test_stop_strings_that_never_come_change_nothing(llm: LLM) -> None:
    plain = llm.generate(PROMPT, GREEDY)[0].outputs[0]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, stop=["never", "a" * 256, plain.text + "!"])
    output = llm.generate(PROMPT, params)[0].outputs[0]
    assert output == plain and output.finish_reason == "length"
    assert "".join(chunk.text for chunk in llm.stream(PROMPT, params)) == plain.text


def test_several_sequences_of_a_prompt(llm: LLM, expected: dict[SamplingParams, tuple[int, ...]]) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=5, ignore_eos=True, n=5, logprobs=3)
    outputs = llm.generate(PROMPT, params)[0].outputs
    assert outputs[0].token_ids == expected[SEEDED] and len({output.token_ids for output in outputs}) == 5
    for output, seed in zip(outputs, params.seeds(), strict=True):
        assert output.token_ids == tokens(
            llm, SamplingParams(max_tokens=12, temperature=0.9, seed=seed, ignore_eos=True)
        )
        assert output.logprobs is not None and len(output.logprobs) == 12
        for entry, token in zip(output.logprobs, output.token_ids, strict=True):
            assert entry.token_id == token and len(entry.top) == 3
            assert entry.top[0][1] >= entry.top[1][1] >= entry.top[2][1] and entry.logprob <= entry.top[0][1]


def test_texts_end_at_end_tokens_lengths_and_the_context(llm: LLM) -> None:
    end = SamplingParams(max_tokens=9, temperature=0, logit_bias={END_OF_TURN: 100.0})
    output = llm.generate(PROMPT, end)[0].outputs[0]
    assert (output.finish_reason, output.token_ids, output.text) == ("stop", (END_OF_TURN,), "")
    later = SamplingParams(max_tokens=9, min_tokens=4, temperature=0, logit_bias={END_OF_TURN: 100.0})
    output = llm.generate(PROMPT, later)[0].outputs[0]
    assert len(output.token_ids) == 5 and output.token_ids[-1] == END_OF_TURN and output.finish_reason == "stop"
    long = SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)
    output = llm.generate([1] * 195, long)[0].outputs[0]
    assert (output.finish_reason, len(output.token_ids)) == ("length", 5)


# What a caller may do


@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_streams_read_in_turns_are_each_their_own(
    llm: LLM, expected: dict[SamplingParams, tuple[int, ...]], params: SamplingParams
) -> None:
    streams = [llm.stream(prompt, params) for prompt in (PROMPT, list(b"another"), PROMPT)]
    got: list[list[int]] = [[], [], []]
    ends: list[str | None] = [None] * 3
    for turn in range(52):
        which = (0, 1, 1, 2)[turn % 4]
        if chunk := next(streams[which], None):
            got[which] += chunk.token_ids
            ends[which] = chunk.finish_reason
    assert tuple(got[0]) == tuple(got[2]) == expected[params] and ends == ["length"] * 3
    assert tuple(got[1]) == tokens(llm, params, list(b"another"))


def test_other_calls_leave_an_open_stream_alone(llm: LLM, expected: dict[SamplingParams, tuple[int, ...]]) -> None:
    stream = llm.stream(PROMPT, SEEDED)
    got = [*next(stream).token_ids]
    assert tokens(llm, GREEDY) == expected[GREEDY]
    assert llm.prompt_logits(PROMPT).shape == (len(PROMPT), 264)
    with pytest.raises(ValueError):
        llm.generate([999])
    got += [token for chunk in stream for token in chunk.token_ids]
    assert tuple(got) == expected[SEEDED]


def test_a_stream_closed_early_frees_everything(llm: LLM) -> None:
    never_started = llm.stream(PROMPT, GREEDY)
    never_started.close()
    for chunks in range(1, 4):
        stream = llm.stream(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True))
        for _ in range(chunks):
            next(stream)
        assert llm.engine.has_work
        stream.close()
        assert not llm.engine.has_work and list(stream) == []
    for chunk in llm.stream(PROMPT, GREEDY):  # nobody closes it but the end of the loop
        assert chunk.finish_reason is None
        break
    llm.engine.scheduler.check_empty()


def broken(monkeypatch: pytest.MonkeyPatch, error: BaseException, calls: int) -> Callable[[], None]:
    """Raise `error` in the middle of the `calls`-th step from now on; returns what mends it."""
    whole, left = Attention.__call__, [calls]  # once a step: the tiny model has one attention layer

    def attend(self: Attention, *arguments: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise error
        return whole(self, *arguments, **named)

    monkeypatch.setattr(Attention, "__call__", attend)
    return lambda: monkeypatch.setattr(Attention, "__call__", whole)


@pytest.mark.parametrize("calls", [1, 2, 5])
def test_an_interrupt_leaves_the_engine_clean(
    llm: LLM, expected: dict[SamplingParams, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """The stream that shared the interrupted step goes on as if nothing had happened."""
    stream = llm.stream(PROMPT, SEEDED)
    got = [*next(stream).token_ids, *next(stream).token_ids]
    mend = broken(monkeypatch, KeyboardInterrupt(), calls)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT, list(b"another")], GREEDY)
    mend()
    assert len(llm.engine.scheduler.waiting) + len(llm.engine.scheduler.running) == 1
    got += [token for chunk in stream for token in chunk.token_ids]
    assert tuple(got) == expected[SEEDED]


def test_a_fault_in_a_step_is_raised_with_its_cause(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    mend = broken(monkeypatch, MemoryError("no room"), 3)
    with pytest.raises(RuntimeError, match="the step that ran this request failed: MemoryError: no room") as caught:
        llm.generate([PROMPT, PROMPT], GREEDY)
    assert isinstance(caught.value.__cause__, MemoryError)
    mend()
    llm.engine.scheduler.check_empty()
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    mend = broken(monkeypatch, ZeroDivisionError(), 1)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        llm.prompt_logits(PROMPT)
    mend()
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):  # it shared the step
        next(stream)
