"""Where the rows of a memory table live. A placement answers one question: the rows of these ids, please.

Every placement gives the same bits. This file holds those whose table a kernel can read: in the device's own memory,
in host memory of this process, and in host memory that the processes of a node share. disk.py and cached.py hold the
others, placement.py the names by which they are chosen.
"""

import json
import os
import socket
import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from deltagram.kernels.row_decode import row_decode
from deltagram.kernels.row_lookup import row_lookup
from deltagram.ngram.formats import RowFormat
from deltagram.ngram.helpers import HelperError
from deltagram.ngram.memory import HostMemory, share

CHUNK = 16384  # rows staged at a time, at most: 4 MB, so that a large lookup never holds the bus for long
SLOTS = 8


class RowStore(Protocol):
    """A placement of one layer's table: `num_rows` rows of `format`.

    `capturable` says whether a lookup may be recorded in a graph; `needs_host_tokens` whether the host must be given
    the step's tokens to find the rows, as it cannot learn the ids inside a graph.
    """

    num_rows: int
    format: RowFormat
    needs_host_tokens: bool

    @property
    def capturable(self) -> bool: ...

    def lookup(self, ids: Tensor, dtype: torch.dtype | None, out: Tensor | None = None) -> Tensor:
        """Rows of `ids` (int64 [...], on the model's device): numbers of `dtype` [..., dim], or for None the stored
        bytes, uint8 [..., row_bytes]. Id -1 gives a row of zeros. `out` is filled and returned if given."""
        ...


class DeviceStore:
    """The whole table in the memory of the device that runs the model."""

    capturable = True
    needs_host_tokens = False

    def __init__(self, num_rows: int, format: RowFormat, device: torch.device) -> None:
        self.num_rows, self.format, self.device = num_rows, format, device
        self.table = self._allocate()  # uint8 [rows, row_bytes]
        self.values, self.scales = format.split(self.table)
        self.scale = torch.ones(1, device=device) if format.table_scale else None

    def _allocate(self) -> Tensor:
        return torch.empty(self.num_rows, self.format.row_bytes, dtype=torch.uint8, device=self.device)

    def lookup(self, ids: Tensor, dtype: torch.dtype | None, out: Tensor | None = None) -> Tensor:
        """See RowStore."""
        if dtype is None:
            return row_lookup(self.table, ids, out)
        form = self.format
        return row_decode(self.table, ids, form.values, form.dim, dtype, form.group, self.scale, out)


class HostStore(DeviceStore):
    """The whole table in host memory.

    Small lookups are read in place by the kernel. Past `crossover` rows the host gathers them, on all its threads,
    into page- locked staging and copies that; inside a graph capture, which has no host, every lookup is read in
    place. `crossover` None measures on the first lookup, for a process that is alone; the others take rank 0's.
    """

    def __init__(self, num_rows: int, format: RowFormat, device: torch.device, crossover: int | None = None) -> None:
        self.crossover = crossover
        self._staging: Staging | None = None
        super().__init__(num_rows, format, device)

    def _allocate(self) -> Tensor:
        if self.device.type == "meta":
            return super()._allocate()
        self.memory = HostMemory(self.num_rows * self.format.row_bytes, self.device)
        return self.memory.bytes.view(self.num_rows, -1)

    def lookup(self, ids: Tensor, dtype: torch.dtype | None, out: Tensor | None = None) -> Tensor:
        """See RowStore."""
        if self.device.type == "cpu" or torch.cuda.is_current_stream_capturing():
            return super().lookup(ids, dtype, out)
        if self.crossover is None:
            self.crossover = self.measure_crossover()
        if ids.numel() <= self.crossover:
            return super().lookup(ids, dtype, out)
        return self.gather(ids, dtype, out)

    def gather(self, ids: Tensor, dtype: torch.dtype | None, out: Tensor | None = None) -> Tensor:
        """`lookup` by way of the host. The host waits for the ids."""
        if self._staging is None:
            self._staging = Staging(self.format, self.device)
        return self._staging.lookup(ids, dtype, self.scale, self.fetch, out)

    def fetch(self, ids: Tensor, into: Tensor) -> None:
        """Rows of host `ids` [n] into host memory `into` [n, row_bytes]."""
        row_lookup(self.table, ids, into, impl="reference")

    def measure_crossover(self) -> int:
        """The most rows for which reading in place is at least as fast as gathering, measured here and now."""
        best = 0
        for rows in (256 << power for power in range(9)):
            if self._seconds(rows, super().lookup) > self._seconds(rows, self.gather):
                break
            best = rows
        return best

    def _seconds(self, rows: int, lookup: Callable[..., Tensor]) -> float:
        """Of a lookup of `rows` random rows, which are others every time: none is in a cache."""
        out = torch.empty(rows, self.format.row_bytes, dtype=torch.uint8, device=self.device)
        times = []
        for _ in range(6):
            ids = torch.randint(self.num_rows, (rows,), device=self.device)
            torch.cuda.synchronize(self.device)
            begin = time.perf_counter()
            lookup(ids, None, out)
            torch.cuda.synchronize(self.device)
            times.append(time.perf_counter() - begin)
        return sorted(times[1:])[2]


