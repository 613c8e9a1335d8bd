"""The engine: requests in, steps run, text out."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from deltagram.attention.cache import PagePool, page_size
from deltagram.engine.detokenizer import Detokenizer
from deltagram.engine.params import SamplingParams
from deltagram.engine.request import Constraint, FinishReason, Request, Status
from deltagram.engine.runner import Runner, StepOutput
from deltagram.engine.scheduler import Scheduled, Scheduler
from deltagram.engine.settings import Resolved
from deltagram.engine.tokenizer import Tokenizer
from deltagram.gdn.state import SlotPool
from deltagram.models.base import Model
from deltagram.step.buckets import ExactBuckets, Ladder
from deltagram.step.plan import Kind


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of a sampled token and of the likeliest alternatives, under the model's own logits."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """What a step added to one request. `error` is what the step raised, when `finish_reason` is ERROR."""

    request: Request
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: Exception | None = None


@dataclass(slots=True)
class Stats:
    """Counts since the engine was made. `steps` has one record a step, the last `MAX_RECORDS` of them."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    padding_tokens: int = 0
    memory_rows: int = 0
    preemptions: int = 0
    seconds: float = 0.0
    peak_pages: int = 0
    num_pages: int = 0
    num_steps: int = 0
    steps: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_RECORDS))


MAX_RECORDS = 100_000


