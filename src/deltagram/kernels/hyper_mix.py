"""The input of a block between hyper-connections, and how strongly its output goes back into each residual stream.

    X     += last_inject * last_out       first, in place: the output of the block before, if given (see hyper_add)
    N      = weight * X / sqrt(mean(X^2) + eps)                          per stream
    low    = silu(down(N)[:rank] / streams);  input = mean over streams of sigmoid(up(low)) * N
    inject = 2 sigmoid(down(N)[rank:] / streams)

Shapes: streams X [T, S, H], weight fp32 [S, H], down [rank + S or rank outputs, S * H], up [S * H outputs, rank],
Packed or tensors; last_inject [T, S] and last_out [T, H] (rows may be strided), both or neither. Returns the input
[T, H] and inject [T, S], or [T, 0] where `down` has rank outputs. On CUDA few rows are three launches, whose bits
do not depend on other rows; more are library products between kernels. Source: Qwen4-Exp; Hyper-Connections,
https://arxiv.org/abs/2409.19606.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deltagram.kernels._gates import FEW_HYPER_ROWS
from deltagram.kernels._packed import Matrix, Packed, dense
from deltagram.kernels._triton import Build, Impl, choose, dependent_launch, jit, on_cpu, power_of_two, tl


def hyper_mix(
    streams: Tensor,
    weight: Tensor,
    down: Matrix,
    up: Matrix,
    eps: float,
    last_inject: Tensor | None = None,
    last_out: Tensor | None = None,
    impl: Impl = None,
) -> tuple[Tensor, Tensor]:
    """See the file's docstring."""
    compiled = _compiled if isinstance(down, Packed) and isinstance(up, Packed) else None
    body = choose(impl, streams, _reference, _launch, compiled)
    return body(streams, weight, down, up, eps, last_inject, last_out)


