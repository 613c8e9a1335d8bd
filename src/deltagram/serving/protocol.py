"""The one validator: what a request body may be, and what it asks of the engine.

Shapes and types are the models below, which also make the OpenAPI pages; values are checked by `SamplingParams`, sizes
by `Limits`, and prompts by the engine. A field that is not listed is refused, not dropped.
"""

import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field

from deltagram.engine.params import MAX_LOGIT_BIAS_ENTRIES, SamplingParams
from deltagram.serving.grammar import check_regex, check_schema
from deltagram.serving.limits import Limits

MAX_SHOWN = 5  # problems of a body that are told
MAX_MESSAGE = 2000  # characters of an error
_NO_EFFECT = "Accepted, and without effect."


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(default=None, description="Usage so far in every chunk.")
    include_obfuscation: bool | None = Field(default=None, description=_NO_EFFECT)


class TextFormat(_Body):
    type: Literal["text"]


class JsonFormat(_Body):
    type: Literal["json_object"]


class RegexFormat(_Body):
    type: Literal["regex"]
    regex: str


class JsonSchema(_Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = Field(default=None, description="The schema is always followed.")


class SchemaFormat(_Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonFormat | RegexFormat | SchemaFormat, Field(discriminator="type")]


class Generation(_Body):
    """What completions and chat have in common."""

    model: str | None = Field(default=None, description="Left out: the model that is served.")
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    regex: str | None = Field(default=None, description='Short for response_format {"type": "regex", ...}.')
    user: str | None = Field(default=None, description=_NO_EFFECT)
    metadata: dict[str, str] | None = Field(default=None, description=_NO_EFFECT)
    store: bool | None = Field(default=None, description=_NO_EFFECT)
    service_tier: str | None = Field(default=None, description=_NO_EFFECT)
    safety_identifier: str | None = Field(default=None, description=_NO_EFFECT)
    prompt_cache_key: str | None = Field(default=None, description=_NO_EFFECT)


class CompletionRequest(Generation):
    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(default=None, description="Alternatives to report for each token.")
    best_of: int | None = Field(default=None, description="Must equal n: nothing else is offered.")
    echo: Literal[False] | None = None
    suffix: None = None


class TextPart(_Body):
    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None


class ChatRequest(Generation):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = Field(default=None, description="The newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, description="Alternatives to report for each token.")
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = Field(
        default=None, description="Switches that the model's own chat template reads, such as enable_thinking."
    )


class TokenizeRequest(_Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeRequest(_Body):
    model: str | None = None
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Job:
    """A request as the engine takes it, its prompts aside. grammar: {"schema": ...}, {"regex": ...} or None."""

    params: SamplingParams
    grammar: dict[str, Any] | None


def completion_job(body: CompletionRequest, limits: Limits) -> Job:
    """Raises ValueError for values that are refused."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ValueError(f"best_of must equal n ({body.n or 1}), got {body.best_of}")
    return _job(body, limits, _given(body.max_tokens, 16), body.logprobs)


def chat_job(body: ChatRequest, limits: Limits, max_length: int) -> Job:
    """Without max_tokens an answer may take all of the context, `max_length`. Raises ValueError for what is refused."""
    asked = {value for value in (body.max_tokens, body.max_completion_tokens) if value is not None}
    if len(asked) == 2:
        raise ValueError("max_tokens and max_completion_tokens must be the same if both are given")
    if body.top_logprobs is not None and not body.logprobs:
        raise ValueError("top_logprobs needs logprobs to be true")
    logprobs = _given(body.top_logprobs, 0) if body.logprobs else None
    return _job(body, limits, asked.pop() if asked else max_length, logprobs)


def _job(body: Generation, limits: Limits, max_tokens: int, logprobs: int | None) -> Job:
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stop) > limits.max_stop:
        raise ValueError(f"stop must be at most {limits.max_stop} strings, got {len(stop)}")
    if body.n is not None and body.n > limits.max_n:
        raise ValueError(f"n must be at most {limits.max_n}, got {body.n}")
    if body.stream_options is not None and not body.stream:
        raise ValueError("stream_options needs stream to be true")
    given: dict[str, Any] = {
        "max_tokens": max_tokens,
        "min_tokens": body.min_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": 0 if body.top_k == -1 else body.top_k,  # what other servers call off
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "logit_bias": None if body.logit_bias is None else _logit_bias(body.logit_bias),
        "seed": body.seed,
        "n": body.n,
        "stop": stop,
        "stop_token_ids": body.stop_token_ids,
        "ignore_eos": body.ignore_eos,
        "skip_special_tokens": body.skip_special_tokens,
        "include_stop": body.include_stop_str_in_output,
        "logprobs": logprobs,
    }
    params = SamplingParams(**{name: value for name, value in given.items() if value is not None})
    grammar = _grammar(body, limits)
    if grammar is not None and (params.min_tokens or params.ignore_eos or params.stop_token_ids):
        raise ValueError("response_format decides where an answer ends: min_tokens, ignore_eos, stop_token_ids cannot")
    return Job(params, grammar)


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    if len(bias) > MAX_LOGIT_BIAS_ENTRIES:
        raise ValueError(f"logit_bias must have at most {MAX_LOGIT_BIAS_ENTRIES} entries, got {len(bias)}")
    wrong = [key for key in bias if not re.fullmatch("0|[1-9][0-9]{0,9}", key)]
    if wrong:
        raise ValueError(f"the keys of logit_bias must be token ids, got {reprlib.repr(wrong)}")
    return {int(key): value for key, value in bias.items()}


def _grammar(body: Generation, limits: Limits) -> dict[str, Any] | None:
    form: Any = body.response_format
    if body.regex is not None:
        if form is not None:
            raise ValueError("give regex or response_format, not both")
        form = RegexFormat(type="regex", regex=body.regex)
    match form:
        case RegexFormat(regex=pattern):
            check_regex(pattern, limits)
            return {"regex": pattern}
        case SchemaFormat(json_schema=JsonSchema(schema_=schema)):
            if schema is None:
                raise ValueError("response_format.json_schema must have a schema")
            check_schema(schema, limits)
            return {"schema": schema}
        case JsonFormat():
            return {"schema": {"type": "object"}}
    return None


def prompts(body: CompletionRequest, limits: Limits) -> Sequence[str | list[int]]:
    """The prompts of a body, one or many. Raises ValueError for none, too many, and empty ones."""
    given: Any = body.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not 0 < len(given) <= limits.max_prompts:
        raise ValueError(f"prompt must be 1 to {limits.max_prompts} prompts, got {len(given)}")
    if "" in given or [] in given:
        raise ValueError("prompt is empty: expected at least one token")
    return given


def messages(given: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates read them: text parts are joined, `developer` is the newer name of `system`."""
    listed = []
    for message in given:
        plain = message.model_dump(exclude_none=True)
        if isinstance(message.content, list):
            plain["content"] = "".join(part.text for part in message.content)
        plain.setdefault("content", "")
        if plain["role"] == "developer":
            plain["role"] = "system"
        listed.append(plain)
    return listed


def template_variables(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Raises ValueError for names that are the server's to give."""
    ours = {"messages", "tools", "documents", "add_generation_prompt", "self"}
    wrong = [name for name in kwargs or {} if name in ours or name.startswith("_") or name.endswith("_token")]
    if wrong:
        raise ValueError(f"chat_template_kwargs must not set {reprlib.repr(wrong)}")
    return dict(kwargs or {})


def describe(error: RequestValidationError) -> str:
    """The first problems of a body, in words."""
    problems = error.errors()
    lines = []
    for problem in problems[:MAX_SHOWN]:
        where = ".".join(str(part)[:100] for part in problem["loc"] if part != "body")[:300]
        got = "" if problem["type"] == "missing" else f", got {reprlib.repr(problem['input'])}"
        lines.append(f"{where or 'body'}: {problem['msg'][:300]}{got}")
    more = f" (and {len(problems) - MAX_SHOWN} more)" if len(problems) > MAX_SHOWN else ""
    return ("; ".join(lines) + more)[:MAX_MESSAGE]
