"""Lookups by way of the host, of rows that only the host reaches or reaches sooner: the same in a graph and outside.

The device asks for its rows by their ids, waits for a chunk of them and copies it, while the host fetches the next. So
the host needs neither the step's tokens nor the step loop for it: a step can be replayed before the host knows what the
last one sampled. Ids and rows are made anew by each replay, and no replay can see those of another. `FetchedRows` are
brought by a function in a thread of its own, `GatheredRows` (host_gather.py) by threads that run without Python.

Whoever runs captured steps calls `wake` before a replay, which spares its first lookup the time that helpers take to
wake up, and `check` when the step is over: it raises for a step that went without its rows, whose results are void.
"""

import threading
import time
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from deltagram.kernels._layouts import BITS, PIECE
from deltagram.kernels.flag_wait import flag_wait
from deltagram.kernels.host_ask import host_ask
from deltagram.kernels.row_decode import row_decode
from deltagram.ngram.formats import RowFormat
from deltagram.ngram.helpers import HelperError

CAPACITY = 1 << 17  # rows of one lookup; larger ones are several
POLLS = 1_000_000  # of one to two microseconds, more where processes share a device
CHUNK = 16  # pieces that a function fetches at a time, after which the device sees that it moves
_MOST, _LEAST = 128, 64  # pieces copied at a time
_IDLE = 20e-6  # seconds between two looks at what is asked


class HostStep:
    """The buffers of lookups from a table of `format`, which serve one stream. Make it before capturing.

    Memory: `capacity` rows and ids, page-locked where `device` is a CUDA device.
    """

    def __init__(self, format: RowFormat, device: torch.device, capacity: int = CAPACITY) -> None:
        self.format, self.device = format, device
        self.capacity = -(-capacity // PIECE) * PIECE
        pinned = device.type == "cuda"
        self.ids = torch.zeros(self.capacity, dtype=torch.int64, pin_memory=pinned)
        self.staged = torch.zeros(self.capacity, format.row_bytes, dtype=torch.uint8, pin_memory=pinned)
        words = torch.zeros(16 + self.capacity // PIECE, dtype=torch.int64, pin_memory=pinned)
        # Who writes to a line of memory has it to itself: the device, the device when a wait has failed, the host.
        self.asked, self.failed, self.done = words[:1], words[8:9], words[16:]
        self.counters = torch.zeros(2, dtype=torch.int64, device=device)
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None

    def lookup(self, ids: Tensor, dtype: torch.dtype | None, scale: Tensor | None, out: Tensor | None = None) -> Tensor:
        """RowStore.lookup, captured or not. Nobody waits but the device."""
        form, flat = self.format, ids.reshape(-1)
        if dtype is None and out is not None:
            packed = out
        else:
            packed = torch.empty(*ids.shape, form.row_bytes, dtype=torch.uint8, device=self.device)
        rows = packed.view(len(flat), form.row_bytes)
        for wanted, found in zip(flat.split(self.capacity), rows.split(self.capacity), strict=True):
            self._bring(wanted, found)
        if dtype is None:
            return packed
        # Absent rows are zero bytes, which decode to zeros unless the scale is not finite: none is.
        order = torch.arange(len(flat), device=self.device).view(ids.shape)
        return row_decode(rows, order, form.values, form.dim, dtype, form.group, scale, out)

    def _bring(self, ids: Tensor, rows: Tensor) -> None:
        if not len(ids):
            return
        host_ask(ids, self.ids, self.asked, self.counters)
        for first, last in chunks(-(-len(ids) // PIECE)):
            flag_wait(self.done[first:last], self.counters[:1], self.failed, POLLS)
            part = slice(first * PIECE, min(last * PIECE, len(ids)))
            if self._beside is None:
                rows[part].copy_(self.staged[part])
                continue
            # Copies on a stream of their own follow one another, and the next wait goes on beside them.
            self._beside.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._beside):
                rows[part].copy_(self.staged[part], non_blocking=True)
        if self._beside is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._beside)

    def wake(self) -> None:
        """Before a replay: its lookups find the helpers awake."""

    def check(self) -> None:
        """Raises HelperError if a lookup so far went without its rows. If the rows were merely late, later lookups go
        on; whoever calls it lets no step pass that has been launched before it raised."""
        if int(self.failed):
            if self._has_caught_up():
                self.failed.zero_()
            raise HelperError("the host did not bring the rows of a lookup: its helper threads have died or are stuck")

    def _has_caught_up(self) -> bool:
        """Whether all that was asked is there by now, and nobody still writes rows of an earlier lookup."""
        lookup, pieces = int(self.asked) >> BITS, int(self.asked) & ((1 << BITS) - 1)
        return bool((self.done[:pieces] == lookup).all())

    def close(self) -> None:
        """End what serves the lookups; later ones fail."""


def chunks(pieces: int) -> list[tuple[int, int]]:
    """First and last, exclusive, of the pieces that are copied together: at most _MOST, of few the half, and fewer at
    the end, whose copy nothing hides."""
    ends = [0]
    while left := pieces - ends[-1]:
        size = min(_MOST, max(_LEAST, -(-left // 2)))
        ends.append(pieces if left - size < _LEAST // 2 else ends[-1] + size)
    return list(pairwise(ends))


class FetchedRows(HostStep):
    """Rows brought by `fetch(host ids [n], into [n, row_bytes])`, called in a thread of its own."""

    def __init__(
        self,
        fetch: Callable[[Tensor, Tensor], None],
        format: RowFormat,
        device: torch.device,
        capacity: int = CAPACITY,
    ) -> None:
        super().__init__(format, device, capacity)
        self.fetch = fetch
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self.thread = threading.Thread(target=self._serve, name="fetching rows for the device", daemon=True)
        self.thread.start()

    def check(self) -> None:
        """Raises HelperError, or the error of `fetch`, if a lookup so far went without its rows."""
        if self.error is not None:
            raise self.error
        if not self.thread.is_alive():
            raise HelperError(f"helper thread {self.thread.name} has died")
        super().check()

    def close(self) -> None:
        """See HostStep."""
        self._stop.set()

    def _serve(self) -> None:
        asked, done, served = self.asked.numpy(), self.done.numpy(), 0
        while not self._stop.is_set():
            now = int(asked[0])
            lookup, pieces = now >> BITS, now & ((1 << BITS) - 1)
            if lookup == served:
                time.sleep(_IDLE)
                continue
            for first in range(0, pieces, CHUNK):
                last = min(first + CHUNK, pieces)
                part = slice(first * PIECE, last * PIECE)
                try:
                    self.fetch(self.ids[part], self.staged[part])
                except Exception as error:
                    self.error = error
                    return
                done[first:last] = lookup
            served = lookup