def _reference(
    streams: Tensor,
    weight: Tensor,
    down: Matrix,
    up: Matrix,
    eps: float,
    last_inject: Tensor | None = None,
    last_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if last_inject is not None and last_out is not None:
        streams.addcmul_(last_inject[:, :, None], last_out[:, None])
    count, rank = streams.shape[1], up.inputs if isinstance(up, Packed) else up.shape[1]
    wide = streams.to(torch.float64 if streams.dtype == torch.float64 else torch.float32)
    norm = torch.linalg.vector_norm(wide, 2, -1, True)
    normed = wide * norm.square_().div_(wide.shape[-1]).add_(eps).rsqrt_()
    normed = normed.mul_(weight.to(wide.dtype)).to(streams.dtype)
    mixed = F.linear(normed.flatten(1), dense(down, streams)).div_(count)
    gates = F.linear(F.silu(mixed[:, :rank]), dense(up, streams)).sigmoid_().view_as(normed)
    return gates.mul_(normed).sum(1).div_(count), mixed[:, rank:].sigmoid().mul_(2)


_compiled = on_cpu("hyper_mix")


@jit
def _added(x, inject, out):  # type: ignore[no-untyped-def]
    """X with the last block's output, as it is stored."""
    return (x.to(tl.float32) + inject.to(tl.float32) * out.to(tl.float32)).to(x.dtype)


@jit(do_not_specialize=["num_rows"])
def _down_kernel(  # type: ignore[no-untyped-def]
    streams,
    weight,
    down,
    last_inject,
    last_out,
    partial,  # fp32 [T, S * PARTS, OUTPUTS]: of a part of a stream's columns, without the norm's factor
    squares,  # fp32 [T, S * PARTS]: the sum of its squares
    num_rows,
    out_stride,
    S: tl.constexpr,
    H: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HAS_LAST: tl.constexpr,
    PARTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The norm divides a stream by one number, so it can follow the product: one pass over X yields both."""
    part = tl.program_id(1)
    s = part // PARTS
    t = tl.program_id(2).to(tl.int64) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    real = t < num_rows
    width: tl.constexpr = (H + PARTS * BK - 1) // (PARTS * BK) * BK
    begin = part % PARTS * width
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if HAS_LAST:
        inject = tl.load(last_inject + t * S + s, mask=real, other=0)
    acc = tl.zeros([BM, BN], tl.float32)
    square = tl.zeros([BM], tl.float32)
    for k in range(0, width, BK):
        h = begin + k + tl.arange(0, BK)
        inside = real[:, None] & (h < H)[None, :]
        x = tl.load(streams + (t * S + s)[:, None] * H + h[None, :], mask=inside, other=0)
        if HAS_LAST:
            y = tl.load(last_out + t[:, None] * out_stride + h[None, :], mask=inside, other=0)
            x = _added(x, inject[:, None], y)
        x = x.to(tl.float32)
        square += tl.sum(x * x, 1)
        x = x * tl.load(weight + s * H + h, mask=h < H, other=0)[None, :]
        wanted = (h < H)[:, None] & (n < OUTPUTS)[None, :]
        w = tl.load(down + n[None, :] * (S * H) + s * H + h[:, None], mask=wanted, other=0)
        acc = tl.dot(x.to(w.dtype), w, acc, input_precision="ieee")
    at = t * (S * PARTS) + part
    tl.store(partial + at[:, None] * OUTPUTS + n[None, :], acc, mask=real[:, None] & (n < OUTPUTS)[None, :])
    if tl.program_id(0) == 0:
        tl.store(squares + at, square, mask=real)


@jit
def _low_kernel(  # type: ignore[no-untyped-def]
    partial,
    squares,
    low,  # [T, RANK]
    rate,  # fp32 [T, S]: 1 / sqrt(mean(X^2) + eps)
    inject,
    eps,
    S: tl.constexpr,
    H: tl.constexpr,
    RANK: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    S_PADDED: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    """BN outputs of one token, their parts added in order of a tree."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    t = tl.program_id(1).to(tl.int64)
    s, part = tl.arange(0, S_PADDED), tl.arange(0, PARTS)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = t * (S * PARTS) + s[:, None] * PARTS + part[None, :]
    known = (s < S)[:, None] & (part < PARTS)[None, :]
    product = tl.load(
        partial + row[:, :, None] * OUTPUTS + n[None, None, :],
        mask=known[:, :, None] & (n < OUTPUTS)[None, None, :],
        other=0,
    )
    factor = tl.rsqrt(tl.sum(tl.load(squares + row, mask=known, other=0), 1) / H + eps)
    y = tl.sum(tl.sum(product, 1) * factor[:, None], 0) / S
    sigmoid = 1 / (1 + tl.exp(-y))
    tl.store(low + t * RANK + n, (y * sigmoid).to(low.dtype.element_ty), mask=n < RANK)
    injected = (n >= RANK) & (n < OUTPUTS)
    tl.store(inject + t * (OUTPUTS - RANK) + n - RANK, (2 * sigmoid).to(inject.dtype.element_ty), mask=injected)
    if tl.program_id(0) == 0:
        tl.store(rate + t * S + s, factor, mask=s < S)


@jit(do_not_specialize=["num_rows"])
def _up_kernel(  # type: ignore[no-untyped-def]
    streams,
    weight,
    up,
    last_inject,
    last_out,
    low,
    rate,
    mixed,
    num_rows,
    out_stride,
    S: tl.constexpr,
    H: tl.constexpr,
    RANK: tl.constexpr,
    HAS_LAST: tl.constexpr,
    BM: tl.constexpr,
    BH: tl.constexpr,
    BR: tl.constexpr,
    S_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Columns of all streams of BM tokens: nobody else reads or writes them, so X changes in place here."""
    t = tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM)
    real = t < num_rows
    c = tl.arange(0, S_PADDED * BH)
    column = c // BH * H + tl.program_id(0) * BH + c % BH
    wanted = (c // BH < S) & (tl.program_id(0) * BH + c % BH < H)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gates = tl.zeros([BM, S_PADDED * BH], tl.float32)
    for first in range(0, RANK, BR):
        r = first + tl.arange(0, BR)
        w = tl.load(up + column[None, :] * RANK + r[:, None], mask=wanted[None, :] & (r < RANK)[:, None], other=0)
        a = tl.load(low + t[:, None] * RANK + r[None, :], mask=real[:, None] & (r < RANK)[None, :], other=0)
        gates = tl.dot(a, w, gates, input_precision="ieee")
    s, h = tl.arange(0, S_PADDED), tl.program_id(0) * BH + tl.arange(0, BH)
    shown = real[:, None] & (s < S)[None, :]
    inside = shown[:, :, None] & (h < H)[None, None, :]
    row = t[:, None] * S + s[None, :]
    at = row[:, :, None] * H + h[None, None, :]
    x = tl.load(streams + at, mask=inside, other=0)
    if HAS_LAST:
        y = tl.load(last_out + t[:, None] * out_stride + h[None, :], mask=real[:, None] & (h < H)[None, :], other=0)
        x = _added(x, tl.load(last_inject + row, mask=shown, other=0)[:, :, None], y[:, None, :])
        tl.store(streams + at, x, mask=inside)
    scale = tl.load(weight + s[:, None] * H + h[None, :], mask=(s < S)[:, None] & (h < H)[None, :], other=0)
    normed = x.to(tl.float32) * tl.load(rate + row, mask=shown, other=0)[:, :, None] * scale[None, :, :]
    gates = tl.reshape(gates, [BM, S_PADDED, BH])
    total = tl.sum(normed / (1 + tl.exp(-gates)), 1) / S
    tl.store(
        mixed + t[:, None] * H + h[None, :], total.to(mixed.dtype.element_ty), mask=real[:, None] & (h < H)[None, :]
    )


@jit
def _norm_kernel(  # type: ignore[no-untyped-def]
    streams, weight, last_inject, last_out, normed, out_stride, eps,
    S: tl.constexpr, H: tl.constexpr, HAS_LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """X, and N of one token's stream."""
    t = tl.program_id(0).to(tl.int64) // S
    s = tl.program_id(0) % S
    h = tl.arange(0, BLOCK)
    x = tl.load(streams + (t * S + s) * H + h, mask=h < H, other=0)
    if HAS_LAST:
        y = tl.load(last_out + t * out_stride + h, mask=h < H, other=0)
        x = _added(x, tl.load(last_inject + t * S + s), y)
    at = (t * S + s) * H + h
    if HAS_LAST:
        tl.store(streams + at, x, mask=h < H)
    x = x.to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x) / H + eps) * tl.load(weight + s * H + h, mask=h < H, other=0)
    tl.store(normed + at, y.to(normed.dtype.element_ty), mask=h < H)


@jit
def _mean_kernel(  # type: ignore[no-untyped-def]
    normed, gates, product, mixed, inject,
    S: tl.constexpr, H: tl.constexpr, RANK: tl.constexpr, OUTPUTS: tl.constexpr, S_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A token's input from its gates before the sigmoid, and its injection weights from `down`'s product."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for s in tl.static_range(S):
        at = (t * S + s) * H + h
        x = tl.load(normed + at, mask=h < H, other=0).to(tl.float32)
        total += x / (1 + tl.exp(-tl.load(gates + at, mask=h < H, other=0).to(tl.float32)))
    tl.store(mixed + t * H + h, (total / S).to(mixed.dtype.element_ty), mask=h < H)
    if OUTPUTS > RANK:
        if tl.program_id(1) == 0:
            n = tl.arange(0, S_PADDED)
            a = tl.load(product + t * OUTPUTS + RANK + n, mask=n < S, other=0).to(tl.float32) / S
            tl.store(inject + t * S + n, (2 / (1 + tl.exp(-a))).to(inject.dtype.element_ty), mask=n < S)


def _launch(
    streams: Tensor,
    weight: Tensor,
    down: Matrix,
    up: Matrix,
    eps: float,
    last_inject: Tensor | None = None,
    last_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    assert isinstance(down, Tensor) and isinstance(up, Tensor), "packed weights are for a CPU"
    num_rows, count, hidden = streams.shape
    outputs, rank = len(down), up.shape[1]
    assert streams.is_contiguous() and weight.is_contiguous() and down.is_contiguous() and up.is_contiguous()
    assert streams.dtype == down.dtype == up.dtype and weight.dtype == torch.float32
    has_last = last_inject is not None and last_out is not None
    inject_in, out_in = (last_inject, last_out) if has_last else (streams, streams)
    assert inject_in is not None and out_in is not None and inject_in.is_contiguous() and out_in.stride(-1) == 1
    mixed, inject = streams.new_empty(num_rows, hidden), streams.new_empty(num_rows, outputs - rank)
    sizes = {"S": count, "H": hidden}
    pdl = dependent_launch(streams)
    launch = {"PDL": pdl, "launch_pdl": pdl}
    if num_rows == 0:
        pass
    elif num_rows <= FEW_HYPER_ROWS:
        down_tile, up_tile, options = _tiles(streams.dtype, count)
        parts, rows = down_tile["PARTS"], -(-num_rows // down_tile["BM"])
        partial = torch.empty(num_rows, count * parts, outputs, dtype=torch.float32, device=streams.device)
        squares = torch.empty(num_rows, count * parts, dtype=torch.float32, device=streams.device)
        rate = torch.empty(num_rows, count, dtype=torch.float32, device=streams.device)
        low = streams.new_empty(num_rows, rank)
        _down_kernel[(-(-outputs // down_tile["BN"]), count * parts, rows)](
            streams, weight, down, inject_in, out_in, partial, squares, num_rows, out_in.stride(0),
            **sizes, OUTPUTS=outputs, HAS_LAST=has_last, **down_tile, **options, **launch,
        )  # fmt: skip
        _low_kernel[(-(-outputs // 64), num_rows)](
            partial, squares, low, rate, inject, eps,
            **sizes, RANK=rank, OUTPUTS=outputs, PARTS=parts, S_PADDED=up_tile["S_PADDED"], BN=64, num_warps=2,
            **launch,
        )  # fmt: skip
        _up_kernel[(-(-hidden // up_tile["BH"]), rows)](
            streams, weight, up, inject_in, out_in, low, rate, mixed, num_rows, out_in.stride(0),
            **sizes, RANK=rank, HAS_LAST=has_last, **up_tile, **options, **launch,
        )  # fmt: skip
    else:
        normed = torch.empty_like(streams)
        _norm_kernel[(num_rows * count,)](
            streams, weight, inject_in, out_in, normed, out_in.stride(0), eps,
            **sizes, HAS_LAST=has_last, BLOCK=power_of_two(hidden), num_warps=8,
        )  # fmt: skip
        product = F.linear(normed.flatten(1), down)
        gates = F.linear(F.silu(product[:, :rank] / count), up)
        _mean_kernel[(num_rows, -(-hidden // 1024))](
            normed, gates, product, mixed, inject,
            **sizes, RANK=rank, OUTPUTS=outputs, S_PADDED=power_of_two(count), BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return mixed, inject


def _tiles(dtype: torch.dtype, count: int) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Of the two products of few rows, and their options: by the model's shapes alone, as they decide how sums go."""
    full, rows, padded = dtype == torch.float32, 16, power_of_two(count)
    down = {"PARTS": 4, "BM": rows, "BN": 32, "BK": 64 if full else 128}
    columns = max(16 // padded, 8 if full else 16)  # a product has at least 16
    up = {"BM": rows, "BH": columns, "BR": 64, "S_PADDED": padded}
    return down, up, {"num_warps": 4, "num_stages": 2 if full else 4}


def ahead_of_time() -> list[Build]:
    builds = []
    sizes: dict[str, object] = {"S": 4, "H": 2560}
    ints = {"num_rows": "i32", "out_stride": "i32", "eps": "fp32"}
    scratch = dict.fromkeys(("weight", "partial", "squares", "rate"), "*fp32")
    names = ("streams", "down", "up", "last_inject", "last_out", "low", "mixed", "inject", "normed", "gates", "product")
    for dtype, has_last, outputs in (("*bf16", True, 324), ("*fp32", True, 324), ("*bf16", False, 320)):
        types = dict.fromkeys(names, dtype) | scratch | ints
        down, up, options = _tiles(torch.float32 if dtype == "*fp32" else torch.bfloat16, 4)
        last, width = {"HAS_LAST": has_last}, {"RANK": 320, "OUTPUTS": outputs}
        parts = {"PARTS": down["PARTS"], "S_PADDED": 4, "BN": 64}
        builds += [
            Build(_down_kernel, types, sizes | last | {"OUTPUTS": outputs} | down, options),
            Build(_low_kernel, types, sizes | width | parts, {"num_warps": 2}),
            Build(_up_kernel, types, sizes | last | {"RANK": 320} | up, options),
            Build(_norm_kernel, types, sizes | last | {"BLOCK": 4096}, {"num_warps": 8}),
            Build(_mean_kernel, types, sizes | width | {"S_PADDED": 4, "BLOCK": 1024}),
        ]
    return builds
