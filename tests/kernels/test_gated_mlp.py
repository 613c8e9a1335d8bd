"""A gated MLP with packed weights, against the formula in float64."""

import pytest
import torch
import torch.nn.functional as F

from deltagram.kernels.gated_mlp import gated_mlp
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
