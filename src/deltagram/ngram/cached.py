"""A device-resident set of hot rows over any placement.

A set of one row a slot (id modulo slots), with a second chance: a row that was hit since another last wanted its place
stays, so that a burst of cold rows does not empty the set. Every decision is made on the device, by
kernels/cache_probe.py and cache_keep.py, so that a lookup can be captured wherever that of the placement below can. A
row is stored and handed out as the bytes it is: no bit changes.
"""

import torch
from torch import Tensor

from deltagram.kernels._layouts import HITS, LOOKUPS, new_slots, new_state
from deltagram.kernels.cache_keep import cache_keep
from deltagram.kernels.cache_probe import cache_probe
from deltagram.kernels.row_decode import row_decode
from deltagram.ngram.stores import RowStore


class CachedStore:
    """`below`, with up to `num_slots` of its rows on `device`.

    hits, lookups: int64 [1] on the device, counts of rows since the store was made (absent ids are not counted).
    """

    def __init__(self, below: RowStore, num_slots: int, device: torch.device) -> None:
        """Raises ValueError for a cache without slots."""
        if num_slots < 1:
            raise ValueError(f"a cache of {num_slots} rows; expected at least one row of {below.format}")
        self.below, self.num_slots = below, num_slots
        self.num_rows, self.format, self.capturable = below.num_rows, below.format, below.capturable
        self.scale: Tensor | None = getattr(below, "scale", None)
        self.rows = torch.empty(num_slots, self.format.row_bytes, dtype=torch.uint8, device=device)
        self.slots, self.state = new_slots(num_slots, device), new_state(device)
        self.hits, self.lookups = self.state[HITS : HITS + 1], self.state[LOOKUPS : LOOKUPS + 1]

    def wake(self) -> None:
        """See RowStore."""
        self.below.wake()

    def check(self) -> None:
        """See RowStore."""
        self.below.check()

    def lookup(self, ids: Tensor, dtype: torch.dtype | None, out: Tensor | None = None) -> Tensor:
        """See RowStore."""
        form, flat = self.format, ids.reshape(-1).long()
        missing = cache_probe(flat, self.slots, self.state)
        packed = None if out is None or dtype is not None else out.view(-1, form.row_bytes)
        packed = self.below.lookup(missing, None, packed)
        cache_keep(flat, missing, packed, self.rows, self.slots, self.state)
        if dtype is None:
            return packed.view(*ids.shape, form.row_bytes) if out is None else out
        # Absent rows are zero bytes, which decode to zeros unless the scale is not finite: none is.
        order = torch.arange(len(flat), device=flat.device).view(ids.shape)
        return row_decode(packed, order, form.values, form.dim, dtype, form.group, self.scale, out)
