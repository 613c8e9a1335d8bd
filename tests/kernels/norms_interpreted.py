"""Run in a process of its own by test_norms_interpreted.py: norms, the gate of an MLP and sums of parts, under Triton's
interpreter. It checks masks and indices: sizes that fill no tile, NaN around what is read."""

import torch

from deltagram.kernels._norm import Norm, fused_norm, plain_norm
from deltagram.kernels._parts import add_parts
from deltagram.kernels.gated_mlp import _gate, gated_mlp_onto
from deltagram.kernels.linear import linear_onto
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

for size in (700, 40):  # a program takes one row, or several
    partial, residual = torch.randn(4, 37, size), strided(37, size)
    norm = Norm(torch.rand(size) + 0.5, 1e-3)
    for dtype in (torch.float32, torch.float16):
        wide = residual.to(dtype)
        expected = wide.float()
        for part in partial:
            expected = expected + part
        out, normed = add_parts(partial, wide, dtype, norm)
        assert torch.equal(out, expected.to(dtype)) and normed is not None
        assert torch.equal(normed, fused_norm(out, *norm))
        tolerance = 1e-3 if dtype == torch.float16 else 1e-5
        torch.testing.assert_close(normed, plain_norm(out, *norm), rtol=tolerance, atol=tolerance)
    out, normed = add_parts(partial, None, torch.float32)
    torch.testing.assert_close(out, partial.sum(0))
    assert normed is None

x, gate_up, down, norm = torch.randn(3, 24), torch.randn(40, 24), torch.randn(24, 20), Norm(torch.rand(24), 1e-3)
residual = strided(3, 24)
for op, weights in ((linear_onto, (torch.randn(24, 24),)), (gated_mlp_onto, (gate_up, down))):
    both = (op(residual.clone(), x, *weights, norm, impl) for impl in ("triton", "reference"))
    for ours, plain in zip(*both, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
