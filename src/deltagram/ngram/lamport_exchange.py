"""Rows of a table split by heads for ranks that have the same tokens: each looks up and decodes its own columns, and a
Lamport gather brings the numbers together. All layers go in one gather.

It carries numbers, not packed rows, and turns -0.0 into +0.0: see kernels/lamport_gather.py.
"""

import torch
from torch import Tensor

from deltagram.ngram.exchange import Exchange, Rows
from deltagram.ngram.sharding import SplitTables
from deltagram.parallel.lamport import LamportAllGather
from deltagram.parallel.peer_memory import SIZES


def problem(tables: SplitTables, same_tokens: bool) -> str | None:
    """Why tables cannot be exchanged so, or None: what peer_memory.py does not ask itself."""
    if tables.ranks not in SIZES:
        return f"the Lamport exchange is for {', '.join(map(str, SIZES))} ranks, not {tables.ranks}"
    if not tables.splits[0].by_heads:
        return f"the Lamport exchange needs tables split by heads, not {tables.num_columns} heads by rows"
    if not same_tokens:
        return "the Lamport exchange is for ranks that have the same tokens"
    if tables.dtype not in (torch.float32, torch.bfloat16) or width(tables) * tables.dtype.itemsize % 4:
        return f"the Lamport exchange carries rows of fp32 or bf16 in multiples of 4 bytes, not {tables.dtype}"
    return None


def width(tables: SplitTables) -> int:
    """Values of a token in one layer that a rank looks up."""
    return tables.num_columns // tables.ranks * tables.stores[0].format.dim


class LamportExchange:
    """See Exchange. gather: for parts of up to layers * max_slot rows of `width(tables)` values of the tables' dtype;
    longer slots go `above`."""

    name = "lamport"

    def __init__(
        self, tables: SplitTables, gather: LamportAllGather, max_slot: int, above: Exchange | None = None
    ) -> None:
        assert problem(tables, True) is None and gather.max_rows >= tables.num_layers * max_slot
        self.tables, self.gather, self.max_slot, self.above = tables, gather, max_slot, above

    def exchange(self, hashes: Tensor, slot: int) -> Rows:
        """See Exchange."""
        if slot > self.max_slot:
            assert self.above is not None, f"a slot of {slot} tokens, for which no other exchange was given"
            return self.above.exchange(hashes, slot)
        tables, parts = self.tables, []
        for ids, cut, store in zip(hashes, tables.splits, tables.stores, strict=True):
            wanted = cut.local(ids[:, cut.columns(tables.rank)], tables.rank).contiguous()
            parts.append(store.lookup(wanted, tables.dtype).flatten(1))
        values = self.gather.gather(torch.cat(parts))
        return GatheredRows(values.view(*hashes.shape, tables.stores[0].format.dim))

    def check(self) -> None:
        """Raises HangError if an exchange that has ended gave up."""
        self.gather.check()


class GatheredRows:
    """See Rows. values: [layers, T, columns, dim]."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def take(self, layer: int, out: Tensor | None = None) -> Tensor:
        """See Rows."""
        return self.values[layer] if out is None else out.copy_(self.values[layer])
