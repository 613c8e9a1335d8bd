"""Rows of a table split by heads, read by peers out of the memory in which their owner looked them up.

Each step: every rank publishes its ids; barrier; every rank looks up its columns of everyone's ids into its own
buffer; barrier; every rank reads its tokens' rows from all owners. Three launches and two barriers, all on the caller's
stream, and all of them can be captured. The first barrier also says that nobody still reads the rows of the step
before, the second that nobody still reads the ids.
"""

import torch
from torch import Tensor

from deltagram.kernels.peer_barrier import peer_barrier
from deltagram.kernels.peer_lookup import peer_lookup
from deltagram.kernels.peer_publish import peer_publish
from deltagram.kernels.peer_unpack import peer_unpack
from deltagram.kernels.row_decode import row_decode
from deltagram.ngram.exchange import Exchange, Rows
from deltagram.ngram.sharding import SplitTables
from deltagram.ngram.stores import DeviceStore
from deltagram.parallel.groups import Communicator
from deltagram.parallel.peer_memory import SIZES, PeerMemory
from deltagram.parallel.watchdog import HangError

_FLAGS = 256  # bytes, of which a barrier takes 8 a rank


def problem(tables: SplitTables) -> str | None:
    """Why tables cannot be exchanged through peer memory, or None: what peer_memory.py does not ask itself."""
    if tables.ranks not in SIZES:
        return f"the peer exchange is for {', '.join(map(str, SIZES))} ranks, not {tables.ranks}"
    if not tables.splits[0].by_heads:
        return f"the peer exchange needs tables split by heads, not {tables.num_columns} heads by rows"
    placed = {type(store).__name__ for store in tables.stores if not isinstance(store, DeviceStore)}
    if placed:
        return f"the peer exchange reads tables that a kernel can read, in device or host memory, not a {placed.pop()}"
    return None


class PeerExchange:
    """See Exchange.

    memory: of at least `nbytes(...)`, which becomes this instance's alone. max_slot: the longest slot that goes this
    way; longer ones go `above`. same_tokens: whether all ranks have the same ids; then each looks up its own alone.
    polls: looks, of about a microsecond, after which a barrier gives up. `check` says whether one did. communicator: of
    the stream on which exchanges are made, for the watchdog's notes; None for ranks that one process plays.
    """

    name = "peer"

    def __init__(
        self,
        tables: SplitTables,
        memory: PeerMemory,
        max_slot: int,
        polls: int,
        same_tokens: bool = False,
        above: Exchange | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        assert problem(tables) is None and memory.ranks == tables.ranks and memory.rank == tables.rank
        self.stores = [store for store in tables.stores if isinstance(store, DeviceStore)]
        self.tables, self.memory, self.above, self.communicator = tables, memory, above, communicator
        self.max_slot, self.polls, self.same_tokens = max_slot, polls, same_tokens
        device, (at_ids, at_rows, _) = memory.device, _places(tables, max_slot, same_tokens)
        self.rank, self.row_bytes = tables.rank, self.stores[0].format.row_bytes
        self.flags, self.ids, self.rows = memory.addresses(), memory.addresses(at_ids), memory.addresses(at_rows)
        self.asking = self.ids[self.rank : self.rank + 1] if same_tokens else self.ids
        self.epoch = torch.zeros(1, dtype=torch.int64, device=device)
        self.stalled = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.slices = torch.zeros(len(self.stores), dtype=torch.int64, device=device)
        held = [cut.rows(self.rank) for cut in tables.splits]
        self.bounds = torch.tensor([(rows.start, rows.stop) for rows in held], device=device)
        self.order = torch.arange(max_slot * tables.num_columns, device=device).view(max_slot, -1)
        self._find_tables()
        if communicator is not None:
            communicator.group.watchdog.abort_with(lambda: self.stalled.fill_(1 << self.rank))

    @staticmethod
    def nbytes(tables: SplitTables, max_slot: int, same_tokens: bool = False) -> int:
        """Memory that each rank needs."""
        return _places(tables, max_slot, same_tokens)[2]

    def exchange(self, hashes: Tensor, slot: int) -> Rows:
        """See Exchange."""
        if slot > self.max_slot:
            assert self.above is not None, f"a slot of {slot} tokens, for which no other exchange was given"
            return self.above.exchange(hashes, slot)
        if self.communicator is None:
            return self._exchange(hashes, slot)
        with self.communicator.entered("peer exchange", hashes.device):
            return self._exchange(hashes, slot)

    def _exchange(self, hashes: Tensor, slot: int) -> Rows:
        layers, count, columns = hashes.shape
        peer_publish(hashes, self.ids, self.rank, slot)
        self._barrier()
        peer_lookup(self.slices, self.bounds, self.asking, self.rows, self.rank, slot, columns, self.row_bytes)
        self._barrier()
        packed = torch.empty(layers, count, columns, self.row_bytes, dtype=torch.uint8, device=hashes.device)
        peer_unpack(self.rows, packed, 0 if self.same_tokens else self.rank, slot)
        return UnpackedRows(self, packed)

    def check(self) -> None:
        """Raises HangError if a barrier of an exchange that has ended gave up: the rows it guarded are void."""
        missing = int(self.stalled)
        if missing:
            ranks = ", ".join(str(rank) for rank in range(self.tables.ranks) if missing >> rank & 1)
            raise HangError(f"rank {ranks} did not come to a barrier of the peer exchange")

    def release(self) -> None:
        """Give the memory back, and after an error start anew: every rank does, between steps."""
        self.memory.release()

    def take_back(self) -> None:
        """Have memory again; captured graphs stay valid, also if the stores' tables lie elsewhere than before."""
        self.memory.take_back()
        self.epoch.zero_()
        self.stalled.zero_()
        self._find_tables()
        self.memory.barrier()

    def _find_tables(self) -> None:
        self.slices.copy_(torch.tensor([store.table.data_ptr() for store in self.stores]))

    def _barrier(self) -> None:
        peer_barrier(self.flags, self.epoch, self.stalled, self.rank, self.polls)


class UnpackedRows:
    """See Rows. packed: uint8 [layers, T, columns, row_bytes]."""

    def __init__(self, owner: PeerExchange, packed: Tensor) -> None:
        self.owner, self.packed = owner, packed

    def take(self, layer: int, out: Tensor | None = None) -> Tensor:
        """See Rows."""
        packed, dtype = self.packed[layer], self.owner.tables.dtype
        if dtype is None:
            return packed if out is None else out.copy_(packed)
        store = self.owner.stores[layer]
        form, order = store.format, self.owner.order[: len(packed)]
        table = packed.view(-1, form.row_bytes)
        return row_decode(table, order, form.values, form.dim, dtype, form.group, store.scale, out)


def _places(tables: SplitTables, max_slot: int, same_tokens: bool) -> tuple[int, int, int]:
    """Where ids and rows begin in a rank's memory, and its size; see peer_lookup.py for their shapes."""
    askers = 1 if same_tokens else tables.ranks
    ids = 4 * tables.num_layers * max_slot * tables.num_columns
    row_bytes = tables.stores[0].format.row_bytes
    rows = askers * tables.num_layers * max_slot * tables.num_columns // tables.ranks * row_bytes
    at_rows = _FLAGS + _up(ids)
    return _FLAGS, at_rows, at_rows + _up(rows)


def _up(nbytes: int) -> int:
    return -(-nbytes // 256) * 256
