"""Where the rows of a memory table live. A placement answers one question: the rows of these ids, please.

Every placement gives the same bits. This file holds those whose table a kernel can read: in the device's own memory,
in host memory of this process, and in host memory that the processes of a node share. disk.py and cached.py hold the
others, placement.py the names by which they are chosen.
"""

import json
import os
import socket
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from deltagram.kernels.row_decode import row_decode
from deltagram.kernels.row_lookup import row_lookup
from deltagram.ngram.formats import RowFormat
from deltagram.ngram.helpers import HelperError
from deltagram.ngram.host_gather import GatheredRows
from deltagram.ngram.memory import HostMemory, share


class RowStore(Protocol):
    """A placement of one layer's table: `num_rows` rows of `format`.

    Lookups can be captured, on one stream at a time. Whoever replays them calls `wake` before and `check` after; the
    host is given neither ids nor tokens: where it has a part in a lookup, the device tells it.
    """

    num_rows: int
    format: RowFormat
    capturable: bool  # what no placement is without, so that a step of any model is one graph

    def wake(self) -> None:
        """Lookups will come: helpers get ready. It is not needed, and spares the first one what their waking takes."""
        ...

    def check(self) -> None:
        """Raises HelperError if a lookup so far went without its rows, or what reading them raised."""
        ...

    def lookup(self, ids: Tensor, dtype: torch.dtype | None, out: Tensor | None = None) -> Tensor:
        """Rows of `ids` (int64 [...], on the model's device): numbers of `dtype` [..., dim], or for None the stored
        bytes, uint8 [..., row_bytes]. Id -1 gives a row of zeros. `out` is filled and returned if given."""
        ...


class DeviceStore:
    """The whole table in the memory of the device that runs the model."""

    capturable = True

    def __init__(self, num_rows: int, format: RowFormat, device: torch.device) -> None:
        self.num_rows, self.format, self.device = num_rows, format, device
        self.table = self._allocate()  # uint8 [rows, row_bytes]
        self.values, self.scales = format.split(self.table)
        self.scale = torch.ones(1, device=device) if format.table_scale else None

    def _allocate(self) -> Tensor:
        return torch.empty(self.num_rows, self.format.row_bytes, dtype=torch.uint8, device=self.device)

    def wake(self) -> None:
        """See RowStore."""

    def check(self) -> None:
        """See RowStore."""

    def lookup(self, ids: Tensor, dtype: torch.dtype | None, out: Tensor | None = None) -> Tensor:
        """See RowStore."""
        if dtype is None:
            return row_lookup(self.table, ids, out)
        form = self.format
        return row_decode(self.table, ids, form.values, form.dim, dtype, form.group, self.scale, out)


class HostStore(DeviceStore):
    """The whole table in host memory.

    Small lookups are read in place by the kernel. Past `crossover` rows the host gathers them, on all its threads,
    while the device takes those that are there. `crossover` None measures on the first lookup that is not captured, for
    a process that is alone; the others take rank 0's. Until it is known everything is read in place.
    """

    def __init__(self, num_rows: int, format: RowFormat, device: torch.device, crossover: int | None = None) -> None:
        self.crossover = crossover
        super().__init__(num_rows, format, device)
        self.by_host = GatheredRows(self.table, format, device) if device.type == "cuda" else None

    def _allocate(self) -> Tensor:
        if self.device.type == "meta":
            return super()._allocate()
        self.memory = HostMemory(self.num_rows * self.format.row_bytes, self.device)
        return self.memory.bytes.view(self.num_rows, -1)

    def wake(self) -> None:
        """See RowStore."""
        if self.by_host is not None:
            self.by_host.wake()

    def check(self) -> None:
        """See RowStore."""
        if self.by_host is not None:
            self.by_host.check()

    def lookup(self, ids: Tensor, dtype: torch.dtype | None, out: Tensor | None = None) -> Tensor:
        """See RowStore."""
        if self.by_host is not None and self.crossover is None and not torch.cuda.is_current_stream_capturing():
            self.crossover = self.measure_crossover()
        if self.crossover is None or ids.numel() <= self.crossover:
            return super().lookup(ids, dtype, out)
        return self.gather(ids, dtype, out)

    def gather(self, ids: Tensor, dtype: torch.dtype | None, out: Tensor | None = None) -> Tensor:
        """`lookup` by way of the host's threads."""
        if self.by_host is None:
            return super().lookup(ids, dtype, out)
        return self.by_host.lookup(ids, dtype, self.scale, out)

    def measure_crossover(self) -> int:
        """The most rows for which reading in place is at least as fast as gathering, measured here and now."""
        best = 0
        for rows in (256 << power for power in range(9)):
            if self._milliseconds(rows, super().lookup) > self._milliseconds(rows, self.gather):
                break
            best = rows
        return best

    def _milliseconds(self, rows: int, lookup: Callable[..., Tensor]) -> float:
        """Device time of a captured lookup of `rows` random rows, which are others at every replay: none is in a
        cache."""
        out = torch.empty(rows, self.format.row_bytes, dtype=torch.uint8, device=self.device)
        ids = torch.randint(self.num_rows, (rows,), device=self.device)
        lookup(ids, None, out)  # compiles
        torch.cuda.synchronize(self.device)
        graph, times = torch.cuda.CUDAGraph(), []
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            graph.capture_begin(capture_error_mode="thread_local")
            lookup(ids, None, out)
            graph.capture_end()
        for _ in range(6):
            ids.random_(self.num_rows)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.wake()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
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
