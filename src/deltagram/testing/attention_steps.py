"""Steps of paged attention on random text: any mix of sequences, in scattered pages, NaN wherever nobody may look."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deltagram.kernels._triton import Impl
from deltagram.kernels.paged_attention import paged_attention
from deltagram.step.plan import Kind


class Text(NamedTuple):
    """What a request's tokens bring, by position: q and gate [L, Hq, D], k and v [L, Hkv, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor

    @staticmethod
    def random(
        length: int, heads: int, key_heads: int, size: int, seed: int, dtype: torch.dtype, device: torch.device
    ) -> "Text":
        generator = torch.Generator(device).manual_seed(seed)
        counts = heads, key_heads, key_heads, heads
        return Text(*(torch.randn(length, n, size, generator=generator, device=device).to(dtype) for n in counts))


class Part(NamedTuple):
    """A request's share of a step: positions `start` to `start + new - 1`."""

    text: Text
    kind: Kind
    start: int
    new: int


class AttentionStep:
    """`parts`, then `pad_sequences` sequences and `pad_tokens` tokens of padding. `seed` orders pages and rows; a
    request may have `width` pages."""

    def __init__(
        self,
        parts: Sequence[Part],
        page_size: int = 64,
        pad_tokens: int = 0,
        pad_sequences: int = 0,
        seed: int = 0,
        width: int | None = None,
    ) -> None:
        like = parts[0].text
        self.parts, device = parts, like.q.device
        generator = torch.Generator().manual_seed(seed)
        ends = [part.start + part.new for part in parts]
        pages_each = [-(-end // page_size) for end in ends]
        order = torch.randperm(sum(pages_each) + 1, generator=generator)
        self.rows = torch.randperm(len(parts) + 1, generator=generator)
        table = torch.full((len(parts) + 1, width or max(pages_each) + 1), int(order[-1]), dtype=torch.int32)
        shape = (len(order), page_size, *like.k.shape[1:])
        self.k, self.v = (torch.full(shape, float("nan"), dtype=like.k.dtype, device=device) for _ in range(2))
        taken = 0
        for n, (part, end) in enumerate(zip(parts, ends, strict=True)):
            pages = order[taken : taken + pages_each[n]]
            taken += pages_each[n]
            table[self.rows[n], : len(pages)] = pages.int()
            at = (pages[:, None] * page_size + torch.arange(page_size)).flatten()[:end].to(device)
            self.k.flatten(0, 1)[at], self.v.flatten(0, 1)[at] = part.text.k[:end], part.text.v[:end]
        self.total = sum(part.new for part in parts)
        padding = torch.full((pad_tokens, *like.q.shape[1:]), float("nan"), dtype=like.q.dtype, device=device)
        self.q = torch.cat([*(part.text.q[part.start : part.start + part.new] for part in parts), padding])
        gates = torch.cat([*(part.text.gate[part.start : part.start + part.new] for part in parts), padding])
        self.gate = torch.stack((torch.full_like(gates, float("nan")), gates), 2)[:, :, 1]  # strided, as a projection's

        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.table = table.to(device)
        self.row = ints(self.rows[: len(parts)].tolist() + [int(self.rows[-1])] * pad_sequences)
        self.kind = ints([int(part.kind) for part in parts] + [int(Kind.PAD)] * pad_sequences)
        begins = torch.tensor([0, *(part.new for part in parts), *[0] * pad_sequences]).cumsum(0)
        self.cu_tokens = ints(begins.tolist())
        self.length = ints(ends + [0] * pad_sequences)
        self.sequence = ints([n for n, part in enumerate(parts) for _ in range(part.new)] + [-1] * pad_tokens)
        self.position = ints([p for part in parts for p in range(part.start, part.start + part.new)] + [0] * pad_tokens)

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.table, self.row, self.kind, self.cu_tokens, self.length, self.sequence, self.position

    def run(
        self,
        impl: Impl = None,
        selected: Tensor | None = None,
        block_size: int = 1,
        gated: bool = True,
        exact: bool = False,
    ) -> Tensor:
        """The op's result, [T, Hq, D]; `exact`: in float64."""
        floats = (self.q, self.k, self.v, self.gate)
        q, k, v, gate = (x.double() for x in floats) if exact else floats
        mixed = any(part.kind == Kind.PREFILL for part in self.parts)
        drafts = max([part.new - 1 for part in self.parts if part.kind != Kind.PREFILL], default=0)
        gates = gate if gated else None
        scale = q.shape[2] ** -0.5
        return paged_attention(q, k, v, *self.tables, scale, mixed, drafts, selected, block_size, gates, impl)

    def split(self, out: Tensor) -> list[Tensor]:
        """The rows of each part."""
        return list(out[: self.total].split([part.new for part in self.parts]))

    def some_blocks(self, listed: int, block_size: int, seed: int = 0) -> Tensor:
        """A selection as select_blocks might make it, [T, listed]: the same for a position whatever the step."""
        chosen = torch.full((len(self.q), listed), -1, dtype=torch.int32)
        for t in range(self.total):
            position = int(self.position[t])
            complete = (position + 1) // block_size
            generator = torch.Generator().manual_seed(seed + position)
            some = torch.randperm(complete, generator=generator)[:listed]
            chosen[t, : len(some)] = some.int()
        return chosen.to(self.q.device)
