"""Compiled body of rms_norm.py."""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._threads import spread, threaded
from deltagram.kernels._vectors import norm_row


@threaded
def _kernel(
    first: int, last: int, scratch: int, x: int, x_stride: int, w: int, groups: int, size: int, eps: float, y: int
) -> None:
    for row in range(first, last):
        for group in range(groups):
            start = group * size
            norm_row(x + 4 * (row * x_stride + start), w + 4 * start, size, eps, y + 4 * (row * groups * size + start))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    size = x.shape[-1]
    groups = weight.numel() // size
    flat = x.view(-1, groups * size) if x.is_contiguous() else x.flatten(1)
    y = torch.empty(x.shape)
    spread(
        _kernel, len(flat), 256, 0, flat.data_ptr(), flat.stride(0), weight.data_ptr(), groups, size, eps, y.data_ptr()
    )
    return y
