"""The input of a block between hyper-connections, and how strongly its output goes back into each residual stream.

    X     += last_inject * last_out       first, in place: the output of the block before, if given (see hyper_add)
    N      = weight * X / sqrt(mean(X^2) + eps)                          per stream
    low    = silu(down(N)[:rank] / streams);  input = mean over streams of sigmoid(up(low)) * N
    inject = 2 sigmoid(down(N)[rank:] / streams)

Shapes: streams X [T, S, H], weight fp32 [S, H], down [rank + S or rank outputs, S * H], up [S * H outputs, rank],
Packed or tensors; last_inject [T, S] and last_out [T, H] (rows may be strided), both or neither. Returns the input
[T, H] and inject [T, S], or [T, 0] where `down` has rank outputs. On CUDA up to 64 rows are two launches, whose bits
do not depend on other rows; more are library products between kernels. Source: Qwen4-Exp; Hyper-Connections,
https://arxiv.org/abs/2409.19606.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deltagram.kernels._packed import Matrix, Packed, dense
from deltagram.kernels._triton import Build, Impl, choose, dependent_launch, jit, on_cpu, power_of_two, tl

_FEW = 64  # rows, at most, that the fused kernels take: they read all weights once for 16 rows


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
def _added(  # type: ignore[no-untyped-def]
    streams,
    last_inject,
    last_out,
    out_stride,
    t,
    s,
    h,
    inside,
    S: tl.constexpr,
    H: tl.constexpr,
    HAS_LAST: tl.constexpr,
):
    """X of tokens t, streams s and columns h, with the last block's output, as it is stored."""
    x = tl.load(streams + (t * S + s) * H + h, mask=inside, other=0)
    if HAS_LAST:
        y = tl.load(last_out + t * out_stride + h, mask=inside, other=0).to(tl.float32)
        a = tl.load(last_inject + t * S + s, mask=inside, other=0).to(tl.float32)
        x = (x.to(tl.float32) + a * y).to(streams.dtype.element_ty)
    return x


@jit(do_not_specialize=["num_rows"])
def _down_kernel(  # type: ignore[no-untyped-def]
    streams,
    weight,
    down,
    last_inject,
    last_out,
    partial,  # fp32 [S * PARTS, T, OUTPUTS]: of a part of a stream's columns, without the norm's factor
    squares,  # fp32 [S * PARTS, T]: the sum of its squares
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
    width: tl.constexpr = (H + PARTS * BK - 1) // (PARTS * BK) * BK
    begin = part % PARTS * width
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BM, BN], tl.float32)
    square = tl.zeros([BM], tl.float32)
    for k in range(0, width, BK):
        h = begin + k + tl.arange(0, BK)
        inside = (t < num_rows)[:, None] & (h < H)[None, :]
        x = _added(streams, last_inject, last_out, out_stride, t[:, None], s, h[None, :], inside, S, H, HAS_LAST)
        x = x.to(tl.float32)
        square += tl.sum(x * x, 1)
        x = x * tl.load(weight + s * H + h, mask=h < H, other=0)[None, :]
        wanted = (h < H)[:, None] & (n < OUTPUTS)[None, :]
        w = tl.load(down + n[None, :] * (S * H) + s * H + h[:, None], mask=wanted, other=0)
        acc = tl.dot(x.to(w.dtype), w, acc, input_precision="ieee")
    at = part.to(tl.int64) * num_rows + t
    tl.store(partial + at[:, None] * OUTPUTS + n[None, :], acc, mask=(t < num_rows)[:, None] & (n < OUTPUTS)[None, :])
    if tl.program_id(0) == 0:
        tl.store(squares + at, square, mask=t < num_rows)


