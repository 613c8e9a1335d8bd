"""How the ranks of a group hold a model's tables: each its cut of them, or, where they are `shared`, all of them the
one copy that rank 0 loads."""

import socket
from collections.abc import Sequence

from deltagram.ngram.cached import CachedStore
from deltagram.ngram.placement import Placement
from deltagram.ngram.sharding import Split, split
from deltagram.ngram.spec import HashSpec
from deltagram.ngram.stores import RowStore, SharedStore
from deltagram.parallel.groups import Group
from deltagram.parallel.sockets import to_rank_zero


class Holding:
    """What this rank has of every table; `way` is one of sharding.py's. Every rank makes it.

    writer: the process that loads the tables, where this one does not; see `make_store`.
    """

    def __init__(self, group: Group, placement: Placement, way: str = "auto") -> None:
        self.rank, self.ranks, self.way = group.rank, group.size, way
        self.one_copy = placement.kind == "shared"
        self._readers: list[socket.socket] = []
        self.writer: socket.socket | None = None
        if self.one_copy and self.rank == 0:
            self._readers = to_rank_zero(group)
        elif self.one_copy:
            (self.writer,) = to_rank_zero(group)

    def cut(self, spec: HashSpec) -> Split | None:
        """How the table of `spec` is cut over the ranks; None for one copy. Raises ValueError: see sharding.split."""
        return None if self.one_copy else split(spec, self.ranks, self.way)

    def rows(self, spec: HashSpec) -> range:
        """The rows of the table of `spec` that this rank's store has."""
        cut = self.cut(spec)
        return range(spec.num_rows) if cut is None else cut.rows(self.rank)

    def hand_over(self, stores: Sequence[RowStore]) -> None:
        """The tables are loaded: give them to the ranks that read this one's copy."""
        for store in stores if self._readers else ():
            below = store.below if isinstance(store, CachedStore) else store
            assert isinstance(below, SharedStore)
            for reader in self._readers:
                below.send(reader)
