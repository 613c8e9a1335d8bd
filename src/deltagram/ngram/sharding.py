"""A memory table cut over the ranks of a group: who holds which rows, and where an exchanged row is found.

Columns own consecutive rows (their offsets are running sums), so both cuts are ranges of rows: by heads, each rank
holds all rows of its own columns and looks up those columns alone; by rows, where columns do not divide by the
ranks, each holds an equal range and looks up what falls into it, of every column.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deltagram.ngram.disk import Segment
from deltagram.ngram.spec import HashSpec
from deltagram.ngram.stores import RowStore

WAYS = ("auto", "heads", "rows")


@dataclass(frozen=True, slots=True)
class Split:
    """One layer's table over `ranks` ranks: rank r holds rows [bounds[r], bounds[r + 1]).

    by_heads: whether these are the rows of whole columns, of `num_columns` that a token reads.
    """

    num_columns: int
    bounds: tuple[int, ...]
    by_heads: bool

    @property
    def ranks(self) -> int:
        return len(self.bounds) - 1

    @property
    def columns_a_rank(self) -> int:
        """Columns that each rank looks up: its own by heads, all of them by rows."""
        return self.num_columns // self.ranks if self.by_heads else self.num_columns

    def columns(self, rank: int) -> slice:
        """The columns that `rank` looks up."""
        width = self.columns_a_rank
        return slice(rank * width, (rank + 1) * width) if self.by_heads else slice(0, self.num_columns)

    def rows(self, rank: int) -> range:
        """The rows of the table that `rank` holds."""
        return range(self.bounds[rank], self.bounds[rank + 1])

    def local(self, ids: Tensor, rank: int) -> Tensor:
        """Where the table's rows `ids` lie among those of `rank`, int64; -1 for those that it has not."""
        rows = self.rows(rank)
        return torch.where((ids >= rows.start) & (ids < rows.stop), ids - rows.start, -1).long()

    def owner(self, ids: Tensor) -> Tensor:
        """The rank that holds each row of ids [..., columns], int64; any rank for id -1."""
        if self.by_heads:
            return (torch.arange(self.num_columns, device=ids.device) // self.columns_a_rank).expand(ids.shape)
        inner = torch.tensor(self.bounds[1:-1], device=ids.device, dtype=ids.dtype)
        return torch.bucketize(ids, inner, right=True)


def check_way(way: str) -> None:
    """Raises ValueError for what is none of WAYS."""
    if way not in WAYS:
        raise ValueError(f"ngram_split is {way!r}; expected {', '.join(WAYS)}")


def split(spec: HashSpec, ranks: int, way: str = "auto") -> Split:
    """Cut the table of `spec` over `ranks`: by heads where its columns divide by them, else by rows; or as `way` says.

    Raises ValueError for a way that is not possible.
    """
    columns, rows = spec.num_columns, spec.num_rows
    check_way(way)
    problems = []
    if way == "heads" and columns % ranks:
        problems.append(f"ngram_split is 'heads'; a token's {columns} columns do not divide by {ranks} ranks")
    if rows < ranks or rows >= 1 << 31:
        problems.append(f"a table of {rows} rows over {ranks} ranks; expected a row each, and fewer than 2^31")
    if problems:
        raise ValueError("\n".join(problems))
    if way != "rows" and columns % ranks == 0:
        width = columns // ranks
        return Split(columns, (0, *(spec.offsets[rank * width] for rank in range(1, ranks)), rows), True)
    return Split(columns, tuple(rows * rank // ranks for rank in range(ranks + 1)), False)


def slice_segments(segments: Sequence[Segment], rows: range) -> list[Segment]:
    """Where `rows` of a table lie, numbered from 0: for the DiskStore of a rank."""
    found = []
    for part in segments:
        first, end = max(part.first, rows.start), min(part.first + part.count, rows.stop)
        if first < end:
            offset = part.offset + (first - part.first) * part.width
            found.append(replace(part, offset=offset, first=first - rows.start, count=end - first))
    return found


@dataclass(frozen=True, slots=True)
class SplitTables:
    """The tables of a model's memory layers as `rank` holds them: all of one format, and cut one way.

    stores: this rank's rows of each, numbered from 0. dtype: what rows are handed out as; None for their bytes.
    """

    splits: tuple[Split, ...]
    stores: tuple[RowStore, ...]
    rank: int
    dtype: torch.dtype | None

    def __post_init__(self) -> None:
        assert len(self.splits) == len(self.stores) > 0
        assert len({(s.num_columns, s.ranks, s.by_heads) for s in self.splits}) == 1, "tables are cut one way"
        assert len({store.format for store in self.stores}) == 1, "the tables of a model share a format"
        for cut, store in zip(self.splits, self.stores, strict=True):
            assert store.num_rows == len(cut.rows(self.rank)), "a store holds the rows of its rank"

    @property
    def num_layers(self) -> int:
        return len(self.splits)

    @property
    def num_columns(self) -> int:
        return self.splits[0].num_columns

    @property
    def ranks(self) -> int:
        return self.splits[0].ranks
