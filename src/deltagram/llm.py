"""The library's front door: load a model, generate text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltagram.engine.engine import Delta, Engine, Stats, TokenLogprobs
from deltagram.engine.params import SamplingParams
from deltagram.engine.request import FinishReason, Request
from deltagram.engine.settings import parse, resolve
from deltagram.engine.tokenizer import Tokenizer
from deltagram.models.config import read_config
from deltagram.models.hub import resolve_model
from deltagram.models.load import load_model

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Output:
    """One generated sequence. finish_reason: "stop", "length" or "abort"; logprobs: one entry a token, if asked for."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt's `n` outputs."""

    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Output, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a step added to a stream; `finish_reason` is set on the last one."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None


def shipped_model() -> Path:
    """The folder of the small model that comes with the package."""
    return Path(str(files("deltagram"))) / "assets" / "demo"


class LLM:
    """A loaded model.

    model: a checkpoint folder or a hub id; the shipped model if None. device, dtype and further keywords are the settings of
    engine/settings.py. Raises ValueError, listing every problem, for settings or a checkpoint that cannot be honoured.
    `progress` is called with the bytes of each piece of the weights that was read.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        progress: Any = None,
        **settings: Any,
    ) -> None:
        asked = parse({"device": device, "dtype": dtype} | settings)
        folder = shipped_model() if model is None else resolve_model(model)
        self.config = read_config(folder)
        self.settings = resolve(asked, self.config)
        self.tokenizer = Tokenizer.load(folder)
        loaded, checkpoint = load_model(
            folder, self.config, self.settings.max_context, self.settings.device, self.settings.dtype, progress
        )
        self.notes = (*self.config.notes, *checkpoint.notes)
        self.engine = Engine(loaded, self.settings, self.tokenizer)

    @property
    def stats(self) -> Stats:
        """Counts since the model was loaded."""
        return self.engine.stats

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Complete each prompt, a text or a list of token ids; all of them share steps. Results are in the prompts' order."""
        params = params or SamplingParams()
        encoded = [self._encode(prompt) for prompt in _as_list(prompts)]
        requests = self._add([(prompt, params) for prompt in encoded])
        gathered: dict[int, list[Delta]] = {request.id: [] for group in requests for request in group}
        try:
            while self.engine.has_work:
                for delta in self.engine.step():
                    gathered[delta.request.id].append(_checked(delta))
        finally:
            self._abort(requests)
        return [
            Completion(prompt, tuple(_output(request, gathered[request.id]) for request in group))
            for prompt, group in zip(encoded, requests, strict=True)
        ]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Complete one prompt, yielding what each step adds. Closing the iterator aborts the request.

        Raises ValueError for `n` above 1.
        """
        params = params or SamplingParams()
        if params.n != 1:
            raise ValueError(f"a stream has one sequence: n must be 1, got {params.n}")
        encoded = self._encode(prompt)
        return self._stream(encoded, params)

    def _stream(self, prompt: tuple[int, ...], params: SamplingParams) -> Iterator[Chunk]:
        requests = self._add([(prompt, params)])
        try:
            while self.engine.has_work:
                for delta in self.engine.step():
                    _checked(delta)
                    yield Chunk(delta.text, delta.token_ids, delta.finish_reason and str(delta.finish_reason))
        finally:
            self._abort(requests)

    def prompt_logits(self, token_ids: Sequence[int]) -> Tensor:
        """The model's logits after each of `token_ids`, float32 [T, vocab] on the CPU: what parity is checked with."""
        params = SamplingParams(max_tokens=1, temperature=0.0)
        request = self.engine.add_request(token_ids, params, seed=0, wants_prompt_logits=True)
        try:
            while self.engine.has_work:
                for delta in self.engine.step():
                    _checked(delta)
        finally:
            self.engine.abort(request)
        return torch.cat(request.prompt_logits)

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if not prompt:
                raise ValueError("the prompt is empty: expected at least one character")
            return tuple(self.tokenizer.encode(prompt))
        return tuple(prompt)

    def _add(self, wanted: Sequence[tuple[tuple[int, ...], SamplingParams]]) -> list[list[Request]]:
        """Queue all or, if one is refused, none."""
        requests: list[list[Request]] = []
        try:
            for prompt, params in wanted:
                requests.append([])
                for seed in params.seeds():
                    requests[-1].append(self.engine.add_request(prompt, params, seed))
        except ValueError:
            self._abort(requests)
            raise
        return requests

    def _abort(self, requests: list[list[Request]]) -> None:
        for group in requests:
            for request in group:
                self.engine.abort(request)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    listed = list(prompts)
    if listed and all(isinstance(item, int) for item in listed):
        return [listed]  # type: ignore[list-item]  # one prompt of token ids
    return listed  # type: ignore[return-value]


def _checked(delta: Delta) -> Delta:
    if delta.finish_reason is FinishReason.ERROR:
        raise RuntimeError(f"the step that ran this request failed: {delta.error}")
    return delta


def _output(request: Request, deltas: list[Delta]) -> Output:
    token_ids = tuple(token for delta in deltas for token in delta.token_ids)
    logprobs = tuple(entry for delta in deltas for entry in delta.logprobs) or None
    return Output("".join(delta.text for delta in deltas), token_ids, str(request.finish_reason), logprobs)
