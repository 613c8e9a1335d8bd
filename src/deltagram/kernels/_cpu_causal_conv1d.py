"""Compiled body of causal_conv1d.py."""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._compiled import inlined
from deltagram.kernels._threads import spread, threaded
from deltagram.kernels._vectors import LANES, fma, get, get_int, get_long, load, put, put_long, silu, splat, store


@inlined
def turn_taps(weight, width, first, last, taps, step):  # type: ignore[no-untyped-def]
    """The taps of channels first .. last - 1, from [channels, width] to rows of channels `step` numbers apart."""
    for j in range(width):
        for c in range(first, last):
            put(taps, j * step + c - first, get(weight, c * width + j))


@inlined
def list_inputs(x, x_stride, t, begin, past, width, dilation, line, length, channels, inputs):  # type: ignore[no-untyped-def]
    """Addresses of the inputs of token t, oldest first; the first that there is: those before the request's first
    count as zero. `line`: the request's ring."""
    oldest = width
    for j in range(width - 1, -1, -1):
        source = t - (width - 1 - j) * dilation
        place = past + source - begin
        if source >= begin:
            put_long(inputs, j, x + 4 * source * x_stride)
        elif place >= 0:
            put_long(inputs, j, line + 4 * (place % length) * channels)
        else:
            break
        oldest = j
    return oldest


@inlined
def mix_inputs(inputs, oldest, width, first, last, taps, step, y):  # type: ignore[no-untyped-def]
    """y = silu(the taps times the inputs) for channels first .. last - 1."""
    for c in range(first, last, LANES):
        a = splat(0.0)
        for j in range(oldest, width):
            a = fma(load(taps + 4 * j * step, c - first, last - first), load(get_long(inputs, j), c, last), a)
        store(y, c - first, last - first, silu(a))


@inlined
def keep_inputs(x, x_stride, begin, end, past, line, length, channels, first, last):  # type: ignore[no-untyped-def]
    """The last inputs of a request into its ring."""
    for t in range(max(begin, end - length), end):
        entry = line + 4 * ((past + t - begin) % length) * channels
        for c in range(first, last, LANES):
            store(entry, c, last, load(x + 4 * t * x_stride, c, last))


@threaded
def _kernel(
    first: int, last: int, scratch: int, x: int, x_stride: int, channels: int, weight: int, width: int, ring: int,
    length: int, sequences: int, cu_tokens: int, start: int, slot: int, dilation: int, rows: int, out: int,
) -> None:  # fmt: skip
    left, right = first * LANES, min(last * LANES, channels)
    inputs, taps = scratch, scratch + 8 * width
    turn_taps(weight, width, left, right, taps, channels)
    for n in range(sequences):
        begin, end, past = get_int(cu_tokens, n), get_int(cu_tokens, n + 1), get_int(start, n)
        line = ring + 4 * get_int(slot, n) * length * channels
        for t in range(begin, end):
            oldest = list_inputs(x, x_stride, t, begin, past, width, dilation, line, length, channels, inputs)
            mix_inputs(inputs, oldest, width, left, right, taps, channels, out + 4 * (t * channels + left))
        keep_inputs(x, x_stride, begin, end, past, line, length, channels, left, right)
    for t in range(get_int(cu_tokens, sequences), rows):
        for c in range(left, right, LANES):
            store(out + 4 * t * channels, c, channels, splat(0.0))


def causal_conv1d(
    x: Tensor, weight: Tensor, ring: Tensor, cu_tokens: Tensor, sequence: Tensor, position: Tensor, start: Tensor,
    slot: Tensor, dilation: int = 1,
) -> Tensor:  # fmt: skip
    rows, channels = x.shape
    width = weight.shape[1]
    assert x.stride(1) == 1 and weight.is_contiguous() and ring.is_contiguous()
    out = torch.empty(rows, channels)
    vectors = -(-channels // LANES)
    spread(
        _kernel, vectors, 1 if rows >= 64 else vectors, width * (channels + 2), x.data_ptr(), x.stride(0), channels,
        weight.data_ptr(), width, ring.data_ptr(), ring.shape[1], len(slot), cu_tokens.data_ptr(), start.data_ptr(),
        slot.data_ptr(), dilation, rows, out.data_ptr(),
    )  # fmt: skip
    return out