class Engine:
    """Runs requests on one model. Not thread-safe: one caller adds, steps and aborts.

    `tokenizer` turns tokens into text; without one the deltas have token ids alone.
    """

    def __init__(
        self,
        model: Model,
        settings: Resolved,
        tokenizer: Tokenizer | None = None,
        num_pages: int | None = None,
        buckets: ExactBuckets | Ladder | None = None,
    ) -> None:
        self.model, self.settings, self.tokenizer = model, settings, tokenizer
        page = page_size(model.block_size)
        num_pages = num_pages or pages_that_fit(model, settings)
        slots, pages = SlotPool(settings.max_num_sequences), PagePool(num_pages)
        ends = model.config.stop_token_ids + (tokenizer.eos_token_ids if tokenizer else ())
        self.end_token_ids = tuple(dict.fromkeys(token for token in ends if token < model.config.vocab_size))
        self.runner = Runner(model, settings, slots, num_pages, self.end_token_ids)
        self.scheduler = Scheduler(slots, pages, page, settings.max_num_tokens, buckets or ExactBuckets())
        self.max_length = min(settings.max_context, num_pages * page)
        self.stats = Stats(num_pages=num_pages)
        self._next_id = 0
        self._rows_a_token = sum(len(spec.moduli) for spec in getattr(model, "specs", ()))

    def make_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        wants_prompt_logits: bool = False,
        constraint: Constraint | None = None,
        salt: str = "",
    ) -> Request:
        """A request for one sequence, to be given to `add`. `seed` is this sequence's own: see SamplingParams.seeds.
        `constraint` is too, and `salt` says whose it is: see Request.

        Raises ValueError for an empty prompt, one that leaves no room for a token, ids outside the vocabulary, or
        parameters that do not fit the model.
        """
        vocab = self.model.config.vocab_size
        prompt = tuple(prompt)
        if not prompt:
            raise ValueError("the prompt is empty: expected at least one token")
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
                raise ValueError(f"prompt token ids must be integers from 0 to {vocab - 1}, got {token!r:.200}")
        if len(prompt) >= self.max_length:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens; with max_context {self.settings.max_context} and a cache of "
                f"{self.stats.num_pages * self.scheduler.page_size} tokens it may have at most {self.max_length - 1}"
            )
        params.check(vocab, self.end_token_ids)
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = Detokenizer(
                self.tokenizer,
                stop=params.stop,
                include_stop=params.include_stop,
                skip_special_tokens=params.skip_special_tokens,
            )
        request = Request(
            id=self._next_id,
            prompt=prompt,
            params=params,
            seed=seed,
            max_length=min(len(prompt) + params.max_tokens, self.max_length),
            end_token_ids=frozenset(params.end_token_ids(self.end_token_ids)),
            detokenizer=detokenizer,
            wants_prompt_logits=wants_prompt_logits,
            constraint=constraint,
            salt=salt,
        )
        self._next_id += 1
        return request

    def add(self, request: Request) -> None:
        """Queue a new request of `make_request`."""
        self.scheduler.add(request)

    def add_request(
        self, prompt: Sequence[int], params: SamplingParams, seed: int, wants_prompt_logits: bool = False
    ) -> Request:
        """`make_request` and `add`."""
        request = self.make_request(prompt, params, seed, wants_prompt_logits)
        self.add(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request now and free what it owns; one that is not queued, or has ended, is left alone."""
        if request.status in (Status.WAITING, Status.RUNNING):
            self.scheduler.finish(request, FinishReason.ABORT)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[Delta]:
        """Run one step and return what it added; an empty list when there was nothing to run, or no token yet.

        An exception in the step ends its requests with FinishReason.ERROR; others are not touched. An interrupt
        (ctrl-C) is passed on, and the step's requests are computed anew.
        """
        scheduled = self.scheduler.schedule()
        if scheduled is None:
            return []
        freed = self.scheduler.take_freed()
        began = time.perf_counter()
        deltas: list[Delta] = []
        try:
            if self.settings.poison:
                self.runner.poison_freed(*freed)
            output = self.runner.execute(scheduled)
            self._record(scheduled, time.perf_counter() - began)
            for i in range(len(output.requests)):
                deltas.append(self._deliver(output, i))
        except Exception as error:
            return deltas + self._fail(scheduled, error)
        except BaseException:
            self.scheduler.undo(scheduled)
            raise
        return deltas

    def _deliver(self, output: StepOutput, i: int) -> Delta:
        request, token = output.requests[i], output.tokens[i]
        request.tokens.append(token)
        if request.constraint is not None:
            try:
                request.constraint.accept(token)
            except Exception as error:
                self.scheduler.finish(request, FinishReason.ERROR)
                return Delta(request, "", (token,), (), FinishReason.ERROR, error)
        reason, text = self._consume(request, token)
        if reason is not None:
            self.scheduler.finish(request, reason)
        logprobs = (_logprobs(output, i, request.params.logprobs),) if request.params.logprobs is not None else ()
        return Delta(request, text, (token,), logprobs, reason)

    def _consume(self, request: Request, token: int) -> tuple[FinishReason | None, str]:
        """Whether the token ends its request, and the text it brings out."""
        enough = request.num_output >= request.params.min_tokens
        if token in request.end_token_ids and enough:
            return FinishReason.STOP, request.detokenizer.flush() if request.detokenizer else ""
        text = ""
        if request.detokenizer is not None:
            text = request.detokenizer.push(token, look_for_stop=enough)
            if request.detokenizer.stopped:
                return FinishReason.STOP, text
        if request.constraint is not None and request.constraint.finished:
            return FinishReason.STOP, text + (request.detokenizer.flush() if request.detokenizer else "")
        if len(request.tokens) >= request.max_length:
            return FinishReason.LENGTH, text + (request.detokenizer.flush() if request.detokenizer else "")
        return None, text

    def _fail(self, scheduled: Scheduled, error: Exception) -> list[Delta]:
        failed = [request for request in scheduled.requests if request.status is Status.RUNNING]
        for request in failed:
            self.scheduler.finish(request, FinishReason.ERROR)
        return [Delta(request, "", (), (), FinishReason.ERROR, error) for request in failed]

    def _record(self, scheduled: Scheduled, seconds: float) -> None:
        plan, stats = scheduled.plan, self.stats
        prefill = sum(entry.num_new for entry in plan.entries if entry.kind is Kind.PREFILL)
        stats.prefill_tokens += prefill
        stats.decode_tokens += plan.num_tokens - prefill
        stats.padding_tokens += plan.bucket.tokens - plan.num_tokens
        stats.memory_rows += plan.num_tokens * self._rows_a_token
        stats.preemptions = self.scheduler.num_preemptions
        stats.seconds += seconds
        stats.num_steps += 1
        stats.peak_pages = max(stats.peak_pages, self.scheduler.pages.num_pages - self.scheduler.pages.num_free)
        record = {"step": plan.step_id, "ms": seconds * 1e3, "kind": plan.name, "tokens": plan.num_tokens}
        stats.steps.append(record | {"sequences": len(plan.entries), "bucket": str(plan.bucket)})


def pages_that_fit(model: Model, settings: Resolved) -> int:
    """Pages for every request at full length, or as many as `cache_bytes` holds. ValueError if that is not one."""
    page, item = page_size(model.block_size), settings.dtype.itemsize
    a_token = sum(2 * layer.num_kv_heads * layer.head_dim for layer in model.attention_layers) * item
    for layer in model.attention_layers:
        if layer.indexer is not None and layer.indexer.budget < settings.max_context:
            a_token += layer.indexer.head_dim * item * (1 + layer.indexer.block_size) // layer.indexer.block_size
    wanted = settings.max_num_sequences * -(-settings.max_context // page)
    budget = settings.cache_bytes
    if budget is None:
        on_gpu = settings.device.type == "cuda"
        budget = int(torch.cuda.mem_get_info(settings.device)[0] * 0.6) if on_gpu else 1 << 30
    fitting = budget // max(a_token * page, 1)
    if fitting < 1:
        raise ValueError(f"cache_bytes must hold a page of {page} tokens, {a_token * page} bytes, got {budget}")
    return min(wanted, fitting)


def _logprobs(output: StepOutput, i: int, count: int) -> TokenLogprobs:
    sampled = output.sampled
    assert sampled.logprobs is not None and sampled.top_tokens is not None and sampled.top_logprobs is not None
    top = zip(sampled.top_tokens[i, :count].tolist(), sampled.top_logprobs[i, :count].tolist(), strict=True)
    return TokenLogprobs(output.tokens[i], float(sampled.logprobs[i]), tuple(top))
