"""Qwen4-Exp's memory gate: a token's memory value, as far as its key agrees with each residual stream.

    d = sum(key * N(X)) / sqrt(H);  gate = sigmoid(sign(d) sqrt(max(|d|, 1e-6)));  G = gate * value;  C = N'(G)

N and N' are RMS norms per stream with weights of their own. C is what the layer's convolution takes.

Shapes: streams X and key [T, S, H], key normalised already; value [T, H] (rows may be strided); query_weight (of N) and
conv_weight (of N') fp32 [S, H]. Returns G and C [T, S, H]. Source: Qwen4-Exp.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deltagram.kernels._triton import Build, Impl, choose, jit, on_cpu, power_of_two, tl


def ple_gate(
    streams: Tensor,
    key: Tensor,
    value: Tensor,
    query_weight: Tensor,
    conv_weight: Tensor,
    eps: float,
    impl: Impl = None,
) -> tuple[Tensor, Tensor]:
    """See the file's docstring."""
    body = choose(impl, streams, _reference, _launch, _compiled)
    return body(streams, key, value, query_weight, conv_weight, eps)


def _reference(
    streams: Tensor, key: Tensor, value: Tensor, query_weight: Tensor, conv_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.to(weight.dtype) if x.dtype.itemsize < 4 else x
        return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight).to(x.dtype)

    dot = (key * norm(streams, query_weight)).sum(-1) / math.sqrt(streams.shape[2])
    gate = (dot.abs().clamp_(min=1e-6).sqrt_() * dot.sign()).sigmoid_()
    gated = gate[..., None] * value[:, None]
    return gated, norm(gated, conv_weight)


_compiled = on_cpu("ple_gate")


@jit
def _kernel(  # type: ignore[no-untyped-def]
    streams,
    key,
    value,
    query_weight,
    conv_weight,
    gated,
    normed,
    value_stride,
    eps,
    scale,
    S: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) // S
    stream = tl.program_id(0) % S
    h = tl.arange(0, BLOCK)
    inside = h < H
    at = tl.program_id(0).to(tl.int64) * H + h
    x = tl.load(streams + at, mask=inside, other=0).to(tl.float32)
    k = tl.load(key + at, mask=inside, other=0).to(tl.float32)
    v = tl.load(value + token * value_stride + h, mask=inside, other=0).to(tl.float32)
    query_scale = tl.load(query_weight + stream * H + h, mask=inside, other=0)
    conv_scale = tl.load(conv_weight + stream * H + h, mask=inside, other=0)
    dot = tl.sum(k * x * query_scale) * tl.rsqrt(tl.sum(x * x) / H + eps) * scale
    root = tl.sqrt(tl.maximum(tl.abs(dot), 1e-6))
    gate = 1 / (1 + tl.exp(-tl.where(dot == 0, 0.0, tl.where(dot < 0, -root, root))))
    g = (gate * v).to(gated.dtype.element_ty)
    tl.store(gated + at, g, mask=inside)
    g = g.to(tl.float32)
    c = g * tl.rsqrt(tl.sum(g * g) / H + eps) * conv_scale
    tl.store(normed + at, c.to(normed.dtype.element_ty), mask=inside)


def _launch(
    streams: Tensor, key: Tensor, value: Tensor, query_weight: Tensor, conv_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    num_tokens, count, hidden = streams.shape
    assert streams.is_contiguous() and key.is_contiguous() and value.stride(1) == 1
    assert query_weight.is_contiguous() and conv_weight.is_contiguous()
    assert query_weight.dtype == conv_weight.dtype == torch.float32
    gated, normed = torch.empty_like(streams), torch.empty_like(streams)
    if num_tokens:
        _kernel[(num_tokens * count,)](
            streams, key, value, query_weight, conv_weight, gated, normed, value.stride(0), eps, hidden**-0.5,
            count, hidden, power_of_two(hidden), num_warps=8,
        )  # fmt: skip
    return gated, normed


def ahead_of_time() -> list[Build]:
    builds = []
    for dtype in ("*bf16", "*fp32"):
        types = dict.fromkeys(("streams", "key", "value", "gated", "normed"), dtype)
        types |= {
            "query_weight": "*fp32",
            "conv_weight": "*fp32",
            "value_stride": "i32",
            "eps": "fp32",
            "scale": "fp32",
        }
        builds.append(Build(_kernel, types, {"S": 4, "H": 2560, "BLOCK": 4096}, {"num_warps": 8}))
    return builds
