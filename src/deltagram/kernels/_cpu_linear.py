"""Compiled body of linear.py."""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._packed import Packed, room
from deltagram.kernels._products import PRODUCT, product
from deltagram.kernels._threads import spread, threaded


@threaded
def _kernel(
    first: int,
    last: int,
    scratch: int,
    f: int,
    x: int,
    x_stride: int,
    k: int,
    w: int,
    brief: int,
    outputs: int,
    y: int,
    y_stride: int,
) -> None:
    product(
        f, x + 4 * first * x_stride, x_stride, last - first, k, w, brief, outputs, y + 4 * first * y_stride, y_stride
    )


def linear(x: Tensor, weight: Packed) -> Tensor:
    rows, width = len(x), room(weight.outputs)
    assert x.stride(1) == 1
    y = torch.empty(rows, width)
    spread(
        _kernel, rows, 64, 0, PRODUCT, x.data_ptr(), x.stride(0), weight.inputs, weight.address, weight.brief,
        weight.outputs, y.data_ptr(), width,
    )  # fmt: skip
    return y if width == weight.outputs else y[:, : weight.outputs]
