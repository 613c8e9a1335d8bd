"""RMS norm against its formula in float64: groups, strides, sizes that fill no vector."""

import pytest
import torch

from deltagram.kernels.rms_norm import rms_norm
from deltagram.testing.compiled import LENGTHS, among_nan, assert_close, exact


@pytest.mark.parametrize("shape", [(1,), (16,), (37,), (2, 20), (3, 64)])
def test_formula(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(130, *shape), torch.randn(shape)
    expected = weight.double() * x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-3).sqrt()
    every = rms_norm(x, weight, 1e-3, "compiled")
    assert_close(every, expected)
    torch.testing.assert_close(rms_norm(*exact((x, weight)), 1e-3), expected)
    for rows in LENGTHS:
        assert torch.equal(rms_norm(among_nan(x[-rows:]), weight, 1e-3, "compiled"), every[-rows:])
