"""A gated MLP with packed weights, against the formula in float64."""

import pytest
import torch
import torch.nn.functional as F

from deltagram.kernels._norm import Norm
from deltagram.kernels.gated_mlp import gated_mlp, gated_mlp_onto
from deltagram.kernels.rms_norm import rms_norm
from deltagram.testing.compiled import LENGTHS, among_nan, assert_close, exact, weight


@pytest.mark.parametrize(("size", "inner", "bf16"), [(32, 48, True), (21, 13, True), (5, 1, False)])
def test_any_number_of_rows(size: int, inner: int, bf16: bool) -> None:
    torch.manual_seed(0)
    gate_up, down = weight(2 * inner, size, bf16=bf16), weight(size, inner, bf16=bf16)
    x = torch.randn(130, size)
    gate, up = (x.double() @ gate_up.unpack().double().T).chunk(2, -1)
    expected = (F.silu(gate) * up) @ down.unpack().double().T
    every = gated_mlp(x, gate_up, down, impl="compiled")
    assert_close(every, expected)
    torch.testing.assert_close(gated_mlp(*exact((x, gate_up, down))), expected)
    for rows in LENGTHS:
        assert torch.equal(gated_mlp(among_nan(x[-rows:]), gate_up, down, impl="compiled"), every[-rows:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("is_packed", [True, False])
def test_onto_is_an_mlp_a_sum_and_a_norm(dtype: torch.dtype, is_packed: bool) -> None:
    torch.manual_seed(0)
    packed, norm = (weight(26, 21), weight(21, 13)), Norm(torch.rand(21) + 0.5, 1e-3)
    matrices = packed if is_packed else tuple(one.unpack().to(dtype) for one in packed)
    for rows in (0, 1, 17, 130):
        x, residual = among_nan(torch.randn(rows, 21, dtype=dtype)), among_nan(torch.randn(rows, 21, dtype=dtype))
        for impl in (None, "reference"):
            y, normed = gated_mlp_onto(residual, x, *matrices, norm, impl)
            expected = residual + gated_mlp(x, *matrices, impl)
            assert torch.equal(y, expected), (rows, impl)
            body = "compiled" if impl is None and is_packed and dtype == torch.float32 else "reference"
            assert torch.equal(normed, rms_norm(expected, *norm, body)) and normed.dtype == dtype, (rows, impl)
