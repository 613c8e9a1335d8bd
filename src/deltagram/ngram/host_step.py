"""The host's part of a captured step: rows that only the host can reach, for a graph that replays without it.

Inside the graph the ids are copied to page-locked memory and announced by an epoch; a helper thread that watches the
epoch fetches the rows into staging and raises a flag; the graph waits for the flag, for a bounded time, and copies
the rows on. Ids and epoch are made anew by each replay, so that no replay can see the rows of another.
"""

import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from deltagram.kernels.flag_wait import flag_wait
from deltagram.kernels.row_decode import row_decode
from deltagram.ngram.formats import RowFormat
from deltagram.ngram.helpers import HelperError

POLLS = 2_000_000  # of about a microsecond
_IDLE = 20e-6  # seconds between two looks at the epoch


class HostStep:
    """Lookups of up to `max_rows` rows by `fetch(host ids [n], into [n, row_bytes])`, from within graphs.

    Its buffers serve one lookup at a time: those of one stream. Make it before capturing.
    """

    def __init__(
        self, fetch: Callable[[Tensor, Tensor], None], format: RowFormat, device: torch.device, max_rows: int
    ) -> None:
        self.fetch, self.format, self.device, self.max_rows = fetch, format, device, max_rows
        pinned = device.type == "cuda"

        def host(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=pinned)

        self.ids, self.staged = host(max_rows), host(max_rows, format.row_bytes, dtype=torch.uint8)
        # The last lookup that was asked for, and its rows; the last that was served; whether a wait has failed.
        self.asked, self.count, self.served, self.failed = host(1), host(1), host(1), host(1)
        self.epoch = torch.zeros(1, dtype=torch.int64, device=device)
        self.rows = torch.empty(max_rows, format.row_bytes, dtype=torch.uint8, device=device)
        self.order = torch.arange(max_rows, device=device)
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self.thread = threading.Thread(target=self._serve, name="fetching rows for graphs", daemon=True)
        self.thread.start()

    def lookup(self, ids: Tensor, dtype: torch.dtype | None, scale: Tensor | None, out: Tensor | None = None) -> Tensor:
        """RowStore.lookup, to be captured. Raises ValueError for more than `max_rows` ids."""
        flat, form = ids.reshape(-1), self.format
        count = len(flat)
        if count > self.max_rows:
            raise ValueError(f"a captured lookup of {count} rows; {self.max_rows} were reserved")
        self.ids[:count].copy_(flat, non_blocking=True)
        self.count.copy_(torch.full((1,), count, device=self.device), non_blocking=True)
        self.epoch += 1
        self.asked.copy_(self.epoch, non_blocking=True)
        flag_wait(self.served, self.epoch, self.failed, POLLS)
        rows = self.rows[:count]
        rows.copy_(self.staged[:count], non_blocking=True)
        if dtype is None:
            packed = rows.view(*ids.shape, form.row_bytes)
            return packed.clone() if out is None else out.copy_(packed)
        if out is None:
            out = torch.empty(*ids.shape, form.dim, dtype=dtype, device=self.device)
        row_decode(rows, self.order[:count], form.values, form.dim, dtype, form.group, scale, out.view(count, form.dim))
        return out

    def check(self) -> None:
        """Raises HelperError, or the error of a read, if a step since the last check went without its rows."""
        if self.error is not None:
            raise self.error
        if not self.thread.is_alive() or int(self.failed):
            raise HelperError(f"helper thread {self.thread.name} has died or is stuck; the last step is void")

    def close(self) -> None:
        """End the helper thread."""
        self._stop.set()

    def _serve(self) -> None:
        asked, served = self.asked.numpy(), self.served.numpy()
        while not self._stop.is_set():
            if asked[0] == served[0]:
                time.sleep(_IDLE)
                continue
            epoch, count = int(asked[0]), int(self.count)
            try:
                self.fetch(self.ids[:count], self.staged[:count])
            except Exception as error:
                self.error = error
                return
            served[0] = epoch
