"""Drives the Gated DeltaNet core through steps without a model or an engine: for tests and benchmarks.

A `Stream` is a request whose projections are drawn ahead, one row a token; `CoreSteps` runs any batch of parts of
streams as one step. `oracle` computes a stream token by token, from the formulas.
"""

from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from deltagram.gdn.core import Gate, LayerState, Weights, forward_core
from deltagram.gdn.state import allocate, recent_rings, ring_length
from deltagram.kernels._triton import Impl
from deltagram.step.history import TokenHistory
from deltagram.step.plan import Bucket, Entry, Kind, StepPlan
from deltagram.step.sequences import SequenceTable, pack, prepare


@dataclass(frozen=True, slots=True)
class CoreShape:
    """Sizes of a layer: H key heads of K, HV value heads of V, convolution width."""

    heads: int = 2
    value_heads: int = 4
    key_dim: int = 16
    value_dim: int = 32
    width: int = 4

    @property
    def channels(self) -> int:
        return 2 * self.heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(slots=True)
class Stream:
    """A request's projections: qkv [L, channels], a and b [L, HV]; `done` tokens computed, of which its state has yet
    to take the last `pending`."""

    qkv: Tensor
    a: Tensor
    b: Tensor
    slot: int
    done: int = 0
    pending: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """A stream's part of a step. The last `num_wrong` tokens of a verify part are drafts that are not the stream's
    tokens."""

    stream: Stream
    kind: Kind
    num_new: int = 1
    num_wrong: int = 0


