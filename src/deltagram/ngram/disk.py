"""Rows read from the checkpoint's own files, as they lie there: no conversion, no copy of the table, bounded memory.

Reads are small and random. Each row is read once a lookup, however often its id occurs; the kernel is told of all those
it has to fetch before the first is waited for, so that many are in flight, and not to read ahead of any. Nothing is
mapped: mapped pages count as the process's, and fall to its limits.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deltagram.kernels.row_decode import row_decode
from deltagram.ngram.formats import RowFormat
from deltagram.ngram.helpers import Workers
from deltagram.ngram.host_step import FetchedRows

CHUNK = 4096  # rows fetched at a time
READERS = 4  # threads; more of them wait for each other's turns in Python
_JOB = 256  # reads a job, all announced before the first is made


@dataclass(frozen=True, slots=True)
class Segment:
    """Where part of a table lies: bytes [at, at + width) of rows [first, first + count), one after the other, from byte
    `offset` of `file` on. `name` is the checkpoint's tensor, for errors."""

    name: str
    file: Path
    offset: int
    first: int
    count: int
    at: int
    width: int


class DiskStore:
    """A table in files, which must stay as they are while it is open.

    On a CUDA device a thread of its own fetches the rows, for captured lookups too: see host_step.py.
    """

    capturable = True

    def __init__(
        self,
        num_rows: int,
        format: RowFormat,
        segments: Sequence[Segment],
        device: torch.device,
        scale: Tensor | None = None,
    ) -> None:
        """Raises ValueError for segments that leave a part of the table out, hold one twice or end after their file."""
        self.num_rows, self.format, self.device = num_rows, format, device
        self.scale = scale
        assert (scale is not None) == format.table_scale
        _check(num_rows, format, segments)
        self._columns = []  # a part of the row each: where it lies in the row, first rows of its segments, the segments
        for at in sorted({segment.at for segment in segments}):
            parts = sorted((s for s in segments if s.at == at), key=lambda s: s.first)
            self._columns.append((at, parts[0].width, np.array([part.first for part in parts]), parts))
        self._files = {path: os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in {s.file for s in segments}}
        for descriptor in self._files.values():
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        self._workers = Workers(READERS, "reading rows from disk")
        self.rows_read = 0
        self.by_host = FetchedRows(self.fetch, format, device) if device.type == "cuda" else None

    def wake(self) -> None:
        """See RowStore."""

    def check(self) -> None:
        """See RowStore."""
        if self.by_host is not None:
            self.by_host.check()

    def lookup(self, ids: Tensor, dtype: torch.dtype | None, out: Tensor | None = None) -> Tensor:
        """See RowStore. Outside a capture raises ValueError naming the tensor for a failed read, HelperError if reading
        stops."""
        if self.by_host is None:
            return self._lookup_here(ids, dtype, out)
        found = self.by_host.lookup(ids, dtype, self.scale, out)
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self.device).synchronize()
            self.check()
        return found

    def _lookup_here(self, ids: Tensor, dtype: torch.dtype | None, out: Tensor | None) -> Tensor:
        form = self.format
        width = form.row_bytes if dtype is None else form.dim
        if out is None:
            out = torch.empty(*ids.shape, width, dtype=dtype or torch.uint8)
        flat, rows = ids.reshape(-1), out.view(-1, width)
        for wanted, target in zip(flat.split(CHUNK), rows.split(CHUNK), strict=True):
            staged = target if dtype is None else torch.empty(len(wanted), form.row_bytes, dtype=torch.uint8)
            self.fetch(wanted, staged)
            if dtype is not None:
                # Absent rows are zero bytes, which decode to zeros unless the scale is not finite: none is.
                order = torch.arange(len(wanted))
                row_decode(staged, order, form.values, form.dim, dtype, form.group, self.scale, target)
        return out

    def fetch(self, ids: Tensor, into: Tensor) -> None:
        """Rows of host `ids` [n] into host memory `into` [n, row_bytes]."""
        wanted, place = np.unique(ids.numpy(), return_inverse=True)
        absent = int(np.searchsorted(wanted, 0))
        found = np.zeros((len(wanted), self.format.row_bytes), np.uint8)
        assert len(wanted) == 0 or wanted[-1] < self.num_rows
        jobs = []
        for at, width, firsts, parts in self._columns:
            owner = np.searchsorted(firsts, wanted, side="right") - 1
            for begin in range(absent, len(wanted), _JOB):
                job = slice(begin, min(begin + _JOB, len(wanted)))
                targets = found[job, at : at + width]
                owners = [parts[i] for i in owner[job]]
                jobs.append(partial(self._read, wanted[job].tolist(), owners, targets))
        self._workers.run(jobs)
        self.rows_read += len(wanted) - absent
        into.numpy()[:] = found[place.reshape(-1)]

    def close(self) -> None:
        """Close the files and end the readers."""
        if self.by_host is not None:
            self.by_host.close()
        self._workers.close()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}

    def _read(self, rows: list[int], owners: list[Segment], targets: np.ndarray) -> None:
        """Fill `targets` with `rows`: those in the page cache at once, the others once all of them are asked for."""
        waiting = []
        for row, owner, target in zip(rows, owners, targets, strict=True):
            descriptor, offset = self._files[owner.file], owner.offset + (row - owner.first) * owner.width
            try:
                found = os.preadv(descriptor, [target.data], offset, os.RWF_NOWAIT) == owner.width
            except OSError:  # not in the cache, or a file system that does not say
                found = False
            if not found:
                os.posix_fadvise(descriptor, offset, owner.width, os.POSIX_FADV_WILLNEED)
                waiting.append((row, owner, target, descriptor, offset))
        for row, owner, target, descriptor, offset in waiting:
            try:
                count = os.preadv(descriptor, [target.data], offset)
            except OSError as error:
                raise ValueError(f"reading row {row} of {owner.name} from {owner.file} failed: {error}") from error
            if count != owner.width:
                raise ValueError(
                    f"{owner.file} ended while row {row} of {owner.name} was read: the file changed or is damaged"
                )


def _check(num_rows: int, format: RowFormat, segments: Sequence[Segment]) -> None:
    problems = []
    at = 0  # bytes of a row found so far
    for begin in sorted({segment.at for segment in segments}):
        row, parts = 0, sorted((s for s in segments if s.at == begin), key=lambda s: s.first)
        for part in parts:
            if (part.at, part.first, part.width) != (at, row, parts[0].width):
                holds = f"{part.width} bytes from byte {part.at} of rows from {part.first} on"
                problems.append(
                    f"{part.name} holds {holds}; expected {parts[0].width} from byte {at}, from row {row} on"
                )
            size = part.file.stat().st_size
            if part.offset + part.count * part.width > size:
                problems.append(f"{part.name} ends after its file {part.file}, which has {size} bytes")
            row = part.first + part.count
        at = begin + parts[0].width
        if row != num_rows:
            problems.append(f"{parts[0].name} and what follows it hold {row} rows; expected {num_rows}")
    if at != format.row_bytes:
        problems.append(f"the files hold {at} bytes of each row; expected {format}")
    if problems:
        raise ValueError("\n".join(["cannot read the table from its files:", *problems]))
