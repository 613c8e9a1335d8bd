"""Executes step plans: owns the model, the pools and the token history, and nothing of the scheduling."""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from deltagram.attention.cache import LayerCache, page_size, poison
from deltagram.engine.request import Request
from deltagram.engine.sampler import SampleOutput, SampleRow, SamplingTensors, sample
from deltagram.engine.scheduler import Scheduled
from deltagram.engine.settings import Resolved
from deltagram.gdn.core import LayerState
from deltagram.gdn.state import SlotPool, allocate, ring_length
from deltagram.models.base import Model
from deltagram.step.history import TokenHistory
from deltagram.step.sequences import SequenceTable, pack, prepare

MAX_DRAFT = 0  # drafted tokens a sequence may verify in one step


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step sampled, for the sequences that yield a token, in plan order."""

    requests: tuple[Request, ...]
    tokens: list[int]
    sampled: SampleOutput


class Runner:
    """One model on one device, with pools for the requests of `slots` and `num_pages` pages.

    `end_token_ids` are the model's own, which end a request unless it says otherwise.
    """

    def __init__(
        self, model: Model, settings: Resolved, slots: SlotPool, num_pages: int, end_token_ids: tuple[int, ...]
    ) -> None:
        self.model, self.settings, self.slots, self.end_token_ids = model, settings, slots, end_token_ids
        self.device = settings.device
        self.page_size = page_size(model.block_size)
        num_slots = slots.num_slots
        self.history = TokenHistory(num_slots + 1, settings.max_context, self.device)
        pages_a_request = -(-settings.max_context // self.page_size)
        self.page_table = torch.zeros(num_slots + 1, pages_a_request, dtype=torch.int32, device=self.device)
        self._pools: list[Tensor] = []
        self._give_states(num_slots)
        self._give_pages(num_pages)

    def _give_states(self, num_slots: int) -> None:
        dtype, device, poisoned = self.settings.dtype, self.device, self.settings.poison
        for layer in self.model.linear_layers:
            shape = layer.num_value_heads, layer.value_dim, layer.key_dim
            ring = ring_length(layer.conv_reach, MAX_DRAFT), layer.channels
            layer.state = LayerState(
                allocate(num_slots, shape, self.settings.state_dtype, device, poisoned),
                allocate(num_slots, ring, dtype, device, poisoned),
            )
            self._pools += [layer.state.recurrent, layer.state.conv]
        for memory in self.model.memory_layers:
            ring = ring_length(memory.reach, MAX_DRAFT), memory.width
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

    def poison_freed(self, slots: list[int], pages: list[int]) -> None:
        """Fill what requests gave back with NaN: no result may depend on it."""
        for pool in self._pools if slots else ():
            poison(pool, slots)
        for pool in self._page_pools if pages else ():
            poison(pool, pages)

    @torch.inference_mode()
    def execute(self, scheduled: Scheduled) -> StepOutput:
        """Run a step. Raises RuntimeError, before anything is computed, if a slot does not hold what the plan says."""
        plan, requests = scheduled.plan, scheduled.requests
        for request in scheduled.admitted:
            self.history.admit(request.slot, request.tokens)
        for entry, request in zip(plan.entries, requests, strict=True):
            self.slots.advance(entry.slot, entry.generation, request.id, entry.start, entry.num_new)
        packed = torch.from_numpy(pack(plan, self.page_size, pad_row=self.slots.pad, pad_slot=self.slots.pad))
        table = prepare(packed.to(self.device), plan.bucket, self.history, self.page_table, self.page_size)
        ends = accumulate(entry.num_new for entry in plan.entries)
        last = [end - 1 for end, entry in zip(ends, plan.entries, strict=True) if entry.samples]
        rows = torch.tensor(last, dtype=torch.int64, device=self.device) if len(last) < plan.bucket.tokens else None
        if any(request.wants_prompt_logits for request in requests):
            hidden = self.model.forward(table, self.history)
            self._keep_prompt_logits(requests, table, hidden)
            hidden = hidden if rows is None else hidden[rows]
        else:
            hidden = self.model.forward(table, self.history, rows)
        return self._sample(scheduled, table, hidden)

    def _sample(self, scheduled: Scheduled, table: SequenceTable, hidden: Tensor) -> StepOutput:
        """hidden: [n, H], of the last token of each sequence that samples."""
        entries = scheduled.plan.entries
        sampling = [n for n, entry in enumerate(entries) if entry.samples]
        requests = tuple(scheduled.requests[n] for n in sampling)
        if not sampling:
            return StepOutput((), [], SampleOutput(torch.empty(0, dtype=torch.int64), None, None, None))
        sequence = torch.tensor(sampling, device=self.device)
        logits = self.model.logits(hidden)
        rows = [SampleRow(request.params, request.slot, request.seed) for request in requests]
        tensors = SamplingTensors.build(rows, eos_token_ids=self.end_token_ids, device=self.device)
        prompt_lengths = torch.tensor([len(request.prompt) for request in requests], device=self.device)
        allowed = self._allowed(requests, logits.shape[1])
        tokens = self.history.tokens
        if tensors.sizes.penalized:  # counting goes over whole rows: only as far as there is text
            tokens = tokens[:, : max(len(request.tokens) for request in requests)]
        sampled = sample(logits, tensors, table.length[sequence], tokens, prompt_lengths, allowed)
        self.history.append(table.row.long()[sequence], sampled.tokens)
        return StepOutput(requests, sampled.tokens.tolist(), sampled)

    def _allowed(self, requests: tuple[Request, ...], vocab_size: int) -> Tensor | None:
        """bool [N, V]: what the constraints of the requests allow; None if there are none."""
        if all(request.constraint is None for request in requests):
            return None
        allowed = torch.ones(len(requests), vocab_size, dtype=torch.bool)
        for n, request in enumerate(requests):
            if request.constraint is not None:
                allowed[n] = torch.from_numpy(request.constraint.allowed)
        return allowed.to(self.device)

    def _keep_prompt_logits(self, requests: tuple[Request, ...], table: SequenceTable, hidden: Tensor) -> None:
        for n, request in enumerate(requests):
            if request.wants_prompt_logits:
                tokens = slice(int(table.cu_tokens[n]), int(table.cu_tokens[n + 1]))
                request.prompt_logits.append(self.model.logits(hidden[tokens]).float().cpu())
