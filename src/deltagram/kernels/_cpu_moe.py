"""Compiled bodies of moe.py and gated_mlp.py."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deltagram.kernels._compiled import inlined
from deltagram.kernels._packed import Packed, room
from deltagram.kernels._products import PRODUCT, product
from deltagram.kernels._threads import spread, threaded
from deltagram.kernels._vectors import (
    LANES,
    add,
    add_row,
    exp,
    gate_row,
    get,
    get_int,
    load,
    multiply,
    put,
    put_int,
    splat,
    store,
    subtract,
    total,
)  # fmt: skip

_LOWEST = np.float32(np.finfo(np.float32).min)
_ROWS = 256  # taken at a time: an expert's share of them fills its tiles


@inlined
def _mlp(f, x, x_stride, rows, k, up, up_brief, up_outputs, h, down, down_brief, y, y_stride):  # type: ignore[no-untyped-def]
    """y = down(silu(gate(x)) * up(x)); h: room for a row's `up_outputs`, rounded up to 16, times `rows`."""
    half, width = up_outputs // 2, (up_outputs + 15) // 16 * 16
    product(f, x, x_stride, rows, k, up, up_brief, up_outputs, h, width)
    for r in range(rows):
        gate_row(h + 4 * r * width, half, 1.0, h + 4 * r * width)
    product(f, h, width, rows, half, down, down_brief, k, y, y_stride)


@threaded
def _mlp_kernel(
    first: int, last: int, scratch: int, f: int, x: int, x_stride: int, k: int, up: int, up_brief: int, up_outputs: int,
    down: int, down_brief: int, y: int, y_stride: int,
) -> None:  # fmt: skip
    for begin in range(first, last, 32):
        rows = min(32, last - begin)
        _mlp(
            f, x + 4 * begin * x_stride, x_stride, rows, k, up, up_brief, up_outputs, scratch, down, down_brief,
            y + 4 * begin * y_stride, y_stride,
        )  # fmt: skip


def gated_mlp(x: Tensor, gate_up: Packed, down: Packed) -> Tensor:
    rows, width = len(x), room(down.outputs)
    y = torch.empty(rows, width)
    spread(
        _mlp_kernel, rows, 64, 32 * room(gate_up.outputs), PRODUCT, x.data_ptr(), x.stride(0), gate_up.inputs,
        gate_up.address, gate_up.brief, gate_up.outputs, down.address, down.brief, y.data_ptr(), width,
    )  # fmt: skip
    return y[:, : down.outputs]


@inlined
def _route(scores, experts, top_k, renormalise, likely, chosen, weights):  # type: ignore[no-untyped-def]
    """Of one row: the top_k experts of the highest scores, the lower number first among equals, and their softmax
    weights. `likely` takes exp(score - highest); chosen scores are overwritten."""
    highest = get(scores, 0)
    for e in range(1, experts):
        highest = max(highest, get(scores, e))
    sums = splat(0.0)
    for i in range(0, experts, LANES):
        store(likely, i, experts, exp(subtract(load(scores, i, experts), splat(highest))))
        sums = add(sums, load(likely, i, experts))
    whole = total(sums)
    if renormalise:
        whole = np.float32(0)
    for e in range(experts):  # NaN and -infinity, which would be chosen again and again
        if not get(scores, e) >= _LOWEST:
            put(scores, e, _LOWEST)
    for j in range(top_k):
        best = 0
        for e in range(1, experts):
            if get(scores, e) > get(scores, best):
                best = e
        put_int(chosen, j, best)
        put(weights, j, get(likely, best))
        put(scores, best, np.float32(-np.inf))
        if renormalise:
            whole += get(likely, best)
    for j in range(top_k):
        put(weights, j, get(weights, j) / whole)