@jit
def _low(  # type: ignore[no-untyped-def]
    partial,
    squares,
    t,
    n,
    inside,
    num_rows,
    eps,
    S: tl.constexpr,
    H: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """down(N) / S of tokens t and outputs n."""
    total = tl.zeros([BM, BN], tl.float32)
    for s in tl.static_range(S):
        square = tl.zeros([BM], tl.float32)
        product = tl.zeros([BM, BN], tl.float32)
        for i in tl.static_range(PARTS):
            at = (s * PARTS + i) * num_rows + t
            square += tl.load(squares + at, mask=t < num_rows, other=0)
            product += tl.load(partial + at[:, None] * OUTPUTS + n[None, :], mask=inside, other=0)
        total += product * tl.rsqrt(square / H + eps)[:, None]
    return total / S


@jit(do_not_specialize=["num_rows"])
def _up_kernel(  # type: ignore[no-untyped-def]
    streams,
    weight,
    up,
    last_inject,
    last_out,
    partial,
    squares,
    mixed,
    inject,
    num_rows,
    out_stride,
    eps,
    S: tl.constexpr,
    H: tl.constexpr,
    RANK: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HAS_LAST: tl.constexpr,
    PARTS: tl.constexpr,
    BM: tl.constexpr,
    BH: tl.constexpr,
    BR: tl.constexpr,
    S_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Columns of all streams of 16 tokens: nobody else reads or writes them, so X changes in place here."""
    t = tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM)
    real = t < num_rows
    c = tl.arange(0, S_PADDED * BH)
    s = c // BH
    h = tl.program_id(0) * BH + c % BH
    known = (s < S) & (h < H)
    gates = tl.zeros([BM, S_PADDED * BH], tl.float32)
    for first in tl.static_range(0, RANK, BR):
        r = first + tl.arange(0, BR)
        w = tl.load(up + (s * H + h)[None, :] * RANK + r[:, None], mask=known[None, :] & (r < RANK)[:, None], other=0)
        if PDL:
            if first == 0:
                tl.extra.cuda.gdc_launch_dependents()
                tl.extra.cuda.gdc_wait()
        inside = real[:, None] & (r < RANK)[None, :]
        low = _low(partial, squares, t, r, inside, num_rows, eps, S, H, OUTPUTS, PARTS, BM, BR)
        low = low / (1 + tl.exp(-low))
        gates = tl.dot(low.to(w.dtype), w, gates, input_precision="ieee")
    inside = real[:, None] & known[None, :]
    x = _added(streams, last_inject, last_out, out_stride, t[:, None], s[None, :], h[None, :], inside, S, H, HAS_LAST)
    if HAS_LAST:
        tl.store(streams + (t[:, None] * S + s[None, :]) * H + h[None, :], x, mask=inside)
    rate = tl.zeros([BM, S_PADDED * BH], tl.float32)
    for i in tl.static_range(S):
        square = tl.zeros([BM], tl.float32)
        for j in tl.static_range(PARTS):
            square += tl.load(squares + (i * PARTS + j) * num_rows + t, mask=real, other=0)
        rate = tl.where((s == i)[None, :], tl.rsqrt(square / H + eps)[:, None], rate)
    scale = tl.load(weight + s * H + h, mask=known, other=0)
    y = x.to(tl.float32) * rate * scale[None, :] / (1 + tl.exp(-gates))
    y = tl.sum(tl.reshape(y, [BM, S_PADDED, BH]), 1) / S
    h = tl.program_id(0) * BH + tl.arange(0, BH)
    tl.store(mixed + t[:, None] * H + h[None, :], y.to(mixed.dtype.element_ty), mask=real[:, None] & (h < H)[None, :])
    if OUTPUTS > RANK:
        if tl.program_id(0) == 0:
            n = tl.arange(0, S_PADDED)
            wanted = real[:, None] & (n < S)[None, :]
            a = _low(partial, squares, t, RANK + n, wanted, num_rows, eps, S, H, OUTPUTS, PARTS, BM, S_PADDED)
            a = 2 / (1 + tl.exp(-a))
            tl.store(inject + t[:, None] * S + n[None, :], a.to(inject.dtype.element_ty), mask=wanted)


@jit
def _norm_kernel(  # type: ignore[no-untyped-def]
    streams, weight, last_inject, last_out, normed, out_stride, eps,
    S: tl.constexpr, H: tl.constexpr, HAS_LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """X, and N of one token's stream."""
    h = tl.arange(0, BLOCK)
    t = tl.zeros_like(h) + tl.program_id(0).to(tl.int64) // S
    s = tl.program_id(0) % S
    x = _added(streams, last_inject, last_out, out_stride, t, s, h, h < H, S, H, HAS_LAST)
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
    elif num_rows <= _FEW:
        down_tile, up_tile = _tiles(streams.dtype, count, rank)
        parts, rows = down_tile["PARTS"], -(-num_rows // down_tile["BM"])
        partial = torch.empty(count * parts, num_rows, outputs, dtype=torch.float32, device=streams.device)
        squares = torch.empty(count * parts, num_rows, dtype=torch.float32, device=streams.device)
        _down_kernel[(-(-outputs // down_tile["BN"]), count * parts, rows)](
            streams, weight, down, inject_in, out_in, partial, squares, num_rows, out_in.stride(0),
            **sizes, OUTPUTS=outputs, HAS_LAST=has_last, **down_tile, num_warps=4, num_stages=3, **launch,
        )  # fmt: skip
        _up_kernel[(-(-hidden // up_tile["BH"]), rows)](
            streams, weight, up, inject_in, out_in, partial, squares, mixed, inject, num_rows, out_in.stride(0), eps,
            **sizes, RANK=rank, OUTPUTS=outputs, HAS_LAST=has_last, **up_tile, num_warps=8, **launch,
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


def _tiles(dtype: torch.dtype, count: int, rank: int) -> tuple[dict[str, int], dict[str, int]]:
    """Of the two kernels of few rows: by the model's shapes alone, since they decide the order of sums."""
    full = dtype == torch.float32
    padded = power_of_two(count)
    down = {"PARTS": 4, "BM": 16, "BN": 16, "BK": 64 if full else 128}
    least = max(1, 16 // padded)  # a product has at least 16 columns
    up = {"PARTS": 4, "BM": 16, "BH": max(least, 16), "BR": min(power_of_two(rank, 16), 128 if full else 512)}
    return down, up | {"S_PADDED": padded}


def ahead_of_time() -> list[Build]:
    builds = []
    sizes: dict[str, object] = {"S": 4, "H": 2560}
    ints = {"num_rows": "i32", "out_stride": "i32", "eps": "fp32"}
    scratch = {"weight": "*fp32", "partial": "*fp32", "squares": "*fp32"}
    names = ("streams", "down", "up", "last_inject", "last_out", "mixed", "inject", "normed", "gates", "product")
    for dtype, has_last, outputs in (("*bf16", True, 324), ("*fp32", True, 324), ("*bf16", False, 320)):
        types = dict.fromkeys(names, dtype) | scratch | ints
        down, up = _tiles(torch.float32 if dtype == "*fp32" else torch.bfloat16, 4, 320)
        last, width = {"HAS_LAST": has_last}, {"RANK": 320, "OUTPUTS": outputs}
        options = {"num_warps": 4, "num_stages": 3}
        builds += [
            Build(_down_kernel, types, sizes | last | {"OUTPUTS": outputs} | down, options),
            Build(_up_kernel, types, sizes | last | width | up, {"num_warps": 8}),
            Build(_norm_kernel, types, sizes | last | {"BLOCK": 4096}, {"num_warps": 8}),
            Build(_mean_kernel, types, sizes | width | {"S_PADDED": 4, "BLOCK": 1024}),
        ]
    return builds
