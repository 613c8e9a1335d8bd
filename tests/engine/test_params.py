"""SamplingParams refuses what it cannot honour, names all of it at once, and keeps the rest as given."""

import copy
import dataclasses
import math
import pickle

import pytest

from deltagram import SamplingParams
from deltagram.engine import params as bounds


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", v) for v in (math.nan, math.inf, -math.inf, -0.1, True, "1", None, 10**400)],
        *[("max_tokens", v) for v in (0, -1, True, 1.0, 2**31, None)],
        *[("min_tokens", v) for v in (-1, False, 0.0)],
        *[("top_k", v) for v in (-1, True, 1.5)],
        *[("top_p", v) for v in (0, 0.0, 1.0001, math.nan, -1, True)],
        *[("min_p", v) for v in (-0.1, 1.1, math.nan, False)],
        *[("repetition_penalty", v) for v in (0, 0.0099, 100.1, math.nan, -1)],
        *[("presence_penalty", v) for v in (-2.1, 2.1, math.nan)],
        *[("frequency_penalty", v) for v in (-2.1, 2.1, math.inf)],
        *[("seed", v) for v in (-1, 2**63, 1.0, True)],
        *[("logprobs", v) for v in (-1, bounds.MAX_LOGPROBS + 1, True)],
        *[("n", v) for v in (0, -1, bounds.MAX_N + 1, True, 1.0)],
        *[("ignore_eos", v) for v in (1, None, "yes")],
        *[("skip_special_tokens", v) for v in (0,)],
        *[("include_stop", v) for v in ("",)],
        *[("stop", v) for v in ("", [""], ["a", ""], [1], None, 5, b"a", {"a"}, iter(["a"]), "\ud800")],
        *[("stop", v) for v in (["a"] * (bounds.MAX_STOP_STRINGS + 1), "a" * (bounds.MAX_STOP_LENGTH + 1))],
        *[("stop_token_ids", v) for v in ([-1], [True], [1.0], "12", None, 3, [2**31])],
        *[("stop_token_ids", v) for v in (list(range(bounds.MAX_STOP_TOKEN_IDS + 1)),)],
        *[("logit_bias", v) for v in ({-1: 0.0}, {"1": 0.0}, {1: 101}, {1: math.nan}, {1: -math.inf}, {1: True}, [1])],
        *[("logit_bias", v) for v in (dict.fromkeys(range(bounds.MAX_LOGIT_BIAS_ENTRIES + 1), 0.0),)],
    ],
)
def test_refuses_by_name(name, value):
    with pytest.raises(ValueError, match=rf"^invalid sampling parameters: {name} must be [^;]*, got ") as caught:
        SamplingParams(**{name: value})
    assert len(str(caught.value)) < 400  # a huge value is not printed in full


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", v) for v in (0, 0.0, 5e-324, 1e300)],
        *[("top_p", v) for v in (5e-324, 1, 1.0)],
        *[("min_p", v) for v in (0, 1)],
        *[("repetition_penalty", v) for v in (0.01, 1, 100)],
        *[("seed", v) for v in (None, 0, 2**63 - 1)],
        *[("logprobs", v) for v in (None, 0, bounds.MAX_LOGPROBS)],
        *[("n", v) for v in (1, bounds.MAX_N)],
        *[("stop", v) for v in ("a" * bounds.MAX_STOP_LENGTH, ["a"] * bounds.MAX_STOP_STRINGS, (), [])],
        *[("logit_bias", v) for v in (None, {}, {0: -100, 2**31 - 1: 100.0})],
    ],
)
def test_accepts_the_bounds(name, value):
    SamplingParams(**{name: value})


def test_every_problem_is_in_the_message():
    with pytest.raises(ValueError) as caught:
        SamplingParams(temperature=math.nan, n=0, stop="", top_p=2.0)
    for name in ("temperature", "n", "stop", "top_p"):
        assert f"{name} must be" in str(caught.value)


def test_min_tokens_may_not_exceed_max_tokens():
    SamplingParams(min_tokens=5, max_tokens=5)
    with pytest.raises(ValueError, match=r"min_tokens must be at most max_tokens \(5\), got 6"):
        SamplingParams(min_tokens=6, max_tokens=5)


def test_unknown_parameters_are_refused_by_name():
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)


def test_values_are_frozen_and_independent_of_the_arguments():
    stop, ids, bias = ["x"], [1], {1: 2.0}
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias)
    stop.append("y")
    ids.append(2)
    bias[3] = 4.0
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("x",), (1,), {1: 2.0})
    assert SamplingParams(stop="ab").stop == ("ab",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == dataclasses.replace(params) == params
    assert hash(params) == hash(dataclasses.replace(params))


def test_replace_validates_again():
    with pytest.raises(ValueError, match="top_k"):
        dataclasses.replace(SamplingParams(), top_k=-1)


def test_check_against_the_vocabulary():
    params = SamplingParams(stop_token_ids=[9, 10], logit_bias={11: 1.0, 3: 1.0})
    params.check(12)
    with pytest.raises(ValueError, match=r"stop_token_ids .* size 10, got \[10\]; logit_bias .* got \[11\]"):
        params.check(10)


def test_end_tokens_must_leave_something_before_min_tokens():
    params = SamplingParams(min_tokens=1, stop_token_ids=[0, 1])
    params.check(4, eos_token_ids=[2])
    with pytest.raises(ValueError, match="whole vocabulary"):
        params.check(3, eos_token_ids=[2])
    dataclasses.replace(params, ignore_eos=True).check(3, eos_token_ids=[2])
    dataclasses.replace(params, min_tokens=0).check(3, eos_token_ids=[2])


def test_seeds_of_the_n_sequences():
    assert SamplingParams(seed=7).seeds() == [7]
    five = SamplingParams(seed=7, n=5).seeds()
    assert five[0] == 7 and len(set(five)) == 5 and five == SamplingParams(seed=7, n=5).seeds()
    assert SamplingParams(seed=7, n=3).seeds() == five[:3]
    assert not set(five) & set(SamplingParams(seed=8, n=5).seeds())
    drawn = SamplingParams(n=4).seeds() + SamplingParams(n=4).seeds()
    assert len(set(drawn)) == 8 and all(0 <= seed < 2**63 for seed in drawn + five)
