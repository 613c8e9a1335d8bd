"""Qwen4-Exp's memory gate: a token's memory value, as far as its key agrees with each residual stream.

    d = sum(key * N(X)) / sqrt(H);  gate = sigmoid(sign(d) sqrt(max(|d|, 1e-6)));  G = gate * value;  C = N'(G)

N and N' are RMS norms per stream with weights of their own. C is what the layer's convolution takes.

Shapes: streams X and key [T, S, H], key normalised already; value [T, H] (rows may be strided); query_weight (of N) and
conv_weight (of N') fp32 [S, H]. Returns G and C [T, S, H]. Source: Qwen4-Exp.
"""

from __future__ import annotations

import math

from torch import Tensor

from deltagram.kernels._triton import Impl, choose, on_cpu


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
    body = choose(impl, streams, _reference, _reference, _compiled)
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
