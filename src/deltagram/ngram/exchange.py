"""Rows of a split table, brought to the ranks whose tokens read them.

An Exchange answers the question that a RowStore answers, for tables that no rank has whole and for all memory layers
at once; every exchange gives the bits of a local lookup. CollectiveExchange does it by collectives that every backend
has. exchange_choice.py names them all and picks one.
"""

from typing import Protocol

import torch
from torch import Tensor

from deltagram.kernels.row_decode import row_decode
from deltagram.kernels.row_lookup import row_lookup
from deltagram.ngram.sharding import SplitTables
from deltagram.parallel.groups import Communicator


class Rows(Protocol):
    """What an exchange brought. It is valid until the next exchange begins."""

    def take(self, layer: int, out: Tensor | None = None) -> Tensor:
        """The rows of the `layer`-th table for this rank's tokens: [T, columns, dim] of the tables' dtype, or uint8
        [T, columns, row_bytes]; `out` is filled and returned if given. Id -1 gives zeros."""
        ...


class Exchange(Protocol):
    """Moves rows of split tables between the ranks of a group. Every rank calls it the same number of times, in the
    same order, from one stream."""

    name: str

    def exchange(self, hashes: Tensor, slot: int) -> Rows:
        """Begin with this rank's row ids, int64 [layers, T, columns], T from 0 to `slot`, which all ranks agreed on."""
        ...

    def check(self) -> None:
        """Raises HangError if an exchange that has ended went without some rank's rows, which makes its step void."""
        ...


class CollectiveExchange:
    """By collectives.

    same_tokens: whether all ranks have the same ids, as under tensor parallelism. Then each looks up what it holds of
    them, and all gather it. Otherwise all gather the ids of all, look up what they hold for everyone, and send each
    rank its part.
    """

    name = "collective"

    def __init__(self, tables: SplitTables, communicator: Communicator, same_tokens: bool = False) -> None:
        assert communicator.size == tables.ranks
        self.tables, self.communicator, self.same_tokens = tables, communicator, same_tokens

    def exchange(self, hashes: Tensor, slot: int) -> "PackedRows":
        """See Exchange."""
        tables, ranks = self.tables, self.tables.ranks
        layers, count, columns = hashes.shape
        assert count <= slot and (layers, columns) == (tables.num_layers, tables.num_columns)
        mine = hashes.new_full((slot, layers, columns), -1, dtype=torch.int32)
        mine[:count] = hashes.transpose(0, 1)
        if self.same_tokens:
            found = self._look_up(mine[None])[0]
            received = found.new_empty(ranks, *found.shape)
            self.communicator.all_gather(received, found)
        else:
            everyone = mine.new_empty(ranks, *mine.shape)
            self.communicator.all_gather(everyone, mine)
            found = self._look_up(everyone)
            received = torch.empty_like(found)
            self.communicator.all_to_all(received, found)
        return PackedRows(tables, hashes, received)

    def check(self) -> None:
        """See Exchange: a collective does not end without all ranks, and the watchdog sees that it does not."""

    def _look_up(self, ids: Tensor) -> Tensor:
        """The rows that this rank holds of ids [n, slot, layers, columns]: bytes [n, slot, layers, columns a rank,
        row_bytes], zeros for those of others."""
        tables, found = self.tables, []
        with self.communicator.failing():
            for layer, (cut, store) in enumerate(zip(tables.splits, tables.stores, strict=True)):
                wanted = ids[:, :, layer, cut.columns(tables.rank)]
                found.append(store.lookup(cut.local(wanted, tables.rank).contiguous(), None))
        return torch.stack(found, 2) if len(found) > 1 else found[0][:, :, None]


class PackedRows:
    """Rows as they were packed, received [ranks, slot, layers, columns a rank, row_bytes], and the ids they are of."""

    def __init__(self, tables: SplitTables, hashes: Tensor, received: Tensor) -> None:
        self.tables, self.hashes, self.received = tables, hashes, received

    def take(self, layer: int, out: Tensor | None = None) -> Tensor:
        """See Rows."""
        tables, store = self.tables, self.tables.stores[layer]
        table, form = self.received.view(-1, self.received.shape[-1]), store.format
        place = where_received(tables, layer, self.hashes[layer], self.received.shape[1])
        if tables.dtype is None:
            return row_lookup(table, place, out)
        scale: Tensor | None = getattr(store, "scale", None)
        return row_decode(table, place, form.values, form.dim, tables.dtype, form.group, scale, out)


def where_received(tables: SplitTables, layer: int, ids: Tensor, slot: int) -> Tensor:
    """The place of each row of ids [T, columns] in a buffer [ranks, slot, layers, columns a rank], int64; -1 for id
    -1."""
    cut = tables.splits[layer]
    width = cut.columns_a_rank
    token = torch.arange(ids.shape[0], device=ids.device)[:, None]
    column = torch.arange(ids.shape[1], device=ids.device) % width
    place = ((cut.owner(ids) * slot + token) * tables.num_layers + layer) * width + column
    return torch.where(ids < 0, -1, place)
