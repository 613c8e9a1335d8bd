"""Executes step plans: owns the model, the pools and the token history, and nothing of the scheduling.

A step is one sequence of operations at fixed places (`_run`), captured once a bucket on a GPU and replayed from then
on. `launch` sets it going and `retire` waits for what it brought: in between the host is free to plan the next one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deltagram.attention.cache import LayerCache, page_size, poison
from deltagram.engine.params import MAX_LOGIT_BIAS_ENTRIES, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS
from deltagram.engine.request import Request
from deltagram.engine.request_table import RequestTable
from deltagram.engine.sampler import SampleRow, SamplingTensors, sample
from deltagram.engine.scheduler import Scheduled
from deltagram.engine.settings import Resolved
from deltagram.gdn.core import LayerState
from deltagram.gdn.state import SlotPool, allocate, recent_rings, ring_length, stored_every
from deltagram.graphs.buffers import IN_FLIGHT, Report, StepBuffers
from deltagram.graphs.capture import StepGraphs
from deltagram.kernels.commit_tokens import commit_tokens
from deltagram.kernels.place_drafts import place_drafts
from deltagram.kernels.sample_tokens import Scratch, sample_tokens
from deltagram.models.base import Model
from deltagram.step.drafts import prepare_drafts
from deltagram.step.history import TokenHistory
from deltagram.step.plan import Bucket, StepPlan
from deltagram.step.sequences import SequenceTable, pack, packed_size, prepare


class Reported(NamedTuple):
    """Log-probabilities under the model's own logits, of requests that asked, by where a token was sampled."""

    logprobs: Tensor  # fp32 [L], of the tokens
    top_tokens: Tensor  # int64 [L, most], likeliest first
    top_logprobs: Tensor  # fp32 [L, most]


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that runs, or has run, and whose tokens nobody has looked at."""

    scheduled: Scheduled
    report: Report
    reported: Reported | None
    done: torch.cuda.Event | None
    num_eager: int  # pieces of it that no graph holds


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step brought one request: tokens, and where in `reported` the first of them is."""

    request: Request
    tokens: list[int]
    first: int
    reported: Reported | None


