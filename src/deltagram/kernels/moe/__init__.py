"""A mixture of gated MLPs and a shared one behind a sigmoid gate.

    y = residual + sigmoid(router(x)[E]) * shared(x) + sum over the top_k experts e of weight_e * expert_e(x)

The experts are those of the highest of the router's first E outputs (of equals, of the lowest number); their weights
are a softmax over all E of them, divided by their sum if `renormalise`. Each expert takes its tokens at once; a token
adds its experts in the order of their numbers, whatever other tokens choose.

Shapes: x [T, H] (rows may be strided); weights, Packed or tensors: router [E + 1 outputs, H], gate_up [E, 2 I
outputs, H], down [E, H outputs, I], shared_gate_up [2 Is outputs, H], shared_down [H outputs, Is]; residual [T, H]
(rows may be strided) or None for 0. Returns [T, H] in x's dtype, whose rows may be strided.

On CUDA: five launches with grids of the bucket's size. Each expert's list of (token, choice) pairs is made on the
device; a program of the products finds the expert of its tile in the experts' counts. Which place of a list a pair has
follows no order and moves no bit: a row of a product is its own. So a token's bits do not depend on other tokens; they
may differ between the tiles for few and for many rows an expert (`tiles`), which the bucket decides.
"""

from __future__ import annotations

from torch import Tensor

from deltagram.kernels._packed import Matrix, Packed
from deltagram.kernels._triton import Impl, choose, on_cpu
from deltagram.kernels.moe.reference import _reference
from deltagram.kernels.moe.triton import _launch, ahead_of_time

__all__ = ["ahead_of_time", "moe"]


def moe(
    x: Tensor,
    router: Matrix,
    gate_up: Matrix,
    down: Matrix,
    shared_gate_up: Matrix,
    shared_down: Matrix,
    top_k: int,
    renormalise: bool,
    residual: Tensor | None = None,
    impl: Impl = None,
) -> Tensor:
    """See the file's docstring."""
    weights = (router, gate_up, down, shared_gate_up, shared_down)
    compiled = _compiled if all(isinstance(weight, Packed) for weight in weights) else None
    body = choose(impl, x, _reference, _launch, compiled)
    return body(x, router, gate_up, down, shared_gate_up, shared_down, top_k, renormalise, residual)


def _compiled(
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
    y: Tensor = _compiled_moe(x, router, gate_up, down, shared_gate_up, shared_down, top_k, renormalise)
    return y if residual is None else residual + y


_compiled_moe = on_cpu("moe")
