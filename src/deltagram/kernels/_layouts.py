"""What several kernels, of the device or the host, must agree on: how memory that they share is laid out."""

import torch
from torch import Tensor

# A lookup by way of the host: rows come in pieces of PIECE. Its question is one number, the lookup's, counted from 1,
# times 2^BITS, plus the number of pieces.
PIECE, BITS = 64, 20

# A set of hot rows: int64 [slots, 4], of each slot the row it holds or -1, the turn in which that was hit last, the
# turn in which another row last wanted its place, and the claim of the last row that does now; and int64 [4], the turn
# (rows looked up before, plus one), a word of the kernels' own, rows that were hit, and rows looked up.
HELD, USED, CHALLENGED, CLAIM = range(4)
TURN, FINISHED, HITS, LOOKUPS = range(4)


def new_slots(num_slots: int, device: torch.device) -> Tensor:
    """Of a set that holds nothing."""
    return torch.tensor([-1, 0, 1, 0], device=device).repeat(num_slots, 1)


def new_state(device: torch.device) -> Tensor:
    """Of a set that nothing was looked up in."""
    return torch.tensor([1, 0, 0, 0], device=device)


def word_type(row_bytes: int) -> torch.dtype:
    """The largest integer that divides a row."""
    return next(t for t in (torch.int64, torch.int32, torch.int16, torch.uint8) if row_bytes % t.itemsize == 0)
