"""The input of a block between hyper-connections, and how strongly its output goes back into each residual stream.

    X     += last_inject * last_out       first, in place: the output of the block before, if given (see hyper_add)
    N      = weight * X / sqrt(mean(X^2) + eps)                          per stream
    low    = silu(down(N)[:rank] / streams);  input = mean over streams of sigmoid(up(low)) * N
    inject = 2 sigmoid(down(N)[rank:] / streams)

Shapes: streams X [T, S, H], weight fp32 [S, H], down [rank + S or rank outputs, S * H], up [S * H outputs, rank],
Packed or tensors; last_inject [T, S] and last_out [T, H] (rows may be strided), both or neither. Returns the input
[T, H] and inject [T, S], or [T, 0] where `down` has rank outputs. Source: Qwen4-Exp; Hyper-Connections,
https://arxiv.org/abs/2409.19606.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deltagram.kernels._packed import Matrix, Packed, dense
from deltagram.kernels._triton import Impl, choose, on_cpu


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
    body = choose(impl, streams, _reference, _reference, compiled)
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
