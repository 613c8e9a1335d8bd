"""Rows of tables in this process's memory, gathered for the device by threads that all tables share."""

import threading
import time
import weakref
from functools import cache

import torch
from torch import Tensor

from deltagram.ngram.formats import RowFormat
from deltagram.ngram.host_step import CAPACITY, HostStep


class GatherThreads:
    """Threads of kernels/_host_threads.py: `count` of them, by default two fewer than torch has.

    One processor is for the thread that launches steps, and one to spare: a thread that must share its own is late.
    """

    def __init__(self, count: int | None = None) -> None:
        from deltagram.kernels import _host_threads as native

        self.native = native
        count = count or torch.get_num_threads() - 2
        count = min(max(count, 1), native.MOST_THREADS)
        self.state = torch.zeros(native.STATE_WORDS, dtype=torch.int64)
        self._lock = threading.Lock()
        self.threads = [
            threading.Thread(
                target=native.serve, args=(i, self.state.data_ptr()), name=f"gathering rows {i}", daemon=True
            )
            for i in range(count)
        ]
        for thread in self.threads:
            thread.start()
        self.close = weakref.finalize(self, _end, self.state, self.threads, native)

    def ring(self) -> None:
        """Wake the threads: a lookup will come."""
        self.native.ring(self.state.data_ptr())

    def add(self, box: Tensor) -> int:
        """Serve a box, which must stay where it is, from now on: its place. Raises RuntimeError if all are taken."""
        with self._lock:
            places = self.state[self.native.PLACES : self.native.BUSY]
            free = (places == 0).nonzero()
            if not len(free):
                raise RuntimeError(f"{len(places)} tables in host memory have lookups already, as many as can have")
            places[free[0]] = box.data_ptr()
            return int(free[0])

    def remove(self, place: int) -> None:
        """Serve the box at `place` no more; when this returns, no thread is at it."""
        self.state[self.native.PLACES + place] = 0
        busy = self.state[self.native.BUSY :: 8]
        while (busy == place + 1).any() and not self.state[self.native.STOP]:
            time.sleep(1e-5)

    def have_left(self, place: int) -> bool:
        """Whether each thread is seen elsewhere than at the box at `place`, within some milliseconds: what it does
        there from then on is new."""
        busy = self.state[self.native.BUSY :: 8]
        there = busy == place + 1
        for _ in range(100):
            if not there.any():
                return True
            time.sleep(1e-5)
            there &= busy == place + 1
        return False


def _end(state: Tensor, threads: list[threading.Thread], native: object) -> None:
    state[native.STOP] = 1  # type: ignore[attr-defined]
    native.ring(state.data_ptr())  # type: ignore[attr-defined]
    for thread in threads:
        thread.join()


@cache
def gather_threads() -> GatherThreads:
    """Those of this process, made when they are first needed."""
    return GatherThreads()


class GatheredRows(HostStep):
    """Lookups from `table`, uint8 [rows, row_bytes] in host memory, which lives as long as this."""

    def __init__(
        self,
        table: Tensor,
        format: RowFormat,
        device: torch.device,
        capacity: int = CAPACITY,
        threads: GatherThreads | None = None,
    ) -> None:
        super().__init__(format, device, capacity)
        self.threads = threads or gather_threads()
        native = self.threads.native
        box = torch.zeros(native.BOX_WORDS, dtype=torch.int64)
        for place, value in (
            (native.TABLE, table.data_ptr()),
            (native.IDS, self.ids.data_ptr()),
            (native.STAGED, self.staged.data_ptr()),
            (native.ASKED, self.asked.data_ptr()),
            (native.DONE, self.done.data_ptr()),
            (native.ROW_BYTES, format.row_bytes),
        ):
            box[place] = value
        # What the threads read must outlive their last look at it.
        held = table, self.ids, self.staged, self.asked, box
        self._place = self.threads.add(box)
        self._close = weakref.finalize(self, _remove, self.threads, self._place, held)

    def lookup(self, ids: Tensor, dtype: torch.dtype | None, scale: Tensor | None, out: Tensor | None = None) -> Tensor:
        """See HostStep."""
        self.wake()
        return super().lookup(ids, dtype, scale, out)

    def wake(self) -> None:
        """See HostStep."""
        self.threads.ring()

    def close(self) -> None:
        """See HostStep."""
        self._close()

    def _has_caught_up(self) -> bool:
        return super()._has_caught_up() and self.threads.have_left(self._place)


def _remove(threads: GatherThreads, place: int, held: tuple[Tensor, ...]) -> None:
    threads.remove(place)
