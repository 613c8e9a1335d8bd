"""How a row is stored: its values and, behind them, its scales, in one run of bytes."""

from dataclasses import dataclass

import torch
from torch import Tensor

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class RowFormat:
    """`dim` values of dtype `values` a row.

    group: fp8 values that share a ue8m0 scale byte (DeepSeek: 32), 0 for none; the dim / group scale bytes follow the
    values. table_scale: whether one fp32 number scales the whole table (Qwen's fp8 checkpoints). Raises ValueError
    for a form that kernels/row_decode.py, which says what the values mean, does not read.
    """

    values: torch.dtype
    dim: int
    group: int = 0
    table_scale: bool = False

    def __post_init__(self) -> None:
        if self.values != torch.float8_e4m3fn and (self.values not in _FLOATS or self.group or self.table_scale):
            scaled = " with scales" if self.group or self.table_scale else ""
            raise ValueError(f"rows of {self.values}{scaled}; expected bf16, fp16 or fp32 without scales, or fp8 e4m3")
        if self.dim < 1 or (self.group and self.dim % self.group):
            raise ValueError(f"rows of {self.dim} values in groups of {self.group}; expected a positive multiple")

    @property
    def value_bytes(self) -> int:
        """Bytes of a row's values."""
        return self.dim * self.values.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, its scales included."""
        return self.value_bytes + (self.dim // self.group if self.group else 0)

    def split(self, table: Tensor) -> tuple[Tensor, Tensor | None]:
        """Views of a table, uint8 [rows, row_bytes]: its values [rows, dim] and its scales, e8m0 [rows, dim /
        group]."""
        values = table[:, : self.value_bytes].view(self.values)
        return values, table[:, self.value_bytes :].view(torch.float8_e8m0fnu) if self.group else None

    def __str__(self) -> str:
        scales = f" + 1 ue8m0 scale per {self.group}" if self.group else " x 1 scale" if self.table_scale else ""
        return f"{self.dim} x {str(self.values).removeprefix('torch.')}{scales}, {self.row_bytes} bytes"
