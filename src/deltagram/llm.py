"""The library's front door: load a model, generate text."""

import hashlib
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltagram.engine.engine import Delta, Engine, Stats, TokenLogprobs
from deltagram.engine.params import SamplingParams
from deltagram.engine.replicas import Replicas, bring_together
from deltagram.engine.request import Request, Status
from deltagram.engine.settings import Resolved, parse, resolve
from deltagram.engine.speculate import Drafter
from deltagram.engine.tokenizer import Tokenizer
from deltagram.models.config import ModelConfig, read_config
from deltagram.models.hub import resolve_model
from deltagram.models.load import load_model
from deltagram.parallel.groups import Group, everywhere

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
    """A loaded model, for one thread at a time.

    model: a checkpoint folder or a hub id; the shipped model if None. device, dtype and further keywords are the
    settings of engine/settings.py. `progress` is called with the bytes of each piece of the weights that was read,
    and, on a GPU, `capturing` with how many of how many step sizes have been captured.
    Raises ValueError, listing every problem, for settings or a checkpoint that cannot be honoured.

    drafter: drafts for speculation "drafter", which it implies: see engine/speculate.py.

    group: ranks, each of which makes an LLM of the same model and settings, on the group's device. They have the n-gram
    tables together and run steps together, each for its own requests: what `generate` or `stream` begins, on any of
    them, ends when no rank has requests left, and a rank without any takes part by `assist`.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        progress: Any = None,
        capturing: Callable[[int, int], None] = lambda done, total: None,
        group: Group | None = None,
        drafter: Drafter | None = None,
        **settings: Any,
    ) -> None:
        self.group = group
        asked = {"device": device, "dtype": dtype} | settings | ({"device": str(group.device)} if group else {})
        if drafter is not None:
            asked = {"speculation": "drafter"} | asked
        if (drafter is None) == (asked.get("speculation") == "drafter"):
            raise ValueError(
                f"speculation is {asked.get('speculation')!r}, and the drafter {drafter!r}: give both, "
                "as in LLM(drafter=f), or none"
            )
        if drafter is not None and not callable(drafter):
            raise ValueError(f"a drafter must be a function of tokens and a number of drafts, got {drafter!r:.200}")
        self.folder, self.config, self.settings = everywhere(group, lambda: _resolve(model, asked))
        _check_ranks(group, self.settings, self.config)
        folder = self.folder
        self.tokenizer = Tokenizer.load(folder, model_vocab_size=self.config.vocab_size)
        loaded, checkpoint = load_model(
            folder,
            self.config,
            self.settings.max_context,
            self.settings.device,
            self.settings.dtype,
            progress,
            self.settings.ngram_placement,
            mtp=self.settings.speculation == "mtp",
            group=group,
            ngram_split=self.settings.ngram_split,
        )
        self.notes = (*self.config.notes, *checkpoint.notes)
        self.replicas: Replicas | None = None
        if group is not None:
            sizes = self.settings.max_num_tokens, self.settings.ngram_exchange, self.settings.dtype
            self.replicas, notes = bring_together(loaded, group, *sizes)
            self.notes += tuple(notes)
            self.settings = replace(self.settings, eager=self.settings.eager or not self.replicas.capturable)
        with group.watchdog.patient() if group else nullcontext():
            parts: dict[str, Any] = {"progress": capturing, "replicas": self.replicas, "drafter": drafter}
            self.engine = Engine(loaded, self.settings, self.tokenizer, **parts)
        self._inboxes: dict[int, deque[Delta]] = {}  # by request id: what steps brought and nobody took yet
        if group is not None and group.device.type == "cuda":
            self._warm_up(group)

    @property
    def stats(self) -> Stats:
        """Counts since the model was loaded."""
        return self.engine.stats

    def generate(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None) -> list[Completion]:
        """Complete each prompt, a text or a list of token ids; all of them share steps. Results are in order.

        Raises ValueError if one of them is refused; nothing is run then. RuntimeError if a step fails.
        """
        params = _params(params)
        groups = [self._requests(prompt, params) for prompt in _as_list(prompts)]
        gathered: dict[int, list[Delta]] = {request.id: [] for group in groups for request in group}
        with closing(self._run([request for group in groups for request in group])) as deltas:
            for delta in deltas:
                gathered[delta.request.id].append(delta)
        return [
            Completion(group[0].prompt, tuple(_output(request, gathered[request.id]) for request in group))
            for group in groups
        ]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Chunk, None, None]:
        """Complete one prompt, yielding what each step adds. It starts with the first chunk asked for; closing the
        iterator aborts it. Several streams may be read in turns: they share steps.

        Raises ValueError for a prompt that is refused and for `n` above 1.
        """
        params = _params(params)
        if params.n != 1:
            raise ValueError(f"a stream has one sequence: n must be 1, got {params.n}")
        return self._stream(*self._requests(prompt, params))

    def _stream(self, request: Request) -> Generator[Chunk, None, None]:
        with closing(self._run([request])) as deltas:
            for delta in deltas:
                yield Chunk(delta.text, delta.token_ids, delta.finish_reason and str(delta.finish_reason))

    def prompt_logits(self, token_ids: Sequence[int]) -> Tensor:
        """The model's logits after each of `token_ids`, float32 [T, vocab] on the CPU: what parity is checked with."""
        params = SamplingParams(max_tokens=1, temperature=0.0)
        request = self.engine.make_request(self._encode(token_ids), params, seed=0, wants_prompt_logits=True)
        with closing(self._run([request])) as deltas:
            for _ in deltas:
                pass
        return torch.cat(request.prompt_logits)

    def _warm_up(self, group: Group) -> None:
        """Compile the kernels of prefill and decode now: later, a rank that compiles would look like one that hangs."""
        with group.watchdog.patient():
            prompt = [0] * min(70, self.settings.max_context // 2)
            self.generate([prompt], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
        self.engine.stats = Stats(num_pages=self.engine.stats.num_pages)

    def assist(self) -> bool:
        """Run steps with the other ranks until none of them has requests left. False once a rank was closed."""
        assert self.group is not None and self.replicas is not None, "this process is alone"
        self.group.watchdog.check()
        while True:
            for delta in self.engine.step():
                self._inboxes[delta.request.id].append(delta)
            if not self.replicas.anyone:
                return not self.replicas.closing

    def close(self) -> None:
        """Tell the ranks that `assist` that nothing will follow. Without a group there is nothing to close."""
        if self.group is not None and self.replicas is not None and self.group.watchdog.report is None:
            self.replicas.leave()

    def _requests(self, prompt: Prompt, params: SamplingParams) -> list[Request]:
        encoded = self._encode(prompt)
        return [self.engine.make_request(encoded, params, seed) for seed in params.seeds()]

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise ValueError("the prompt is empty: expected at least one character")
            return self.tokenizer.encode(prompt)
        if not _is_sequence(prompt):
            raise ValueError(f"a prompt must be a text or a list of token ids, got {prompt!r:.200}")
        if prompt and all(isinstance(token, str) for token in prompt):
            raise ValueError(f"one prompt was expected, got {prompt!r:.200}; generate takes several")
        return prompt

    def _run(self, requests: Sequence[Request]) -> Generator[Delta, None, None]:
        """Run new requests to their ends, yielding what steps bring them. Closing it aborts those that are left.

        Each step runs all that the engine has: what it brings to others' requests waits in their inboxes.
        """
        inboxes: dict[int, deque[Delta]] = {request.id: deque() for request in requests}
        self._inboxes |= inboxes
        try:
            for request in requests:
                self.engine.add(request)
            while True:
                for inbox in inboxes.values():
                    while inbox:
                        delta = _checked(inbox.popleft())
                        self._unread(True)
                        yield delta
                if all(request.status is Status.FINISHED for request in requests) and not self.engine.undelivered:
                    return
                self._unread(False)
                for delta in self.engine.step():
                    self._inboxes[delta.request.id].append(delta)
        finally:
            self._unread(False)
            for request in requests:
                self.engine.abort(request)
                del self._inboxes[request.id]
            if self.group is not None and not self._inboxes and self.group.watchdog.report is None:
                self.assist()  # the other ranks may have requests yet

    def _unread(self, waits: bool) -> None:
        if self.group is not None:
            self.group.watchdog.unread(waits)


def _resolve(model: str | Path | None, asked: dict[str, Any]) -> tuple[Path, ModelConfig, Resolved]:
    settings = parse(asked)
    folder = shipped_model() if model is None else resolve_model(model)
    config = read_config(folder)
    return folder, config, resolve(settings, config)


def _check_ranks(group: Group | None, settings: Resolved, config: ModelConfig) -> None:
    """Raises ValueError for settings of several ranks in one alone, or, on every rank, that are not all the same."""
    if group is None:
        asked = {"ngram_split": settings.ngram_split, "ngram_exchange": settings.ngram_exchange}
        for name, value in asked.items():
            if value != "auto":
                raise ValueError(f"{name} is {value!r}, which several ranks can do; this process is alone: see --ranks")
        return
    same = repr((replace(settings, device=torch.device("meta")), config))
    found = group.gather_objects(hashlib.blake2b(same.encode(), digest_size=8).hexdigest())
    others = ", ".join(str(rank) for rank, each in enumerate(found) if each != found[0])
    group.check(f"rank {others} has another model or other settings than rank 0" if others else None)


def _params(params: SamplingParams | None) -> SamplingParams:
    if params is not None and not isinstance(params, SamplingParams):
        raise ValueError(f"params must be a SamplingParams or None, got {params!r:.200}")
    return params or SamplingParams()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not _is_sequence(prompts) or not prompts:
        raise ValueError(f"prompts must be a text, a list of token ids, or a list of these, got {prompts!r:.200}")
    nested = [isinstance(item, Sequence) for item in prompts]
    if any(nested) and not all(nested):
        raise ValueError(f"a list must hold token ids or prompts, not both, got {prompts!r:.200}")
    return list(prompts) if all(nested) else [prompts]  # type: ignore[list-item, arg-type]


def _is_sequence(value: object) -> bool:
    """bytes are a sequence of integers too, but nobody means token ids by them."""
    return isinstance(value, Sequence) and not isinstance(value, bytes | bytearray)


def _checked(delta: Delta) -> Delta:
    if delta.error is not None:
        error = f"{type(delta.error).__name__}: {delta.error}"
        raise RuntimeError(f"the step that ran this request failed: {error}") from delta.error
    return delta


def _output(request: Request, deltas: list[Delta]) -> Output:
    token_ids = tuple(token for delta in deltas for token in delta.token_ids)
    logprobs = tuple(entry for delta in deltas for entry in delta.logprobs) or None
    return Output("".join(delta.text for delta in deltas), token_ids, str(request.finish_reason), logprobs)
