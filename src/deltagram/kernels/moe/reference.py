"""The experts in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deltagram.kernels._packed import Matrix, dense


def _reference(
    x: Tensor,
    router: Matrix,
    gate_up: Matrix,
    down: Matrix,
    shared_gate_up: Matrix,
    shared_down: Matrix,
    top_k: int,
    renormalise: bool,
    residual: Tensor | None = None,
) -> Tensor:
    scores = F.linear(x, dense(router, x))
    likely = scores[:, :-1].to(torch.float64 if x.dtype == torch.float64 else torch.float32).softmax(-1)
    expert = scores[:, :-1].sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    weight = likely.gather(1, expert)
    if renormalise:
        weight = weight / weight.sum(-1, keepdim=True)
    out = _mlp(x, dense(shared_gate_up, x), dense(shared_down, x)).mul_(scores[:, -1:].sigmoid())
    ups, downs = dense(gate_up, x), dense(down, x)
    order = expert.flatten().argsort(stable=True)
    token, scale = order // top_k, weight.flatten()[order, None].to(x.dtype)
    first = 0
    for e, size in enumerate(torch.bincount(expert.flatten(), minlength=len(ups)).tolist()):
        if size:
            mine = token[first : first + size]
            out.index_add_(0, mine, _mlp(x[mine], ups[e], downs[e]).mul_(scale[first : first + size]))
        first += size
    return out if residual is None else residual + out


def _mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(x, gate_up).chunk(2, -1)
    return F.linear(F.silu(gate).mul_(up), down)