@threaded
def _moe_kernel(
    first: int, last: int, scratch: int, f: int, x: int, x_stride: int, k: int, block: int, router: int, router_brief:
    int, experts: int, top_k: int, renormalise: int, up: int, up_brief: int, up_size: int, up_outputs: int, down: int,
    down_brief: int, down_size: int, shared_up: int, shared_up_brief: int, shared_outputs: int, shared_down: int,
    shared_down_brief: int, y: int, y_stride: int,
) -> None:  # fmt: skip
    width = (experts + 16) // 16 * 16
    likely = scratch + 4 * block * width
    chosen = likely + 4 * width
    weights = chosen + 4 * block * top_k
    order = weights + 4 * block * top_k  # (row, place) pairs as row * top_k + place, those of an expert side by side
    ends = order + 4 * block * top_k
    inputs = ends + 4 * experts
    results = inputs + 4 * block * k
    hidden = results + 4 * block * y_stride
    for begin in range(first, last, block):
        rows = min(block, last - begin)
        at, out = x + 4 * begin * x_stride, y + 4 * begin * y_stride
        product(f, at, x_stride, rows, k, router, router_brief, experts + 1, scratch, width)
        _mlp(
            f,
            at,
            x_stride,
            rows,
            k,
            shared_up,
            shared_up_brief,
            shared_outputs,
            hidden,
            shared_down,
            shared_down_brief,
            out,
            y_stride,
        )
        for e in range(experts):
            put_int(ends, e, 0)
        for r in range(rows):
            _route(
                scratch + 4 * r * width,
                experts,
                top_k,
                renormalise,
                likely,
                chosen + 4 * r * top_k,
                weights + 4 * r * top_k,
            )
            gate = splat(np.float32(1) / (np.float32(1) + np.exp(-get(scratch, r * width + experts))))
            for i in range(0, k, LANES):
                store(out + 4 * r * y_stride, i, k, multiply(load(out + 4 * r * y_stride, i, k), gate))
            for j in range(top_k):
                e = get_int(chosen, r * top_k + j)
                put_int(ends, e, get_int(ends, e) + 1)
        count = 0
        for e in range(experts):
            count += get_int(ends, e)
            put_int(ends, e, count - get_int(ends, e))  # where its pairs begin; their end once they are in
        for pair in range(rows * top_k):
            e = get_int(chosen, pair)
            put_int(order, get_int(ends, e), pair)
            put_int(ends, e, get_int(ends, e) + 1)
        pair = 0
        for e in range(experts):
            size = get_int(ends, e) - pair
            if size == 0:
                continue
            for n in range(size):
                line = at + 4 * (get_int(order, pair + n) // top_k) * x_stride
                for i in range(0, k, LANES):
                    store(inputs + 4 * n * k, i, k, load(line, i, k))
            _mlp(
                f, inputs, k, size, k, up + e * up_size, up_brief, up_outputs, hidden, down + e * down_size, down_brief,
                results, y_stride,
            )  # fmt: skip
            for n in range(size):
                one = get_int(order, pair + n)
                add_row(results + 4 * n * y_stride, get(weights, one), k, out + 4 * (one // top_k) * y_stride)
            pair += size


def moe(
    x: Tensor, router: Packed, gate_up: Packed, down: Packed, shared_gate_up: Packed, shared_down: Packed, top_k: int,
    renormalise: bool,
) -> Tensor:  # fmt: skip
    rows, size = x.shape
    assert x.stride(1) == 1
    experts, width, block = router.outputs - 1, room(size), max(1, min(rows, _ROWS))
    a_row = room(experts + 1) + 3 * top_k + size + width + max(room(gate_up.outputs), room(shared_gate_up.outputs))
    y = torch.empty(rows, width)
    spread(
        _moe_kernel, rows, 64, block * a_row + room(experts + 1) + experts, PRODUCT, x.data_ptr(), x.stride(0), size,
        block, router.address, router.brief, experts, top_k, renormalise, gate_up.address, gate_up.brief,
        gate_up.bytes_each, gate_up.outputs, down.address, down.brief, down.bytes_each, shared_gate_up.address,
        shared_gate_up.brief, shared_gate_up.outputs, shared_down.address, shared_down.brief, y.data_ptr(), width,
    )  # fmt: skip
    return y if width == size else y[:, :size]
