"""A mixture of gated MLPs and a shared one behind a sigmoid gate.

    y = sigmoid(router(x)[E]) * shared(x) + sum over the top_k experts e of weight_e * expert_e(x)

The experts are those of the highest of the router's first E outputs (of equals, of the lowest number); their weights
are a softmax over all E of them, divided by their sum if `renormalise`. Each expert takes its tokens at once; a token
adds its experts in the order of their numbers, whatever other tokens choose.

Shapes: x [T, H] (rows may be strided); weights, Packed or tensors: router [E + 1 outputs, H], gate_up [E, 2 I
outputs, H], down [E, H outputs, I], shared_gate_up [2 Is outputs, H], shared_down [H outputs, Is]. Returns [T, H] in
x's dtype, whose rows may be strided.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deltagram.kernels._packed import Matrix, Packed, dense
from deltagram.kernels._triton import Impl, choose, on_cpu


def moe(
    x: Tensor,
    router: Matrix,
    gate_up: Matrix,
    down: Matrix,
    shared_gate_up: Matrix,
    shared_down: Matrix,
    top_k: int,
    renormalise: bool,
    impl: Impl = None,
) -> Tensor:
    """See the file's docstring."""
    weights = (router, gate_up, down, shared_gate_up, shared_down)
    compiled = _compiled if all(isinstance(weight, Packed) for weight in weights) else None
    body = choose(impl, x, _reference, _reference, compiled)
    return body(x, router, gate_up, down, shared_gate_up, shared_down, top_k, renormalise)


def _reference(
    x: Tensor,
    router: Matrix,
    gate_up: Matrix,
    down: Matrix,
    shared_gate_up: Matrix,
    shared_down: Matrix,
    top_k: int,
    renormalise: bool,
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
    return out


def _mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(x, gate_up).chunk(2, -1)
    return F.linear(F.silu(gate).mul_(up), down)


_compiled = on_cpu("moe")