class Runner:
    """One model on one device, with pools for the requests of `slots` and `num_pages` pages.

    `end_token_ids` are the model's own, which end a request unless it says otherwise. `largest` is the bucket that any
    step fits in. `num_checkpoints` of states that prefixes share fit in the memory that the settings give them.
    """

    def __init__(
        self,
        model: Model,
        settings: Resolved,
        slots: SlotPool,
        num_pages: int,
        end_token_ids: tuple[int, ...],
        largest: Bucket,
    ) -> None:
        self.model, self.settings, self.slots, self.end_token_ids = model, settings, slots, end_token_ids
        self.device, self.max_draft = settings.device, largest.max_draft
        self.page_size = page_size(model.block_size)
        num_slots = slots.num_slots
        self.history = TokenHistory(num_slots + 1, settings.max_context, self.device, stored_every(self.device))
        pages_a_request = -(-settings.max_context // self.page_size)
        self.page_table = torch.zeros(num_slots + 1, pages_a_request, dtype=torch.int32, device=self.device)
        ahead = model.run_ahead
        sizes = largest.sequences, self.max_draft, len(ahead.stores) if ahead else 0
        self.buffers = StepBuffers(packed_size(largest, self.page_size), *sizes, self.device)
        self._staged_pages: Tensor | None = None
        self._pools: list[Tensor] = []  # what a request's next chunk goes on from
        self._rings: list[Tensor] = []  # what only its next steps read
        self._give_states(num_slots)
        self._give_pages(num_pages)
        self._give_checkpoints(settings.prefix_cache_bytes)
        if model.run_ahead is not None:
            model.run_ahead.go_ahead(settings.run_ahead)
            model.run_ahead.times = self.buffers.times
        self.graphs: StepGraphs | None = None
        self._copied: torch.cuda.Event | None = None  # when what a row's owner staged has been copied
        self.stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self._done = [torch.cuda.Event() for _ in range(IN_FLIGHT)]  # one a step, in turn
            self.stream = torch.cuda.Stream(self.device, priority=-1)
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            vocab = model.config.vocab_size
            edits = MAX_LOGIT_BIAS_ENTRIES + MAX_STOP_TOKEN_IDS + len(end_token_ids)
            self.requests = RequestTable(num_slots + 1, vocab, edits, self.device)
            self.work = Scratch.of(largest.num_samples, vocab, MAX_LOGPROBS, self.device)
            self.buffers.will_bring(self.work.logprobs, self.work.top_tokens, self.work.top_logprobs)
        # A stream is its own context; torch.cuda.stream(it) takes the host 16 us longer.
        self._on_stream: AbstractContextManager[object] = self.stream or nullcontext()

    @torch.inference_mode()
    def capture(self, buckets: Sequence[Bucket], progress: Callable[[int, int], None]) -> None:
        """Capture `buckets`, which are all there are, the largest first: nothing compiles and nothing is allocated from
        then on."""
        assert self.stream is not None
        self.graphs = StepGraphs(self._run, self._fill_with_padding, self.device)
        with self._on_stream:
            self.graphs.capture(buckets, self.settings.graph_bytes, progress)
            self.buffers.start_over()

    def _give_states(self, num_slots: int) -> None:
        dtype, device, poisoned = self.settings.dtype, self.device, self.settings.poison
        for layer in self.model.linear_layers:
            shape = layer.num_value_heads, layer.value_dim, layer.key_dim
            ring = ring_length(layer.conv_reach, self.max_draft), layer.channels
            recent = None
            if self.max_draft or self.history.every > 1:
                sizes = layer.num_key_heads, layer.num_value_heads, layer.value_dim, layer.key_dim
                recent = recent_rings(num_slots, self.history.every, self.max_draft, *sizes, dtype, device, poisoned)
                self._rings += recent
            layer.state = LayerState(
                allocate(num_slots, shape, self.settings.state_dtype, device, poisoned),
                allocate(num_slots, ring, dtype, device, poisoned),
                recent,
            )
            self._pools += [layer.state.recurrent, layer.state.conv]
        for memory in self.model.memory_layers:
            ring = ring_length(memory.reach, self.max_draft), memory.width
            memory.history = allocate(num_slots, ring, dtype, device, poisoned)
            self._pools.append(memory.history)

    def _give_pages(self, num_pages: int) -> None:
        self._page_pools: list[Tensor] = []
        fill = float("nan") if self.settings.poison else 0.0

        def pool(*shape: int) -> Tensor:
            made = torch.full((num_pages, *shape), fill, dtype=self.settings.dtype, device=self.device)
            self._page_pools.append(made)
            return made

        for layer in self.model.attention_layers:
            shape = self.page_size, layer.num_kv_heads, layer.head_dim
            layer.cache = LayerCache(pool(*shape), pool(*shape))
            if layer.indexer is not None and layer.indexer.budget < self.settings.max_context:
                size = layer.indexer.head_dim
                layer.cache.index_keys = pool(self.page_size, size)
                layer.cache.block_keys = pool(self.page_size // layer.indexer.block_size, size)

    def _give_checkpoints(self, size: int) -> None:
        each = sum(pool[0].nbytes for pool in self._pools)
        self.num_checkpoints = size // each if each else 0  # a model without state keeps none
        if 0 < size < each:
            raise ValueError(f"prefix_cache_bytes must hold a checkpoint of {each} bytes, or be 0, got {size}")
        fill = float("nan") if self.settings.poison else 0.0
        try:
            self._kept = [pool.new_full((self.num_checkpoints, *pool.shape[1:]), fill) for pool in self._pools]
        except RuntimeError as error:  # torch's, for memory that is not there
            raise ValueError(f"prefix_cache_bytes is {size}, more than {self.device} has free") from error
        if self.num_checkpoints and self.device.type == "cuda":
            self._staged_pages = torch.zeros(self.page_table.shape, dtype=torch.int32, pin_memory=True)

    def poison_freed(self, slots: list[int], pages: list[int]) -> None:
        """Fill what requests gave back with NaN: no result may depend on it."""
        with self._on_stream:
            for pool in (*self._pools, *self._rings) if slots else ():
                poison(pool, slots)
            for pool in self._page_pools if pages else ():
                poison(pool, pages)

    @torch.inference_mode()
    def launch(self, scheduled: Scheduled) -> Launched:
        """Set a step going. Raises RuntimeError, before anything is computed, if a slot does not hold what the plan
        says."""
        plan, advance = scheduled.plan, self.slots.advance
        for entry, request in zip(plan.entries, scheduled.requests, strict=True):
            which = entry.slot, entry.generation, request.id
            advance(*which, entry.start, entry.num_new, entry.num_draft, entry.uncertain)
        with self._on_stream, self._range(f"step {plan.step_id} {plan.name} {plan.bucket}"):
            return self._launch(scheduled)

    @torch.inference_mode()
    def start_over(self) -> None:
        """Wait for what runs. After it, nothing depends on steps before, whether they were run to their ends or not."""
        with self._on_stream:
            if self.model.run_ahead is not None:
                self.model.run_ahead.finish()
            if self.stream is not None:
                self.stream.synchronize()
            self.buffers.start_over()

    @contextmanager
    def _range(self, name: str) -> Iterator[None]:
        """A named part of the timeline of a profiler, on a GPU."""
        if self.stream is None:
            yield
            return
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()

    def _launch(self, scheduled: Scheduled) -> Launched:
        plan, num_eager = scheduled.plan, 0
        constrained = [
            request
            for entry, request in zip(plan.entries, scheduled.requests, strict=True)
            if request.constraint is not None and entry.samples
        ]
        stages = bool(scheduled.admitted or scheduled.restored or constrained)
        if stages and self._copied is not None:  # long over, but for a step that staged right before this one
            self._copied.synchronize()
        for request in scheduled.admitted:
            self._admit(request)
        for request, checkpoint in scheduled.restored:
            self._share_pages(request)
            _copy(*self._places(request.slot, checkpoint.index))
        self._fill(plan)
        if self.stream is None:
            reported = self._commit_here(scheduled, *self._forward(plan.bucket, scheduled.requests))
            self._save(scheduled)
            return Launched(scheduled, self.buffers.report(), reported, None, 0)
        for request in constrained:
            assert request.constraint is not None
            self.requests.allow(request.slot, request.constraint.allowed)
        if stages:
            self._copied = self.stream.record_event()
        if self.model.run_ahead is not None:
            self.model.run_ahead.wake()
        if any(request.wants_prompt_logits for request in scheduled.requests):
            self._commit(*self._forward(plan.bucket, scheduled.requests))
            num_eager = 1
        elif self.graphs is not None:
            num_eager = self.graphs.replay(plan.bucket)
        else:
            self._run(plan.bucket)
        self._save(scheduled)
        reported = None
        if any(request.params.logprobs is not None for request in scheduled.requests):
            reported = Reported(*self.buffers.bring())
        report, done = self.buffers.report(), self._done[self.buffers.filled % IN_FLIGHT]
        done.record(self.stream)
        return Launched(scheduled, report, reported, done, num_eager)

    def _admit(self, request: Request) -> None:
        self.history.admit(request.slot, request.tokens)
        if self.stream is not None:
            asked = request.params, request.seed, len(request.prompt), self.end_token_ids
            self.requests.admit(request.slot, *asked, constrained=request.constraint is not None)

    def _share_pages(self, request: Request) -> None:
        """Let the device know all pages of a request, some of which it did not get by grants."""
        pages, count = torch.tensor(request.pages, dtype=torch.int32), len(request.pages)
        if self._staged_pages is not None:
            self._staged_pages[request.slot, :count] = pages
            pages = self._staged_pages[request.slot, :count]
        self.page_table[request.slot, :count].copy_(pages, non_blocking=True)

    def _places(self, slot: int, index: int) -> tuple[list[Tensor], list[Tensor]]:
        """A slot's states, and a checkpoint's."""
        return [pool[slot] for pool in self._pools], [kept[index] for kept in self._kept]

    def _save(self, scheduled: Scheduled) -> None:
        for request, checkpoint in scheduled.saved:
            states, kept = self._places(request.slot, checkpoint.index)
            _copy(kept, states)

    def retire(self, launched: Launched) -> list[Sampled]:
        """Wait for a step: what it brought each request that it sampled for, in plan order. Raises RuntimeError for a
        step that is void."""
        if launched.done is not None:
            launched.done.synchronize()
        if self.model.run_ahead is not None:
            self.model.run_ahead.check()
        scheduled, first, brought = launched.scheduled, 0, []
        tokens = launched.report.tokens()
        for n, (entry, request) in enumerate(zip(scheduled.plan.entries, scheduled.requests, strict=True)):
            if entry.samples:
                brought.append(Sampled(request, tokens[n], first, launched.reported))
            first += entry.num_samples
        return brought

    def _fill(self, plan: StepPlan) -> None:
        self.buffers.fill(pack(plan, self.page_size, pad_row=self.slots.pad, pad_slot=self.slots.pad))

    def _fill_with_padding(self, bucket: Bucket) -> None:
        self._fill(StepPlan(0, bucket, ()))

    def _run(self, bucket: Bucket) -> None:
        """The step whose table lies in the buffers: what a graph captures."""
        self._commit(*self._forward(bucket))

    def _forward(
        self, bucket: Bucket, requests: tuple[Request, ...] = ()
    ) -> tuple[SequenceTable, Tensor, Tensor | None]:
        """The logits [L, vocab] after the tokens that are sampled after, and the hidden states of all tokens, if a
        draft head goes on from them. `requests` are looked at for prompts whose logits they want."""
        packed = self.buffers.packed[: packed_size(bucket, self.page_size)]
        with self._range("prepare"):
            table = prepare(packed, bucket, self.history, self.page_table, self.page_size)
        rows = None if not bucket.mixed and bucket.num_samples == bucket.tokens else table.sampled
        asked = any(request.wants_prompt_logits for request in requests)
        if asked or self.model.mtp is not None:
            with self._range("layers"):
                every = self.model.forward(table, self.history)
            if asked:
                self._keep_prompt_logits(requests, table, every)
            hidden = every if rows is None else every[rows]
        else:
            every = None
            with self._range("layers"):
                hidden = self.model.forward(table, self.history, rows)
        with self._range("logits"):
            return table, self.model.logits(hidden), every

    def _draft(self, table: SequenceTable, hidden: Tensor | None) -> None:
        """Let the draft head, if there is one, see the step's tokens, and leave the drafts that are `wanted` past the
        history's end."""
        head, history = self.model.mtp, self.history
        if head is None:
            return
        assert hidden is not None
        with self._range("draft"):
            drafting = prepare_drafts(table, history, table.wanted, max(table.bucket.max_draft, 1))
            if self.stream is None and not table.wanted.any():
                head.remember(hidden, drafting.follower, table)
                return
            logits, hidden = head.draft(hidden, drafting.follower, table, drafting.first)
            tokens = [logits.argmax(-1)]
            for one_pass in drafting.tables:
                logits, hidden = head.draft(hidden, tokens[-1], one_pass)
                tokens.append(logits.argmax(-1))
            count, row = table.wanted[drafting.order], table.row[drafting.order]
            place_drafts(torch.stack(tokens, 1), count, row, history.tokens, history.lengths)

    def _commit(self, table: SequenceTable, logits: Tensor, hidden: Tensor | None) -> None:
        """Sample on the device, and add the tokens to the history."""
        at = table.sampled, table.cu_samples, table.sequence, table.position, table.row
        with self._range("sample"):
            tokens, *_ = sample_tokens(logits, *at, self.history.tokens, self.requests.on_device, self.work)
            self._write(table, tokens)
        self._draft(table, hidden)

    def _write(self, table: SequenceTable, tokens: Tensor) -> None:
        history = self.history.tokens, self.history.lengths, self.history.untaken
        told = self.buffers.steps, self.buffers.tokens[: table.bucket.sequences]
        synthetic = self.settings.synthetic_acceptance or 0.0
        commit_tokens(tokens, table.cu_samples, table.row, table.length, table.num_draft, *history, *told, synthetic)

    def _commit_here(
        self, scheduled: Scheduled, table: SequenceTable, logits: Tensor, hidden: Tensor | None
    ) -> Reported | None:
        """As `_commit`, on a CPU."""
        reported = self._sample_here(scheduled, table, logits)
        self._draft(table, hidden)
        return reported

    def _sample_here(self, scheduled: Scheduled, table: SequenceTable, logits: Tensor) -> Reported | None:
        """Sample as `_commit`, on a CPU, which does what the step's requests ask for and no more."""
        sampling = [
            request
            for entry, request in zip(scheduled.plan.entries, scheduled.requests, strict=True)
            for _ in range(entry.num_samples)
        ]
        if not sampling:
            self._write(table, logits.new_empty(0, dtype=torch.int64))
            return None
        rows = [SampleRow(request.params, request.slot, request.seed) for request in sampling]
        tensors = SamplingTensors.build(rows, eos_token_ids=self.end_token_ids)
        lengths = torch.tensor([len(request.prompt) for request in sampling])
        tokens = self.history.tokens
        if tensors.sizes.penalized:  # counting goes over whole rows: only as far as there is text
            tokens = tokens[:, : 1 + max(request.computed for request in sampling)]
        positions = table.position[table.sampled[: len(sampling)]] + 1
        allowed = self._allowed(sampling, logits.shape[1])
        sampled = sample(logits[: len(sampling)], tensors, positions, tokens, lengths, allowed)
        self._write(table, sampled.tokens)
        if sampled.logprobs is None or sampled.top_tokens is None or sampled.top_logprobs is None:
            return None
        return Reported(sampled.logprobs, sampled.top_tokens, sampled.top_logprobs)

    def _allowed(self, requests: list[Request], vocab_size: int) -> Tensor | None:
        """bool [N, V]: what the constraints of the requests allow; None if there are none."""
        if all(request.constraint is None for request in requests):
            return None
        allowed = torch.ones(len(requests), vocab_size, dtype=torch.bool)
        for n, request in enumerate(requests):
            if request.constraint is not None:
                allowed[n] = torch.from_numpy(request.constraint.allowed)
        return allowed

    def _keep_prompt_logits(self, requests: tuple[Request, ...], table: SequenceTable, hidden: Tensor) -> None:
        for n, request in enumerate(requests):
            if request.wants_prompt_logits:
                tokens = slice(int(table.cu_tokens[n]), int(table.cu_tokens[n + 1]))
                request.prompt_logits.append(self.model.logits(hidden[tokens]).float().cpu())


def _copy(to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Each tensor of `source` to the one in its place: one launch for all of a dtype."""
    for dtype in {tensor.dtype for tensor in to}:
        mine = [n for n, tensor in enumerate(to) if tensor.dtype == dtype]
        torch._foreach_copy_([to[n] for n in mine], [source[n] for n in mine])