class SharedStore(HostStore):
    """The whole table once a node, in host memory that its processes share; one of them writes it.

    The writer makes the store, fills it and then gives it away with `send`; a reader's `receive` returns once the
    table is complete. The memory is an anonymous file: it is gone when the last process that maps it is, however it
    ended.
    """

    def __init__(
        self,
        num_rows: int,
        format: RowFormat,
        device: torch.device,
        crossover: int | None = None,
        descriptor: int | None = None,
    ) -> None:
        self.descriptor = descriptor
        super().__init__(num_rows, format, device, crossover)

    def _allocate(self) -> Tensor:
        if self.device.type == "meta":
            return super()._allocate()
        nbytes = self.num_rows * self.format.row_bytes
        reads = self.descriptor is not None
        if self.descriptor is None:
            self.descriptor = share(nbytes)
        # CUDA registers writable pages alone; on a CPU a reader cannot write by mistake.
        writable = not reads or self.device.type == "cuda"
        self.memory = HostMemory(nbytes, self.device, self.descriptor, writable)
        return self.memory.bytes.view(self.num_rows, -1)

    def send(self, to: socket.socket) -> None:
        """Give the filled table to the process at the other end of a Unix socket."""
        assert self.descriptor is not None
        scale = None if self.scale is None else float(self.scale).hex()
        header = {"rows": self.num_rows, "bytes": self.format.row_bytes, "scale": scale, "crossover": self.crossover}
        socket.send_fds(to, [json.dumps(header).encode()], [self.descriptor])

    @classmethod
    def receive(
        cls, source: socket.socket, num_rows: int, format: RowFormat, device: torch.device, timeout: float = 3600.0
    ) -> "SharedStore":
        """The table that the writer at the other end of a Unix socket filled, of the size that this process expects.

        Waits for it up to `timeout` seconds. Raises HelperError if the writer ends first or does not send it in time,
        and ValueError for a table of another size.
        """
        source.settimeout(timeout)
        try:
            message, descriptors, _, _ = socket.recv_fds(source, 4096, 1)
        except TimeoutError:
            raise HelperError(f"the process that loads the shared table did not send it within {timeout:g} s") from None
        except ConnectionError as error:
            raise HelperError(f"the process that loads the shared table is gone: {error}") from error
        if not message or not descriptors:
            raise HelperError("the process that loads the shared table ended before the table was complete")
        header = json.loads(message)
        sizes, expected = (header["rows"], header["bytes"]), (num_rows, format.row_bytes)
        if sizes != expected or (header["scale"] is not None) != format.table_scale:
            os.close(descriptors[0])
            raise ValueError(f"the shared table has {sizes[0]} rows of {sizes[1]} bytes; expected {expected}")
        store = cls(num_rows, format, device, header["crossover"], descriptors[0])
        if store.scale is not None:
            store.scale.fill_(float.fromhex(header["scale"]))
        return store


class Staging:
    """Rows that the host fetches, brought to a device piece by piece: the host fetches one while another is copied.

    Memory is bounded, page-locked and on the device alike: SLOTS pieces of CHUNK rows, a lookup's ids, and its `out`.
    """

    def __init__(self, format: RowFormat, device: torch.device) -> None:
        self.format, self.device, self.cuda = format, device, device.type == "cuda"
        self.host = torch.empty(SLOTS, CHUNK, format.row_bytes, dtype=torch.uint8, pin_memory=self.cuda)
        self.rows = torch.empty(self.host.shape[1:], dtype=torch.uint8, device=device) if self.cuda else self.host[0]
        self.order = torch.arange(CHUNK, device=device)
        self.ids = torch.empty(0, dtype=torch.int64)  # the last lookup's, grown to the largest
        self.done = torch.cuda.Event() if self.cuda else None

    def lookup(
        self,
        ids: Tensor,
        dtype: torch.dtype | None,
        scale: Tensor | None,
        fetch: Callable[[Tensor, Tensor], None],
        out: Tensor | None = None,
    ) -> Tensor:
        """RowStore.lookup by `fetch(host ids [n], into [n, row_bytes])`."""
        form = self.format
        width = form.row_bytes if dtype is None else form.dim
        if out is None:
            out = torch.empty(*ids.shape, width, dtype=dtype or torch.uint8, device=self.device)
        rows, host_ids = out.view(-1, width), self._on_host(ids.reshape(-1))
        for piece, first in enumerate(range(0, len(host_ids), CHUNK)):
            if self.done is not None and piece % SLOTS == 0:
                self.done.synchronize()  # the slots' last copies, of this lookup or another, are over
            wanted = host_ids[first : first + CHUNK]
            staged, target = self.host[piece % SLOTS][: len(wanted)], rows[first : first + CHUNK]
            fetch(wanted, staged)
            if dtype is None:
                target.copy_(staged, non_blocking=True)
            else:
                on_device = self.rows[: len(wanted)].copy_(staged, non_blocking=True) if self.cuda else staged
                # Absent rows are zero bytes, which decode to zeros unless the scale is not finite: none is.
                order = self.order[: len(wanted)]
                row_decode(on_device, order, form.values, form.dim, dtype, form.group, scale, target)
            if self.done is not None and (piece % SLOTS == SLOTS - 1 or first + CHUNK >= len(host_ids)):
                self.done.record()
        return out

    def _on_host(self, ids: Tensor) -> Tensor:
        if not self.cuda:
            return ids
        if len(self.ids) < len(ids):
            self.ids = torch.empty(len(ids), dtype=torch.int64, pin_memory=True)
        host = self.ids[: len(ids)]
        host.copy_(ids, non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()
        return host
