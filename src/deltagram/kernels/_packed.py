"""Weights as CPU kernels read them: in panels of 16 outputs, and in bf16 where that loses nothing."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

LANES = 16


class Packed(NamedTuple):
    """A weight W [..., outputs, inputs] as panels [..., ceil(outputs / 16), inputs, 16]; outputs past the last are
    zero.

    `panels` is bf16 if every value is one, as in a model trained in bf16 (`brief`), else fp32. `address` is its first
    byte's; `bytes_each` is the size of one matrix.
    """

    panels: Tensor
    outputs: int
    inputs: int
    address: int
    bytes_each: int
    brief: bool

    @staticmethod
    def of(weight: Tensor) -> Packed:
        """weight: fp32 [..., outputs, inputs] on a CPU."""
        outputs, inputs = weight.shape[-2:]
        short = weight.bfloat16()
        brief = bool((short == weight).all())
        padded = F.pad(short if brief else weight, (0, 0, 0, -outputs % LANES))
        panels = padded.unflatten(-2, (-1, LANES)).transpose(-1, -2).contiguous()
        return Packed(panels, outputs, inputs, panels.data_ptr(), panels.shape[-3:].numel() * panels.itemsize, brief)

    def between(self, first: int, last: int) -> Packed:
        """Outputs first .. last - 1 of one matrix, `first` being a panel's."""
        assert self.panels.dim() == 3 and first % LANES == 0
        begin, end = first // LANES, -(-last // LANES)
        panels = self.panels[begin:end]
        return self._replace(
            panels=panels, outputs=last - first, address=panels.data_ptr(), bytes_each=panels.numel() * panels.itemsize
        )

    def unpack(self) -> Tensor:
        """The weight, fp32 [..., outputs, inputs]."""
        return self.panels.transpose(-1, -2).flatten(-3, -2)[..., : self.outputs, :].float()


Matrix = Tensor | Packed  # a weight: plain, or packed for CPU kernels


def dense(weight: Matrix, like: Tensor) -> Tensor:
    """`weight` [..., outputs, inputs] in the dtype of `like`."""
    return weight.unpack().to(like.dtype) if isinstance(weight, Packed) else weight.to(like.dtype)


def between(weight: Matrix, first: int, last: int) -> Matrix:
    """Outputs first .. last - 1 of a matrix, a view."""
    return weight.between(first, last) if isinstance(weight, Packed) else weight[first:last]


def room(outputs: int) -> int:
    """Numbers in a row of whole panels."""
    return -(-outputs // LANES) * LANES
