"""Run in a process of its own by test_norms_interpreted.py: norms, the gate of an MLP and sums of parts, under Triton's
interpreter. It checks masks and indices: sizes that fill no tile, NaN around what is read."""

import torch

from deltagram.kernels._norm import fused_norm, plain_norm
from deltagram.kernels._some_rows import _ADD, _add_kernel
from deltagram.kernels.gated_mlp import _gate
from deltagram.testing.interpreter import take_one_element_as_index

take_one_element_as_index()
torch.utils.deterministic.fill_uninitialized_memory = True
torch.use_deterministic_algorithms(True)  # scratch and outputs start as NaN


def strided(rows: int, size: int) -> torch.Tensor:
    wide = torch.full((rows + 1, size + 7), float("nan"))
    inside = wide[:rows, 3 : 3 + size]
    return inside.copy_(torch.randn(rows, size))


torch.manual_seed(0)
for shape, groups in (((5, 24), 1), ((3, 4, 20), 4), ((2, 3, 16), 1)):
    x, weight = torch.randn(shape), torch.rand(groups, shape[-1]).squeeze(0)
    torch.testing.assert_close(fused_norm(x, weight, 1e-3), plain_norm(x, weight, 1e-3))
x = strided(6, 24)
torch.testing.assert_close(fused_norm(x, torch.ones(24), 1e-3), plain_norm(x, torch.ones(24), 1e-3))

gate, up = torch.randn(2, 18, 40)
expected = torch.nn.functional.silu(gate) * up
torch.testing.assert_close(_gate(torch.cat((gate, up), 1)), expected, rtol=1e-4, atol=1e-4)

partial, residual, out = torch.randn(_ADD["PARTS"], 3, 700), strided(3, 700), torch.empty(3, 700)
_add_kernel[(3, 2)](partial, residual, out, 3, 700, residual.stride(0), **_ADD, PDL=False)
torch.testing.assert_close(out, partial.sum(0) + residual)
