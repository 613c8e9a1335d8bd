"""Compiled body of norm_rope.py."""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._threads import spread, threaded
from deltagram.kernels._vectors import get_int, norm_row, rope_row


@threaded
def _kernel(
    first: int, last: int, scratch: int, x: int, x_stride: int, head_stride: int, heads: int, size: int, w: int, eps:
    float, cos: int, sin: int, dim: int, position: int, y: int,
) -> None:  # fmt: skip
    for t in range(first, last):
        at = 4 * get_int(position, t) * dim
        for h in range(heads):
            out = y + 4 * (t * heads + h) * size
            norm_row(x + 4 * (t * x_stride + h * head_stride), w, size, eps, out)
            rope_row(out, cos + at, sin + at, dim // 2)


def norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, position: Tensor, eps: float) -> Tensor:
    rows, heads, size = x.shape
    x_stride, head_stride, step = x.stride()
    assert step == 1 and cos.is_contiguous() and sin.is_contiguous()
    y = torch.empty(rows, heads, size)
    spread(
        _kernel, rows, 128, 0, x.data_ptr(), x_stride, head_stride, heads, size, weight.data_ptr(), eps, cos.data_ptr(),
        sin.data_ptr(), cos.shape[1], position.data_ptr(), y.data_ptr(),
    )  # fmt: skip
    return y