class CoreSteps:
    """One layer with random weights, its pools (full of NaN) and the steps that run on them."""

    def __init__(
        self,
        shape: CoreShape,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        max_draft: int = 0,
        state_dtype: torch.dtype | None = None,
        impl: Impl = None,
        seed: int = 0,
        every: int = 1,
        few: int = 0,
    ) -> None:
        self.every, self.few = every, few
        self.untaken: list[int] = []  # of each slot, after the last step's certain tokens
        self.shape, self.num_slots, self.dtype, self.device = shape, num_slots, dtype, device
        self.max_draft, self.impl = max_draft, impl
        self.generator = torch.Generator().manual_seed(seed)
        self.conv_weight = (self._normal(shape.channels, shape.width) / 2).to(device, dtype)
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        self.A_log = torch.empty(shape.value_heads).uniform_(0.01, 8, generator=self.generator).log().to(device, exact)
        self.dt_bias = (self._normal(shape.value_heads) - 2).to(device, exact)
        self.weights = Weights(self.conv_weight, self.A_log, self.dt_bias, shape.heads)
        recurrent = shape.value_heads, shape.value_dim, shape.key_dim
        ring = ring_length(shape.width - 1, max_draft), shape.channels
        self.state = LayerState(
            allocate(num_slots, recurrent, state_dtype or exact, device, poison=True),
            allocate(num_slots, ring, dtype, device, poison=True),
            recent_rings(num_slots, every, max_draft, shape.heads, *recurrent, dtype, device, True)
            if max_draft or every > 1
            else None,
        )

    def _normal(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.generator, dtype=torch.float64)

    def stream(self, length: int, slot: int) -> Stream:
        """A new request in `slot`."""
        sizes = self.shape.channels, self.shape.value_heads, self.shape.value_heads
        qkv, a, b = (self._normal(length, size).to(self.device, self.dtype) for size in sizes)
        return Stream(qkv, a, b, slot)

    def table(self, parts: list[Part], bucket: Bucket) -> SequenceTable:
        """The sequence table of a step, through the step's own `pack` and `prepare`."""
        bucket = replace(bucket, max_draft=self.max_draft)
        context = max([part.stream.done + part.num_new for part in parts], default=0) + 1
        history = TokenHistory(self.num_slots + 1, context, self.device, self.every, self.few)
        entries = []
        for part in parts:
            stream = part.stream
            num_draft = part.num_new - 1 if part.kind is Kind.VERIFY else 0
            entries.append(Entry(stream.slot, 0, stream.slot, part.kind, part.num_new, stream.done, num_draft))
            history.lengths[stream.slot] = stream.done + 1
            history.untaken[stream.slot] = stream.pending
        packed = torch.from_numpy(pack(StepPlan(0, bucket, tuple(entries)), 64, self.num_slots, self.num_slots))
        pages = torch.zeros(self.num_slots + 1, context // 64 + 1, dtype=torch.int32, device=self.device)
        table = prepare(packed.to(self.device), bucket, history, pages, 64)
        self.untaken = history.untaken.tolist()
        return table

    def rows(self, parts: list[Part], bucket: Bucket) -> Tensor:
        """What a layer's projection yields: qkv, a, b and what follows, side by side; NaN in the rows of padding."""
        sizes = self._sizes()
        rows = torch.full((bucket.tokens, sum(sizes)), float("nan"), dtype=self.dtype, device=self.device)
        used, filled = sum(sizes[:3]), 0
        for part in parts:
            stream, begin = part.stream, part.stream.done
            known = part.num_new - part.num_wrong
            new = torch.cat([x[begin : begin + known] for x in (stream.qkv, stream.a, stream.b)], 1)
            rows[filled : filled + known, :used] = new
            rows[filled + known : filled + part.num_new, :used] = self._normal(part.num_wrong, used).to(rows)
            filled += part.num_new
        return rows

    def _sizes(self) -> list[int]:
        shape = self.shape
        used = shape.channels + 2 * shape.value_heads
        return [shape.channels, shape.value_heads, shape.value_heads, -used % 16]

    def run(self, table: SequenceTable, rows: Tensor, gate: Gate | None = None) -> Tensor:
        """The core alone: what a graph captures."""
        qkv, a, b, _ = rows.split(self._sizes(), 1)
        return forward_core(table, qkv, a, b, self.weights, self.state, gate, self.impl)

    def come_a_long_way(self, parts: list[Part], accepted: int = 0) -> None:
        """Streams that decode or verify get 1000 tokens, and as many pending as such a one has; and `accepted` more."""
        every = self.every if len(parts) > self.few else 1
        for part in parts:
            if part.kind is not Kind.PREFILL:
                part.stream.done, part.stream.pending = 1000, (999 + part.stream.slot) % every + accepted

    def state_traffic(self, table: SequenceTable) -> int:
        """Bytes of states that a step of `table` reads and writes."""
        kinds = table.kind.tolist()
        states = sum(kind != Kind.PAD for kind in kinds) + kinds.count(Kind.PREFILL) + int(table.stores.sum())
        return states * self.state.recurrent[0].nbytes

    def pools(self) -> list[Tensor]:
        """Every tensor that a step may write."""
        return [self.state.recurrent, self.state.conv, *(self.state.recent or ())]

    def step(self, parts: list[Part], bucket: Bucket | None = None) -> list[Tensor]:
        """Run `parts` in one step and move their streams on; the outputs [n, HV, V] of each part's right tokens."""
        bucket = bucket or exact_bucket(parts)
        out = self.run(self.table(parts, bucket), self.rows(parts, bucket))
        return self.finish(parts, out)

    def finish(self, parts: list[Part], out: Tensor) -> list[Tensor]:
        """Move the streams on; each part's outputs among those of its step, wrong tokens left out."""
        results, filled = [], 0
        for part in parts:
            right = part.num_new - part.num_wrong
            results.append(out[filled : filled + right].clone())
            accepted = right - 1 if part.kind is Kind.VERIFY else 0
            part.stream.done += right
            part.stream.pending = self.untaken[part.stream.slot] + accepted
            filled += part.num_new
        return results


class CapturedCore:
    """A bucket's core as one CUDA graph over fixed buffers, captured on an empty step and replayed on any."""

    def __init__(self, steps: CoreSteps, bucket: Bucket) -> None:
        self.steps, self.bucket = steps, bucket
        self.table, self.rows = steps.table([], bucket), steps.rows([], bucket)
        steps.run(self.table, self.rows)  # compiles
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = steps.run(self.table, self.rows)

    def load(self, parts: list[Part]) -> None:
        """Bring a step into the buffers."""
        table = self.steps.table(parts, self.bucket)
        for field in fields(table):
            value = getattr(table, field.name)
            if isinstance(value, Tensor) and field.name != "page_table":
                getattr(self.table, field.name).copy_(value)
        self.rows.copy_(self.steps.rows(parts, self.bucket))

    def step(self, parts: list[Part]) -> list[Tensor]:
        """As CoreSteps.step, by replay."""
        self.load(parts)
        self.graph.replay()
        return self.steps.finish(parts, self.out)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit by bit, NaN included."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def exact_bucket(parts: list[Part]) -> Bucket:
    """The bucket that holds `parts` and no padding."""
    mixed = any(part.kind is Kind.PREFILL for part in parts)
    return Bucket(sum(part.num_new for part in parts), len(parts), mixed)


def oracle(steps: CoreSteps, stream: Stream) -> tuple[Tensor, Tensor]:
    """Outputs [L, HV, V] of a stream and its states after each token [L, HV, V, K], token by token in float64 on the
    CPU."""
    shape, dtype = steps.shape, torch.float64
    qkv, a, b = (x.to("cpu", dtype) for x in (stream.qkv, stream.a, stream.b))
    weight, A_log, dt_bias = (x.to("cpu", dtype) for x in (steps.conv_weight, steps.A_log, steps.dt_bias))
    length, keys, group = len(qkv), shape.heads * shape.key_dim, shape.value_heads // shape.heads
    before = F.pad(qkv, (0, 0, shape.width - 1, 0))
    convolved = F.silu(torch.stack([before[j : j + length] * weight[:, j] for j in range(shape.width)]).sum(0))
    q, k = (convolved[:, i * keys : (i + 1) * keys].unflatten(1, (shape.heads, -1)) for i in (0, 1))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = ((x * scale).repeat_interleave(group, 1) for x, scale in ((q, shape.key_dim**-0.5), (k, 1)))
    v = convolved[:, 2 * keys :].unflatten(1, (shape.value_heads, -1))
    decay, beta = (-A_log.exp() * F.softplus(a + dt_bias)).exp(), b.sigmoid()
    s, outputs, states = torch.zeros(shape.value_heads, shape.value_dim, shape.key_dim, dtype=dtype), [], []
    for t in range(length):
        s = s * decay[t, :, None, None]
        u = beta[t, :, None] * (v[t] - torch.einsum("hvk,hk->hv", s, k[t]))
        s = s + u[:, :, None] * k[t, :, None]
        states.append(s)
        outputs.append(torch.einsum("hvk,hk->hv", s, q[t]))
    return torch.stack(outputs), torch.stack(states)
