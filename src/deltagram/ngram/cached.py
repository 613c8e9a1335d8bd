"""A device-resident set of hot rows over any placement.

A set of one row a slot (id modulo slots), with a second chance: a row that was used since it was last challenged
stays, so that a burst of cold rows does not empty the set. Every decision is made on the device by operations of
fixed shape, so that a lookup can be captured wherever that of the placement below can. A row is stored and handed out
as the bytes it is: no bit changes.
"""

import torch
from torch import Tensor

from deltagram.kernels.row_decode import row_decode
from deltagram.kernels.row_lookup import row_lookup
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
        self.num_rows, self.format = below.num_rows, below.format
        self.needs_host_tokens = below.needs_host_tokens
        self.scale: Tensor | None = getattr(below, "scale", None)

        def made(*shape: int, dtype: torch.dtype = torch.int64, fill: int = -1) -> Tensor:
            return torch.full(shape, fill, dtype=dtype, device=device)

        # One slot more than can be found takes what must not be kept.
        self.rows = torch.empty(num_slots + 1, self.format.row_bytes, dtype=torch.uint8, device=device)
        self.held = made(num_slots + 1)
        self.used = made(num_slots + 1, dtype=torch.bool, fill=False)
        self.claim = made(num_slots + 1)
        self.turn = made(1, fill=0)
        self.hits, self.lookups = made(1, fill=0), made(1, fill=0)

    @property
    def capturable(self) -> bool:
        """See RowStore."""
        return self.below.capturable

    def lookup(self, ids: Tensor, dtype: torch.dtype | None, out: Tensor | None = None) -> Tensor:
        """See RowStore."""
        flat = ids.reshape(-1).long()
        slot = flat.remainder(self.num_slots)
        held = self.held[slot]
        present = flat >= 0
        hit = present & (held == flat)
        self.hits += hit.sum()
        self.lookups += present.sum()
        into = out if dtype is None and out is not None else None
        found = self.below.lookup(torch.where(hit, -1, ids.reshape(-1)).view(ids.shape), None, into)
        packed = found.view(-1, self.format.row_bytes)
        row_lookup(self.rows, torch.where(hit, slot, -1), packed, keep=True)
        self._keep(flat, slot, held, hit, present & ~hit, packed)
        if dtype is None:
            return found
        form = self.format
        order = torch.where(present, torch.arange(len(flat), device=flat.device), -1).view(ids.shape)
        return row_decode(packed, order, form.values, form.dim, dtype, form.group, self.scale, out)

    def _keep(self, flat: Tensor, slot: Tensor, held: Tensor, hit: Tensor, miss: Tensor, packed: Tensor) -> None:
        """Let one of the missed rows into each slot whose own row was not used since the last challenge."""
        nowhere = self.num_slots
        challenged = torch.where(miss, slot, nowhere)
        enters = miss & ~(self.used[slot] & (held >= 0))
        self.used.index_fill_(0, challenged, False)
        self.used.index_fill_(0, torch.where(hit, slot, nowhere), True)
        # Of several rows for a slot the last wins. Claims grow from lookup to lookup, so that they need no clearing.
        order = self.turn + torch.arange(len(flat), device=flat.device)
        self.turn += len(flat)
        self.claim.scatter_reduce_(0, torch.where(enters, slot, nowhere), order, "amax")
        wins = enters & (self.claim[slot] == order)
        target = torch.where(wins, slot, nowhere)
        self.rows[target] = packed
        self.held[target] = torch.where(wins, flat, -1)
        self.held[nowhere:].fill_(-1)
