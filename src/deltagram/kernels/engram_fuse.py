"""DeepSeek's Engram gate: a token's memory, let into its residual streams as far as it agrees with each of them.

For stream h of x [H streams of D], memory key k_h and memory value v, in fp32:

    d    = sum(x_h * w_h * k_h) / (rms(x_h) * rms(k_h) * sqrt(D)),  rms(y) = sqrt(mean(y^2) + eps)
    gate = sigmoid(sign(d) * sqrt(max(|d|, 1e-6))),  the sign of zero, of either kind, being +;  0 for a masked token
    out  = x_h + gate * v

Shapes: x, key [T, H, D] (key's rows may be strided), value [T, D] (rows may be strided), weight [H, D] fp32 (the
product of the query's and the key's weights), live [T] bool or None (all live). Returns x's shape and dtype;
arithmetic in fp32 (float64 for float64 inputs). Source: DeepSeek-V4.1's published rules.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deltagram.kernels._triton import Build, Impl, choose, jit, power_of_two, tl


def engram_fuse(
    x: Tensor, key: Tensor, value: Tensor, weight: Tensor, eps: float, live: Tensor | None = None, impl: Impl = None
) -> Tensor:
    """See the file's docstring."""
    return choose(impl, x.device, _reference, _launch)(x, key, value, weight, eps, live)


def _reference(x: Tensor, key: Tensor, value: Tensor, weight: Tensor, eps: float, live: Tensor | None = None) -> Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    stream, wide_key = x.to(dtype), key.to(dtype)
    inverse = (stream.square().mean(-1) + eps).rsqrt() * (wide_key.square().mean(-1) + eps).rsqrt()
    dot = (stream * wide_key).mul_(weight.to(dtype)).sum(-1) * inverse / math.sqrt(x.shape[2])
    root = dot.abs().clamp_(min=1e-6).sqrt_()
    gate = torch.where(dot < 0, -root, root).sigmoid_()
    if live is not None:
        gate = gate * live[:, None]
    return torch.addcmul(stream, gate[..., None], value.to(dtype)[:, None]).to(x.dtype)


@jit
def _kernel(  # type: ignore[no-untyped-def]
    x,
    key,
    value,
    weight,
    live,
    out,
    key_stride,
    value_stride,
    eps,
    scale,
    STREAMS: tl.constexpr,
    DIM: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) // STREAMS
    stream = tl.program_id(0) % STREAMS
    d = tl.arange(0, BLOCK)
    inside = d < DIM
    at = x + (token * STREAMS + stream) * DIM + d
    h = tl.load(at, mask=inside, other=0).to(tl.float32)
    k = tl.load(key + token * key_stride + stream * DIM + d, mask=inside, other=0).to(tl.float32)
    w = tl.load(weight + stream * DIM + d, mask=inside, other=0)
    v = tl.load(value + token * value_stride + d, mask=inside, other=0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(h * h) / DIM + eps) * tl.rsqrt(tl.sum(k * k) / DIM + eps)
    dot = tl.sum(h * k * w) * inverse * scale
    root = tl.sqrt(tl.maximum(tl.abs(dot), 1e-6))
    gate = 1 / (1 + tl.exp(-tl.where(dot < 0, -root, root)))
    if HAS_LIVE:
        gate = tl.where(tl.load(live + token) != 0, gate, 0.0)
    moved = out + (token * STREAMS + stream) * DIM + d
    tl.store(moved, (h + gate * v).to(out.dtype.element_ty), mask=inside)


def _launch(x: Tensor, key: Tensor, value: Tensor, weight: Tensor, eps: float, live: Tensor | None = None) -> Tensor:
    num_tokens, streams, dim = x.shape
    assert x.is_contiguous() and weight.is_contiguous() and weight.dtype == torch.float32
    assert key.stride()[1:] == (dim, 1) and value.stride(1) == 1
    out = torch.empty_like(x)
    if num_tokens:
        _kernel[(num_tokens * streams,)](
            x,
            key,
            value,
            weight,
            None if live is None else live.view(torch.uint8),
            out,
            key.stride(0),
            value.stride(0),
            eps,
            dim**-0.5,
            **_constants(streams, dim, live is not None),
            num_warps=8,
        )
    return out


def _constants(streams: int, dim: int, has_live: bool) -> dict[str, int]:
    return {"STREAMS": streams, "DIM": dim, "HAS_LIVE": has_live, "BLOCK": power_of_two(dim)}


def ahead_of_time() -> list[Build]:
    builds = []
    for dtype in ("*bf16", "*fp32"):
        types = dict.fromkeys(("x", "key", "value", "out"), dtype) | {"weight": "*fp32", "live": "*u8"}
        types |= {"key_stride": "i32", "value_stride": "i32", "eps": "fp32", "scale": "fp32"}
        for has_live in (False, True):
            constants: dict[str, object] = dict(_constants(4, 5120, has_live))
            builds.append(
                Build(_kernel, types, constants if has_live else constants | {"live": None}, {"num_warps": 8})
            )
    return builds
