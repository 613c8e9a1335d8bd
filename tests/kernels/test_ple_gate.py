"""The memory gate against its formula in float64."""

import pytest
import torch

from deltagram.kernels.ple_gate import ple_gate
from deltagram.testing.compiled import LENGTHS, among_nan, assert_close


@pytest.mark.parametrize(("streams", "size"), [(2, 32), (3, 21)])
def test_formula(streams: int, size: int) -> None:
    torch.manual_seed(0)
    x, key, value = torch.randn(130, streams, size), torch.randn(130, streams, size), torch.randn(130, size)
    key[3] = 0  # d = 0
    key[4] *= 1e-7  # below the root's clamp
    weights = torch.randn(2, streams, size)

    def norm(y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()

    d = (key.double() * norm(x.double(), weights[0])).sum(-1) / size**0.5
    gate = (d.sign() * d.abs().clamp(min=1e-6).sqrt()).sigmoid()
    gated = gate[..., None] * value.double()[:, None]
    every = ple_gate(x, key, value, *weights, 1e-6, "compiled")
    exact = ple_gate(x.double(), key.double(), value.double(), *weights.double(), 1e-6)
    for ours, plain, expected in zip(every, exact, (gated, norm(gated, weights[1])), strict=True):
        assert_close(ours, expected, 1e-5)
        torch.testing.assert_close(plain, expected)
    for rows in LENGTHS:
        some = ple_gate(x[-rows:], key[-rows:], among_nan(value[-rows:]), *weights, 1e-6, "compiled")
        assert torch.equal(some[0], every[0][-rows:]) and torch.equal(some[1], every[1][-rows:])
