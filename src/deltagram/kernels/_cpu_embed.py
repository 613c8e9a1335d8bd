"""Compiled body of embed.py."""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._threads import spread, threaded
from deltagram.kernels._vectors import LANES, get_int, get_long, load, store


@threaded
def _kernel(
    first: int, last: int, scratch: int, token: int, wide: int, words: int, size: int, copies: int, y: int
) -> None:
    for t in range(first, last):
        word = words + 4 * size * (get_long(token, t) if wide else get_int(token, t))
        for i in range(0, size, LANES):
            value = load(word, i, size)
            for c in range(copies):
                store(y + 4 * (t * copies + c) * size, i, size, value)


def embed(token: Tensor, words: Tensor, copies: int | None = None) -> Tensor:
    rows, size, times = len(token), words.shape[1], copies or 1
    assert words.is_contiguous() and token.is_contiguous()
    y = torch.empty((rows, size) if copies is None else (rows, times, size))
    spread(_kernel, rows, 128, 0, token.data_ptr(), token.itemsize == 8, words.data_ptr(), size, times, y.data_ptr())
    return y
