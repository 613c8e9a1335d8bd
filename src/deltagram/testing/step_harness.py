"""One model's runner, driven by plans made up on the spot: what a step costs, whatever it mixes.

Requests begin in the middle: their tokens are random, and what the pools hold of them is zeros, so that a step's work
is that of a real one without the prefill before it. Of drafts a given number is accepted, which the next step replays.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from deltagram.attention.cache import page_size
from deltagram.engine.params import SamplingParams
from deltagram.engine.request import Request
from deltagram.engine.runner import Launched, Runner
from deltagram.engine.scheduler import Scheduled
from deltagram.engine.settings import Resolved, Settings, resolve
from deltagram.gdn.state import SlotPool
from deltagram.models.base import Model
from deltagram.step.buckets import Ladder
from deltagram.step.plan import Bucket, Entry, Kind, StepPlan

DEVICE_STEPS = 30  # of a round of `device_us`
GREEDY = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


@dataclass(frozen=True)
class Mix:
    """A step: `decode` sequences, `verify` ones of `num_draft` drafts, and prefill chunks of the sizes `chunks`."""

    decode: int = 0
    verify: int = 0
    num_draft: int = 0
    chunks: tuple[int, ...] = ()

    @property
    def num_sequences(self) -> int:
        return self.decode + self.verify + len(self.chunks)

    @property
    def num_tokens(self) -> int:
        return self.decode + self.verify * (1 + self.num_draft) + sum(self.chunks)

    def __str__(self) -> str:
        parts = [f"{self.decode} decode"] if self.decode else []
        parts += [f"{self.verify} verify of {1 + self.num_draft}"] if self.verify else []
        return ", ".join(parts + [f"chunk of {size}" for size in self.chunks])


class StepHarness:
    """A runner of `model` for up to `sequences` requests, with contexts of `context` tokens and room for `more`.

    acceptance: tokens that a verify step brings on average, 1 to 1 + max_draft, whatever it sampled.
    """

    def __init__(
        self,
        model: Model,
        device: torch.device,
        sequences: int,
        context: int,
        max_num_tokens: int,
        max_draft: int = 0,
        eager: bool = False,
        run_ahead: bool = True,
        more: int = 1024,
        acceptance: float = 1.0,
    ) -> None:
        self.model, self.context, self.sequences = model, context, sequences
        page = page_size(model.block_size)
        positions = model.config.max_position_embeddings
        assert context + more <= positions, f"{context} + {more} tokens, of at most {positions}"
        self.limit = min(-(-(context + more + max_num_tokens) // page) * page, positions)
        settings = Settings(
            device=str(device), dtype="bfloat16" if device.type == "cuda" else "float32", max_context=self.limit,
            max_num_sequences=sequences, max_num_tokens=max(max_num_tokens, 63 + sequences * (1 + max_draft)),
            eager=eager, run_ahead=run_ahead, speculation="drafter" if max_draft else "off",
            num_draft=max(max_draft, 1), synthetic_acceptance=acceptance if max_draft else None,
        )  # fmt: skip
        self.settings: Resolved = resolve(settings, model.config)
        self.ladder = Ladder.of(self.settings.max_num_tokens, sequences, max_draft)
        largest = self.ladder.fit(self.settings.max_num_tokens, sequences, mixed=True)
        self.pages_a_request = -(-self.limit // page)
        self.slots = SlotPool(sequences)
        self.runner = Runner(model, self.settings, self.slots, sequences * self.pages_a_request, (), largest)
        number = torch.arange((sequences + 1) * self.pages_a_request, dtype=torch.int32, device=device)
        self.runner.page_table.copy_((number % (sequences * self.pages_a_request)).view_as(self.runner.page_table))
        self._step = 0

    def capture(self, buckets: Sequence[Bucket] | None = None) -> float:
        """Capture `buckets`, or all there are; seconds."""
        began = time.perf_counter()
        self.runner.capture(self.ladder.buckets if buckets is None else buckets, lambda done, total: None)
        return time.perf_counter() - began

    def bucket(self, mix: Mix) -> Bucket:
        """The bucket that a step is padded to."""
        return self.ladder.fit(mix.num_tokens, mix.num_sequences, bool(mix.chunks))

    def begin(self, mix: Mix) -> list[Request]:
        """Requests in the middle of their context, one a sequence of `mix`; those that had the slots are gone."""
        for slot in list(self.slots._owners):
            self.slots.give_back(slot, self.slots._owners[slot].request)
        requests = []
        generator = torch.Generator().manual_seed(0)
        for n in range(mix.num_sequences):
            vocab = self.model.config.vocab_size
            tokens = torch.randint(0, vocab, (self.limit,), generator=generator).tolist()  # drafts too, all of them
            request = Request(
                id=n, prompt=tuple(tokens), params=GREEDY, seed=n, max_length=2**30, end_token_ids=frozenset()
            )
            request.slot = self.slots.take(n)
            request.computed = self.context if n < mix.decode + mix.verify else self.context // 64 * 64
            self.slots._owners[request.slot].state_pos = request.computed
            requests.append(request)
            with torch.cuda.stream(self.runner.stream):
                self.runner._admit(request)
                self.runner.history.lengths[request.slot] = self.context + 1
                self.runner.history.untaken[request.slot] = 0
        return requests

    def plan(self, mix: Mix, requests: Sequence[Request]) -> Scheduled:
        """The next step of requests of `begin`, with those before it retired, or still in flight."""
        kinds = [Kind.DECODE] * mix.decode + [Kind.VERIFY] * mix.verify + [Kind.PREFILL] * len(mix.chunks)
        sizes = [1] * mix.decode + [1 + mix.num_draft] * mix.verify + list(mix.chunks)
        entries = []
        for request, kind, size in zip(requests, kinds, sizes, strict=True):
            start, drafts = request.computed, size - 1 if kind is Kind.VERIFY else 0
            slot = request.slot
            uncertain, generation = request.uncertain, self.slots.generation[slot]
            entries.append(Entry(slot, generation, slot, kind, size, start, drafts, True, uncertain))
            if kind is not Kind.PREFILL:  # a chunk is run again and again
                request.computed += size  # as if all drafts were accepted, until `retire` knows
                request.uncertain += drafts
            else:
                self.slots._owners[slot].state_pos = start
        self._step += 1
        return Scheduled(StepPlan(self._step, self.bucket(mix), tuple(entries)), tuple(requests), ())

    def retire(self, launched: Launched) -> None:
        """Wait for a step, and count what it brought."""
        brought = self.runner.retire(launched)
        for entry, sampled in zip(launched.scheduled.plan.entries, brought, strict=True):
            if entry.kind is not Kind.PREFILL:
                sampled.request.uncertain -= entry.num_draft
                sampled.request.computed -= 1 + entry.num_draft - len(sampled.tokens)

    def device_us(self, mix: Mix, steps: int = DEVICE_STEPS, rounds: int = 5) -> float:
        """Microseconds of a captured step on the device: the best round's mean, of steps replayed back to back, which
        go on from what those before them accepted."""
        assert self.runner.graphs is not None
        replay = self.runner.graphs.graphs[self.bucket(mix)].replay
        times = []
        for _ in range(rounds):
            self.retire(self.runner.launch(self.plan(mix, self.begin(mix))))
            with torch.cuda.stream(self.runner.stream):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                for _ in range(steps):
                    replay()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) * 1e3 / steps)
                self.runner.buffers.start_over()
        return min(times)

    def step_us(self, mix: Mix, steps: int = 30) -> tuple[float, float]:
        """Microseconds from one step's end to the next one's, with a step in flight while the next is prepared; and of
        those, what the host takes for a step up to its launch. Medians."""
        requests, host, wall = self.begin(mix), [], []
        before: Launched | None = None
        for _ in range(steps + 4):
            began = time.perf_counter()
            launched = self.runner.launch(self.plan(mix, requests))
            host.append(time.perf_counter() - began)
            if before is not None:
                self.retire(before)
                wall.append(time.perf_counter())
            before = launched
        assert before is not None
        self.retire(before)
        gaps = [b - a for a, b in pairwise(wall)]
        return statistics.median(gaps[2:]) * 1e6, statistics.median(host[2:]) * 1e6
