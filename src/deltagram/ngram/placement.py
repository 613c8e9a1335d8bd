"""The names of the placements, and making the one that is asked for."""

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltagram.ngram.cached import CachedStore
from deltagram.ngram.disk import DiskStore, Segment
from deltagram.ngram.formats import RowFormat
from deltagram.ngram.stores import DeviceStore, HostStore, RowStore, SharedStore

KINDS = ("device", "host", "shared", "disk")
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True, slots=True)
class Placement:
    """Where tables live: `kind`, one of KINDS, and the bytes of hot rows to hold on the device besides, 0 for none."""

    kind: str
    cache_bytes: int = 0

    @staticmethod
    def parse(text: object) -> "Placement":
        """Of "device", "host", "shared", "disk", or "cached:SIZE:KIND" as in cached:2GiB:host. Raises ValueError."""
        match = re.fullmatch(r"(?:cached:(\d+)(KiB|MiB|GiB|):)?(\w+)", text) if isinstance(text, str) else None
        if match is None or match[3] not in KINDS:
            raise ValueError(
                f"ngram_placement is {text!r}; expected {', '.join(KINDS)}, or cached:SIZE:KIND as cached:2GiB:host"
            )
        return Placement(match[3], int(match[1]) * _UNITS[match[2]] if match[1] else 0)

    def __str__(self) -> str:
        return f"cached:{self.cache_bytes}:{self.kind}" if self.cache_bytes else self.kind


def make_store(
    placement: Placement,
    num_rows: int,
    format: RowFormat,
    device: torch.device,
    segments: Sequence[Segment] = (),
    scale: Tensor | None = None,
    crossover: int | None = None,
    writer: socket.socket | None = None,
) -> RowStore:
    """The store of one table; but for `disk`, its rows are still to be loaded into `table_of(store)`.

    segments, and scale where the format has one: where the table lies in the checkpoint, for `disk`. crossover:
    HostStore's. writer: of a `shared` table that another process fills, that process; waits until it has. Raises
    ValueError for a cache or segments that do not fit the table.
    """
    store: RowStore
    if placement.kind == "device":
        store = DeviceStore(num_rows, format, device)
    elif placement.kind == "host":
        store = HostStore(num_rows, format, device, crossover)
    elif placement.kind == "shared" and writer is not None:
        store = SharedStore.receive(writer, num_rows, format, device)
    elif placement.kind == "shared":
        store = SharedStore(num_rows, format, device, crossover)
    else:
        store = DiskStore(num_rows, format, segments, device, scale)
    if placement.cache_bytes:
        store = CachedStore(store, min(num_rows, placement.cache_bytes // format.row_bytes), device)
    return store


def table_of(store: RowStore) -> DeviceStore | None:
    """The part of a store that rows are loaded into; None where they stay on disk."""
    below = store.below if isinstance(store, CachedStore) else store
    return below if isinstance(below, DeviceStore) else None
