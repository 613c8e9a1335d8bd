"""Where the rows of a memory table live. A placement answers one question: the rows of these ids, please."""

from typing import Protocol

import torch
from torch import Tensor


class RowStore(Protocol):
    """A placement of one layer's table: `num_rows` rows of `row_dim` values.

    `capturable` says whether a lookup may be recorded in a graph; `needs_host_tokens` whether the host must be given
    the step's tokens to find the rows.
    """

    num_rows: int
    row_dim: int
    capturable: bool
    needs_host_tokens: bool

    def lookup(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of `ids` (int64 [T, columns]) as `dtype` [T, columns, row_dim]; id -1 gives a row of zeros."""
        ...


class DeviceStore:
    """The whole table in the memory of the device that runs the model, in the checkpoint's own dtype."""

    capturable = True
    needs_host_tokens = False

    def __init__(self, num_rows: int, row_dim: int, device: torch.device, dtype: torch.dtype) -> None:
        self.num_rows, self.row_dim = num_rows, row_dim
        self.rows = torch.empty(num_rows, row_dim, device=device, dtype=dtype)

    def lookup(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """See RowStore."""
        found = self.rows[ids.clamp(min=0)].to(dtype)
        return found.masked_fill_((ids < 0)[..., None], 0)
