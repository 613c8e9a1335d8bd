"""A gated MLP.

    y = down(silu(gate(x)) * up(x))

Shapes: x [T, H] (rows may be strided), gate_up [2 I outputs, H] (gate's, then up's), down [H outputs, I], Packed or
tensors. Returns [T, H] in x's dtype, whose rows may be strided.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from deltagram.kernels._packed import Matrix, Packed, dense
from deltagram.kernels._triton import Impl, choose, on_cpu


def gated_mlp(x: Tensor, gate_up: Matrix, down: Matrix, impl: Impl = None) -> Tensor:
    """See the file's docstring."""
    compiled = _compiled if isinstance(gate_up, Packed) and isinstance(down, Packed) else None
    return choose(impl, x, _reference, _reference, compiled)(x, gate_up, down)


def _reference(x: Tensor, gate_up: Matrix, down: Matrix) -> Tensor:
    gate, up = F.linear(x, dense(gate_up, x)).chunk(2, -1)
    return F.linear(F.silu(gate).mul_(up), dense(down, x))


_compiled = on_cpu("gated_mlp")
