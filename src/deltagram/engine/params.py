"""What a caller may ask of sampling: the one place where these values are checked.

`SamplingParams` is complete and valid once it exists; what depends on the model (token ids against the vocabulary)
is checked by `SamplingParams.check` when a request is added. Sampling itself is in `sampler.py`.
"""

import math
import reprlib
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256  # characters; text is held back by at most this many
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 100.0  # and its inverse below
MAX_INT = 2**31 - 1
SEED_END = 2**63

_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Raises ValueError on construction, listing every problem.

    max_tokens, min_tokens: bounds on the generated tokens of each sequence. Before `min_tokens` of them exist, the end
        tokens and `stop_token_ids` cannot be chosen and stop strings are not looked for.
    temperature: 0 is greedy (the lowest id among equals); `min_p`, `top_k`, `top_p` then change nothing.
    top_k: keep the k likeliest tokens; 0 is off. top_p: keep the smallest set of mass top_p; 1 is off.
    min_p: keep tokens at least min_p times as likely as the likeliest; 0 is off.
    repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output; 1 is off.
    presence_penalty, frequency_penalty: subtracted once, or once per occurrence, for tokens of the output; 0 is off.
    logit_bias: added to the logits of these token ids.
    seed: same seed, same tokens, whatever shares the batch; None draws one.
    stop: text that ends a sequence; it is cut off unless `include_stop`. stop_token_ids: ids that do.
    ignore_eos: go on after the model's end token.
    logprobs: how many alternatives to report beside the chosen token; None reports nothing.
    n: sequences per prompt. skip_special_tokens: leave special tokens out of the text.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    skip_special_tokens: bool = True
    include_stop: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        problems = self._problems()
        if problems:
            raise ValueError("invalid sampling parameters: " + "; ".join(problems))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    def _problems(self) -> list[str]:
        problems: list[str] = []

        def must(name: str, expected: str) -> None:
            problems.append(f"{name} must be {expected}, got {reprlib.repr(getattr(self, name))}")

        def integer(name: str, low: int, high: int) -> None:
            if not _is_int(getattr(self, name), low, high):
                must(name, f"an integer from {low} to {high}")

        def number(name: str, low: float, high: float, expected: str) -> None:
            if not _is_number(getattr(self, name), low, high):
                must(name, expected)

        integer("max_tokens", 1, MAX_INT)
        integer("min_tokens", 0, MAX_INT)
        integer("top_k", 0, MAX_INT)
        integer("n", 1, MAX_N)
        if self.seed is not None:
            integer("seed", 0, SEED_END - 1)
        if self.logprobs is not None:
            integer("logprobs", 0, MAX_LOGPROBS)
        number("temperature", 0.0, math.inf, "a finite number of at least 0")
        number("top_p", math.ulp(0.0), 1.0, "a number above 0 and at most 1")
        number("min_p", 0.0, 1.0, "a number from 0 to 1")
        low, high = 1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        number("repetition_penalty", low, high, f"a number from {low:g} to {high:g}")
        for name in ("presence_penalty", "frequency_penalty"):
            number(name, -MAX_PENALTY, MAX_PENALTY, f"a number from {-MAX_PENALTY:g} to {MAX_PENALTY:g}")
        for name in ("ignore_eos", "skip_special_tokens", "include_stop"):
            if not isinstance(getattr(self, name), bool):
                must(name, "True or False")

        if not isinstance(self.stop, list | tuple) or len(self.stop) > MAX_STOP_STRINGS:
            must("stop", f"a string or a list of at most {MAX_STOP_STRINGS} strings")
        elif not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_LENGTH and _encodable(s) for s in self.stop):
            must("stop", f"made of valid Unicode strings of 1 to {MAX_STOP_LENGTH} characters")
        if not isinstance(self.stop_token_ids, list | tuple) or len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            must("stop_token_ids", f"a list of at most {MAX_STOP_TOKEN_IDS} token ids")
        elif not all(_is_int(i, 0, MAX_INT) for i in self.stop_token_ids):
            must("stop_token_ids", "made of token ids (integers of at least 0)")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping) or len(self.logit_bias) > MAX_LOGIT_BIAS_ENTRIES:
                must("logit_bias", f"a mapping of at most {MAX_LOGIT_BIAS_ENTRIES} token ids")
            elif not all(
                _is_int(i, 0, MAX_INT) and _is_number(b, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
                for i, b in self.logit_bias.items()
            ):
                must("logit_bias", f"token ids to numbers from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}")

        if not problems and self.min_tokens > self.max_tokens:
            must("min_tokens", f"at most max_tokens ({self.max_tokens})")
        return problems

    def check(self, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> None:
        """Raises ValueError, listing every problem, if these parameters do not fit a model of this vocabulary."""
        problems = []
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias or ())):
            outside = sorted(i for i in ids if i >= vocab_size)
            if outside:
                problems.append(
                    f"{name} must hold token ids below the vocabulary size {vocab_size}, got {reprlib.repr(outside)}"
                )
        if self.min_tokens > 0 and len(set(self.end_token_ids(eos_token_ids))) >= vocab_size:
            problems.append("stop_token_ids must leave a token to choose before min_tokens, got the whole vocabulary")
        if problems:
            raise ValueError("invalid sampling parameters: " + "; ".join(problems))

    def end_token_ids(self, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
        """The ids that end a sequence of this request, given the model's end tokens."""
        return (*self.stop_token_ids, *(() if self.ignore_eos else eos_token_ids))

    def seeds(self) -> list[int]:
        """One seed in [0, 2^63) per sequence. The first is `seed` itself, so n = 1 gives the first of n sequences;
        the others are hashes of it. With seed None each call draws afresh."""
        seed = secrets.randbits(63) if self.seed is None else self.seed
        return [seed, *(_mix64(seed + i * _MIX[0]) >> 1 for i in range(1, self.n))]

    @property
    def uses_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def uses_filters(self) -> bool:
        return self.temperature > 0 and (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0)

    @property
    def is_plain_greedy(self) -> bool:
        """True if the next token is the argmax of the model's logits, with nothing to add to them."""
        return self.temperature == 0 and not (self.uses_penalties or self.logit_bias or self.min_tokens)


def _mix64(value: int) -> int:
    """The splitmix64 finaliser (Steele, Lea and Flood, 2014) on Python integers."""
    value &= 2**64 - 1
    value = ((value ^ (value >> 30)) * _MIX[0]) & (2**64 - 1)
    value = ((value ^ (value >> 27)) * _MIX[1]) & (2**64 - 1)
    return value ^ (value >> 31)


def _is_int(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: object, low: float, high: float) -> bool:
    """NaN and the infinities are no numbers here, whatever the bounds."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return low <= value <= high and abs(value) <= sys.float_info.max


def _encodable(text: str) -> bool:
    """False for text with a lone surrogate, which no model output can contain."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
