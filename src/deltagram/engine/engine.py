"""The engine: requests in, steps run, text out."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from deltagram.attention.cache import PagePool, page_size
from deltagram.engine.detokenizer import Detokenizer
from deltagram.engine.params import SamplingParams
from deltagram.engine.prefix import PrefixCache
from deltagram.engine.replicas import Replicas
from deltagram.engine.request import Constraint, FinishReason, Request, Status
from deltagram.engine.runner import Launched, Runner, Sampled
from deltagram.engine.scheduler import Scheduler
from deltagram.engine.settings import Resolved
from deltagram.engine.speculate import Drafter, PromptLookup, Speculation
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
    """Counts since the engine was made. `steps` has one record a step, the last `MAX_RECORDS` of them.

    decode_tokens are those that decode and verify steps added; drafted_tokens the drafts that were verified, and
    accepted_tokens those of them that were right. prefix_misses are by reason: engine/prefix.py.
    """

    prefill_tokens: int = 0
    decode_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    prefix_hits: int = 0
    prefix_tokens: int = 0  # that hits did not have to compute
    prefix_misses: dict[str, int] = field(default_factory=dict)
    prefix_evictions: int = 0
    prefix_checkpoints: int = 0  # in use
    max_prefix_checkpoints: int = 0
    padding_tokens: int = 0
    memory_rows: int = 0
    preemptions: int = 0
    run_ahead_hits: int = 0  # memory chains that were done when their layer asked
    run_ahead_stalls: int = 0  # those that their layer waited for
    run_ahead_stall_seconds: float = 0.0
    eager_segments: int = 0  # parts of steps that no graph held, where steps are captured
    seconds: float = 0.0
    peak_pages: int = 0
    num_pages: int = 0
    num_steps: int = 0
    steps: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_RECORDS))


MAX_RECORDS = 100_000


class DeviceFault(RuntimeError):
    """The device has failed and takes no more work: the process must be started anew."""


class Engine:
    """Runs requests on one model. Not thread-safe: one caller adds, steps and aborts.

    `tokenizer` turns tokens into text; without one the deltas have token ids alone. On a GPU, steps are captured before
    the first request, unless the settings say `eager`; `progress` is told how many of how many are done. `ahead` says
    whether a step is planned while another runs, as it is by default on a GPU. `replicas` has the engine step together
    with those of other ranks. `drafter` drafts where the settings leave speculation to one. `buckets` have the
    settings' `max_draft`.
    """

    def __init__(
        self,
        model: Model,
        settings: Resolved,
        tokenizer: Tokenizer | None = None,
        num_pages: int | None = None,
        buckets: ExactBuckets | Ladder | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
        ahead: bool | None = None,
        replicas: Replicas | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.model, self.settings, self.tokenizer, self.replicas = model, settings, tokenizer, replicas
        page = page_size(model.block_size)
        num_pages = num_pages or pages_that_fit(model, settings)
        slots, pages = SlotPool(settings.max_num_sequences), PagePool(num_pages)
        ends = model.config.stop_token_ids + (tokenizer.eos_token_ids if tokenizer else ())
        self.end_token_ids = tuple(dict.fromkeys(token for token in ends if token < model.config.vocab_size))
        sizes = settings.max_num_tokens, settings.max_num_sequences
        on_gpu = settings.device.type == "cuda"
        most = settings.max_draft
        buckets = buckets or (Ladder.of(*sizes, most) if on_gpu else ExactBuckets(most))
        largest = buckets.fit(*sizes, mixed=True)
        self.runner = Runner(model, settings, slots, num_pages, self.end_token_ids, largest)
        self.speculation: Speculation | None = None
        if most:
            assert buckets.max_draft == most, "buckets have room for the drafts"
            assert (drafter is None) == (settings.speculation != "drafter"), "a drafter goes with speculation 'drafter'"
            assert (model.mtp is None) == (settings.speculation != "mtp"), "a draft head goes with speculation 'mtp'"
            host = PromptLookup if settings.speculation == "prompt_lookup" else drafter
            self.speculation = Speculation(most, settings.adaptive_drafts, host)
        num_checkpoints = self.runner.num_checkpoints
        self.prefixes = PrefixCache(num_checkpoints, page, pages) if num_checkpoints else None
        limits = page, settings.max_num_tokens
        self.scheduler = Scheduler(slots, pages, *limits, buckets, self.speculation, self.prefixes)
        if on_gpu and not settings.eager:
            assert isinstance(buckets, Ladder), "graphs have fixed sizes"
            self.runner.capture(buckets.buckets, progress)
        self._depth = 2 if (on_gpu if ahead is None else ahead) else 1  # steps that run at once
        self._in_flight: deque[tuple[Launched, float]] = deque()  # and when each was launched
        self.undelivered: list[Delta] = []  # the next step returns them
        self._delivering: tuple[Request, int, int] | None = None  # whose, and how many tokens and deltas there were
        self._is_whole = True  # nothing has been left half done
        self._last_end = 0.0
        self._counts_waits = model.run_ahead is not None and model.run_ahead.stream is not None
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
        request = Request(
            id=self._next_id,
            prompt=prompt,
            params=params,
            seed=seed,
            max_length=min(len(prompt) + params.max_tokens, self.max_length),
            end_token_ids=frozenset(params.end_token_ids(self.end_token_ids)),
            detokenizer=self._detokenizer(params),
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
        """End a request now and free what it owns; nothing more comes of it. One that is not queued is left alone."""
        with self._guarded():
            self.undelivered = [delta for delta in self.undelivered if delta.request is not request]
            if request.status in (Status.WAITING, Status.RUNNING):
                self.scheduler.finish(request, FinishReason.ABORT)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight) or bool(self.undelivered)

    def step(self) -> list[Delta]:
        """Launch a step, and return what the last one added; an empty list when there was nothing to run, or no token
        yet. On a GPU a step is launched before the tokens of the one ahead of it are looked at.

        An exception, wherever it comes from, ends the requests of its step with FinishReason.ERROR (if it comes while
        one is planned, all that run, and the one that is looked at for admission), and all others are computed anew; it
        is raised if there are none to end. An interrupt (ctrl-C) is passed on, and all are computed anew; no token is
        lost or given twice, but a request with a constraint that was just being told a token ends with an error. Raises
        DeviceFault where the device has failed: nothing can be computed any more.
        """
        with self._guarded():
            launched = len(self._in_flight) < self._depth and self._launch()
            if self._in_flight and (len(self._in_flight) == self._depth or not launched):
                self._retire()
        return self._given()

    def drain(self) -> list[Delta]:
        """Wait for the steps that run, and return what they added; nothing is launched."""
        with self._guarded():
            while self._in_flight:
                self._retire()
        return self._given()

    def start_over(self) -> None:
        """Drop the steps that run, whatever state they and the books of this engine are in: every request that has not
        ended is computed anew."""
        self._is_whole = False
        self.runner.start_over()
        self._in_flight.clear()
        if self._delivering is not None:
            self._take_back(*self._delivering)
        for delta in self.undelivered:
            if delta.finish_reason is not None:
                delta.request.status, delta.request.finish_reason = Status.FINISHED, delta.finish_reason
        self.scheduler.start_over()
        self._is_whole, self._delivering = True, None

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Around whatever changes the engine's state: if it breaks off, the engine starts over; see `step`."""
        try:
            if not self._is_whole:  # an interrupt came while it started over
                self.start_over()
            self._is_whole, self._delivering = False, None
            try:
                yield
            except torch.AcceleratorError:
                raise
            except Exception as error:
                if not self._fail(error):
                    raise
            except BaseException:
                self.start_over()
                raise
            self._is_whole = True
        except torch.AcceleratorError as error:
            self._is_whole = True  # as far as it can be
            raise DeviceFault(f"the device failed: {error}") from error

    def _fail(self, error: Exception) -> bool:
        """End the requests of the step at hand, and start over; False if there are none."""
        told = {delta.request for delta in self.undelivered if delta.finish_reason is not None}
        failed = [each for each in self.scheduler.at_hand if each.status is not Status.FINISHED and each not in told]
        self.undelivered += [Delta(request, "", (), (), FinishReason.ERROR, error) for request in failed]
        self.start_over()
        return bool(failed)

    def _take_back(self, request: Request, num_tokens: int, num_deltas: int) -> None:
        """Tokens that were being delivered when an interrupt came, unless they are among the deltas: they are sampled
        again."""
        if len(self.undelivered) > num_deltas:
            return
        del request.tokens[num_tokens:]
        if request.constraint is not None:
            error = RuntimeError("interrupted while the constraint was told a token, which cannot be taken back")
            self.undelivered.append(Delta(request, "", (), (), FinishReason.ERROR, error))
        elif request.detokenizer is not None:
            request.detokenizer = self._detokenizer(request.params, request.tokens[len(request.prompt) :])

    def _detokenizer(self, params: SamplingParams, output: Sequence[int] = ()) -> Detokenizer | None:
        """One that goes on after `output`."""
        if self.tokenizer is None:
            return None
        made = Detokenizer(
            self.tokenizer,
            stop=params.stop,
            include_stop=params.include_stop,
            skip_special_tokens=params.skip_special_tokens,
        )
        for count, token in enumerate(output, 1):
            made.push(token, look_for_stop=count >= params.min_tokens)
        return made

    def _given(self) -> list[Delta]:
        given, self.undelivered, self._delivering = self.undelivered, [], None
        return given  # no interrupt comes in between: Python looks for signals where it calls or loops

    def _launch(self) -> bool:
        """Whether there was a step to launch."""
        self.scheduler.at_hand = self.scheduler.running.copy()
        self._propose()
        scheduled = self.scheduler.schedule(ahead=bool(self._in_flight))
        self.scheduler.at_hand = list(scheduled.requests) if scheduled else []
        if self.replicas is not None:
            buckets = None if self.runner.graphs is None else self.scheduler.buckets
            with torch.cuda.stream(self.runner.stream):
                scheduled = self.replicas.agree(scheduled, self.has_work, buckets)
        if scheduled is None:
            return False
        freed = self.scheduler.take_freed()
        began = time.perf_counter()
        if self.settings.poison:
            self.runner.poison_freed(*freed)
        with self.replicas.watched(scheduled.plan) if self.replicas else nullcontext():
            self._in_flight.append((self.runner.launch(scheduled), began))
        return True

    def _propose(self) -> None:
        """Have the host's drafter draft for each request that decodes next; a request that it fails for ends."""
        running = list(self.scheduler.running)
        for request in running:
            if request.drafts_on_host and not request.is_prefilling and not request.in_flight:
                assert self.speculation is not None
                try:
                    self.speculation.propose(request, len(running), self.model.config.vocab_size)
                except Exception as error:
                    self._give(Delta(request, "", (), (), FinishReason.ERROR, error))

    def _retire(self) -> None:
        launched, began = self._in_flight[0]
        self.scheduler.at_hand = list(launched.scheduled.requests)
        with self.replicas.watched(launched.scheduled.plan) if self.replicas else nullcontext():
            sampled = self.runner.retire(launched)
        self._in_flight.popleft()
        self.scheduler.retire(launched.scheduled, {each.request.id: len(each.tokens) for each in sampled})
        self._record(launched, began, sampled)
        for each in sampled:
            if each.request.status is Status.RUNNING:
                self._deliver(each)

    def _deliver(self, sampled: Sampled) -> None:
        request, texts, taken, reason = sampled.request, [], 0, None
        self._delivering = request, len(request.tokens), len(self.undelivered)
        for token in sampled.tokens:
            request.tokens.append(token)
            taken += 1
            if request.constraint is not None:
                try:
                    request.constraint.accept(token)
                except Exception as error:
                    self._give(Delta(request, "", (token,), (), FinishReason.ERROR, error))
                    return
            reason, text = self._consume(request, token)
            texts.append(text)
            if reason is not None:
                break
        logprobs: tuple[TokenLogprobs, ...] = ()
        if request.params.logprobs is not None:
            logprobs = tuple(_logprobs(sampled, i, request.params.logprobs) for i in range(taken))
        self._give(Delta(request, "".join(texts), tuple(sampled.tokens[:taken]), logprobs, reason))

    def _give(self, delta: Delta) -> None:
        self.undelivered.append(delta)
        if delta.finish_reason is not None:
            self.scheduler.finish(delta.request, delta.finish_reason)

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

    def _record(self, launched: Launched, began: float, sampled: list[Sampled]) -> None:
        """Count a step. Its time is its own: from when it was launched, or the step ahead of it ended, to now."""
        plan, stats, now = launched.scheduled.plan, self.stats, time.perf_counter()
        seconds = now - max(began, self._last_end)
        self._last_end = now
        prefill = sum(entry.num_new for entry in plan.entries if entry.kind is Kind.PREFILL)
        stats.prefill_tokens += prefill
        drafted = sum(entry.num_draft for entry in plan.entries)
        accepted = sum(len(each.tokens) - 1 for each in sampled)
        stats.decode_tokens += plan.num_tokens - prefill - drafted + accepted
        stats.drafted_tokens += drafted
        stats.accepted_tokens += accepted
        if self.speculation is not None and plan.name == "decode":
            self.speculation.cost.learn(plan.bucket.tokens, seconds)
        if self.prefixes is not None:
            self._count_prefixes(self.prefixes)
        stats.padding_tokens += plan.bucket.tokens - plan.num_tokens
        stats.memory_rows += plan.num_tokens * self._rows_a_token
        stats.preemptions = self.scheduler.num_preemptions
        stats.eager_segments += launched.num_eager
        if self._counts_waits:
            waits = launched.report.waits()
            stats.run_ahead_hits += sum(wait <= 0 for wait in waits)
            stats.run_ahead_stalls += sum(wait > 0 for wait in waits)
            stats.run_ahead_stall_seconds += sum(max(wait, 0) for wait in waits) / 1e9
        stats.seconds += seconds
        stats.num_steps += 1
        stats.peak_pages = max(stats.peak_pages, self.scheduler.pages.num_pages - self.scheduler.pages.num_free)
        record = {"step": plan.step_id, "ms": seconds * 1e3, "kind": plan.name, "tokens": plan.num_tokens}
        stats.steps.append(record | {"sequences": len(plan.entries), "bucket": str(plan.bucket)})

    def _count_prefixes(self, prefixes: PrefixCache) -> None:
        stats = self.stats
        stats.prefix_hits, stats.prefix_tokens = prefixes.hits, prefixes.restored
        stats.prefix_misses, stats.prefix_evictions = dict(prefixes.misses), prefixes.evictions
        stats.prefix_checkpoints, stats.max_prefix_checkpoints = prefixes.num_used, prefixes.num_checkpoints


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


def _logprobs(sampled: Sampled, i: int, count: int) -> TokenLogprobs:
    told, row = sampled.reported, sampled.first + i
    assert told is not None
    top = zip(told.top_tokens[row, :count].tolist(), told.top_logprobs[row, :count].tolist(), strict=True)
    return TokenLogprobs(sampled.tokens[i], float(told.logprobs[row]), tuple(top))
