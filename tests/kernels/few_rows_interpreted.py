"""Run in a process of its own by test_few_rows_interpreted.py: products of few rows and norms under Triton's
interpreter. It checks masks and indices: sizes that fill no tile, NaN around what is read."""

import torch
import triton.runtime.interpreter as interpreter

from deltagram.kernels import _few_rows
from deltagram.kernels._few_rows import Tile, product
from deltagram.kernels._norm import Norm, fused_norm, plain_norm
from deltagram.kernels.gated_mlp import _gate

_patch = interpreter._patch_lang_tensor


def _patch_index(tensor, scope):  # NumPy 2.4 no longer turns an array of one element into an index by itself
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_index
torch.utils.deterministic.fill_uninitialized_memory = True
torch.use_deterministic_algorithms(True)  # scratch and outputs start as NaN
torch.cuda.is_current_stream_capturing = lambda: False


def strided(rows: int, size: int) -> torch.Tensor:
    wide = torch.full((rows + 1, size + 7), float("nan"))
    inside = wide[:rows, 3 : 3 + size]
    return inside.copy_(torch.randn(rows, size))


def check(outputs: int, inputs: int, rows: int, tile: Tile, gated: bool, norm: Norm | None) -> None:
    _few_rows.tile_of = lambda outputs, inputs, gated: tile
    x, weight = strided(rows, inputs), torch.randn(outputs * (2 if gated else 1), inputs)
    residual = None if gated else strided(rows, outputs)
    expected = (x if norm is None else plain_norm(x, *norm)).double() @ weight.double().T
    if gated:
        gate, up = expected.chunk(2, 1)
        expected = torch.nn.functional.silu(gate) * up
        torch.testing.assert_close(_gate(torch.cat((gate, up), 1).float()).double(), expected, rtol=1e-4, atol=1e-4)
    if residual is not None:
        expected = expected + residual
    for _ in range(2):  # the second finds what the first left
        ours = product(x, weight, norm, residual, gated)
        torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-4)


torch.manual_seed(0)
for gated in (False, True):
    for scaled in (False, True):
        for outputs, inputs, rows in ((40, 48, 3), (33, 40, 18)):
            norm = Norm(torch.rand(inputs) + 0.5, 1e-3) if scaled else None
            check(outputs, inputs, rows, Tile(16, 16, 1, 2, 4), gated, norm)
check(40, 72, 18, Tile(16, 16, 2, 2, 4), False, None)
check(33, 100, 1, Tile(32, 16, 4, 2, 4), False, None)

for shape, groups in (((5, 24), 1), ((3, 4, 20), 4), ((2, 3, 16), 1)):
    x, weight = torch.randn(shape), torch.rand(groups, shape[-1]).squeeze(0)
    torch.testing.assert_close(fused_norm(x, weight, 1e-3), plain_norm(x, weight, 1e-3))
x = strided(6, 24)
torch.testing.assert_close(fused_norm(x, torch.ones(24), 1e-3), plain_norm(x, torch.ones(24), 1e-3))
