"""The chain of every memory layer, which depends on token ids alone: hash, row lookup, key and value projection.

`start` begins the chains when the step begins, on a stream of their own beside the layers; `take` hands a layer what
its own chain made and waits for that chain alone; `finish` joins what nobody took, so that a step ends, and a capture
too, with nothing left running. Whether they start is the setting's choice, never the step's: every step of a run does
the same.

What the chains made is kept until the step ends, since their stream may reuse what it has freed while a layer on the
other still reads. The stream has the lowest priority: the layers' blocks are placed first, so that a large lookup never
holds a step up longer than one of its blocks takes.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from deltagram.kernels.stamp import stamp
from deltagram.ngram.exchange import Exchange
from deltagram.ngram.layer import MemoryProjection
from deltagram.ngram.spec import HashConstants, HashSpec
from deltagram.ngram.stores import RowStore
from deltagram.step.history import TokenHistory
from deltagram.step.segments import eagerly, forked, joined
from deltagram.step.sequences import SequenceTable

KeyValue = tuple[Tensor, Tensor]


class RunAhead:
    """The chains of a model's memory layers; `layers` names them in the order of `specs`, `stores` and `projections`.

    `go_ahead(False)` has each chain run where its layer asks for it, with the same kernels. On a CPU there is no second
    stream, and the same is done.

    times: int64 [chains, 2] on the device, when each chain of the last step was done and when its layer asked for it,
    in nanoseconds: what tells chains that were hidden from those that a layer waited for. Of chains that run ahead.
    """

    def __init__(
        self,
        layers: list[int],
        specs: list[HashSpec],
        stores: list[RowStore],
        projections: list[MemoryProjection],
        device: torch.device,
    ) -> None:
        assert len(layers) == len(specs) == len(stores) == len(projections)
        self.layers, self.order = layers, {layer: i for i, layer in enumerate(layers)}
        self.stores, self.projections, self.device = stores, projections, device
        self.constants = HashConstants.of(specs, device)
        self.stream: torch.cuda.Stream | None = None
        self.go_ahead(True)
        self.exchange: Exchange | None = None  # where ranks hold the tables together
        self.slot = 0  # tokens, which all ranks agreed on for the next step; 0: as many as their common bucket has
        self.times = torch.zeros(len(stores), 2, dtype=torch.int64, device=device)
        self._open = False  # whether chains run that have not been joined
        self._ids: Tensor | None = None
        self._rows: dict[int, Tensor] = {}  # of tables that no graph can read
        self._made: dict[int, KeyValue] = {}
        self._done: dict[int, torch.cuda.Event] = {}

    def go_ahead(self, ahead: bool) -> None:
        """Whether chains begin with the step from now on; see the class."""
        self.stream = torch.cuda.Stream(self.device, priority=0) if self.device.type == "cuda" and ahead else None

    def start(self, table: SequenceTable, history: TokenHistory) -> None:
        """Hash the step's tokens for every layer, and begin the layers' chains. `finish` follows, come what may."""
        assert self._ids is None, "the last step's chains were not finished"
        hashed = history.tokens, table.sequence, table.row, table.position
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        eager = [i for i, store in enumerate(self.stores) if capturing and not store.capturable]
        if eager or self.stream is None:
            self._ids = self.constants.ids(*hashed)
        for i in eager:
            self._look_up_eagerly(i)
        if self.stream is None:
            self._exchange(self._ids)
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        forked(self._join)
        self._open = True
        with torch.cuda.stream(self.stream):
            if self._ids is None:
                self._ids = self.constants.ids(*hashed)
            self._exchange(self._ids)
            for i in range(len(self.stores)):
                self._made[i] = self._chain(i)
                stamp(self.times[i, :1])
                self._done[i] = self.stream.record_event()

    def take(self, layer: int) -> KeyValue:
        """The keys and the value of model layer `layer`: see MemoryProjection."""
        assert self._ids is not None, "take before start"
        i = self.order[layer]
        if i not in self._made:
            return self._chain(i)
        if i in self._done:
            stamp(self.times[i, 1:])
            torch.cuda.current_stream(self.device).wait_event(self._done.pop(i))
        return self._made[i]

    def finish(self) -> None:
        """End the step, or break it off: chains that no layer took are joined and dropped."""
        if self._open:
            self._join()
            joined(self._join)
        self._open, self._ids = False, None
        self._made.clear()
        self._rows.clear()

    def assist(self) -> None:
        """Instead of `start` to `finish`, in a step that only other ranks run: bring them this rank's rows."""
        constants = self.constants
        ids = torch.empty(len(self.stores), 0, constants.moduli.shape[1], dtype=torch.int64, device=self.device)
        with torch.cuda.stream(self.stream):
            self._exchange(ids)
        self._rows.clear()

    def _exchange(self, ids: Tensor | None) -> None:
        """Fetch all layers' rows from the ranks that hold them."""
        if self.exchange is not None and ids is not None:
            with self._range(f"memory {self.exchange.name} exchange"):
                rows = self.exchange.exchange(ids, self.slot or ids.shape[1])
            self._rows = {i: rows.take(i) for i in range(len(self.stores))}

    def _join(self) -> None:
        """Wait for all that runs beside the current stream."""
        assert self.stream is not None
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        self._done.clear()

    def _look_up_eagerly(self, i: int) -> None:
        store, projection, ids = self.stores[i], self.projections[i], self._ids
        assert ids is not None
        wanted = ids[i]
        rows = torch.empty(*wanted.shape, store.format.dim, dtype=projection.dtype, device=self.device)

        def look_up() -> None:
            store.lookup(wanted, projection.dtype, rows)

        eagerly(look_up)
        self._rows[i] = rows

    def check(self) -> None:
        """After a captured step: raises HelperError, or HangError where ranks exchange rows, if a chain went without
        its rows, which makes the step void."""
        for store in self.stores:
            store.check()
        if self.exchange is not None:
            self.exchange.check()

    def wake(self) -> None:
        """Before a captured step is replayed: the helpers of its lookups get ready."""
        for store in self.stores:
            store.wake()

    def _chain(self, i: int) -> KeyValue:
        assert self._ids is not None
        projection, rows = self.projections[i], self._rows.get(i)
        with self._range(f"memory chain of layer {self.layers[i]}"):
            return projection(self.stores[i].lookup(self._ids[i], projection.dtype) if rows is None else rows)

    def _range(self, name: str) -> AbstractContextManager[None]:
        """A named part of the timeline of a profiler, on a GPU."""
        return torch.cuda.nvtx.range(name) if self.device.type == "cuda" else nullcontext()
