"""The gated norm against its formula; padding is zero whatever it holds."""

import pytest
import torch

from deltagram.kernels.rms_norm_gated import rms_norm_gated


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_formula_and_padding(activation: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 3, 8, dtype=torch.float64)
    z = torch.randn(5, 40, dtype=torch.float64)[:, 7:31].unflatten(1, (3, 8))
    weight, cu_tokens = torch.randn(8, dtype=torch.float64), torch.tensor([0, 1, 4, 4], dtype=torch.int32)
    x[4:] = float("nan")
    out = rms_norm_gated(x, z, weight, cu_tokens, 1e-3, activation)
    act = z.sigmoid() * (z if activation == "silu" else 1)
    expected = weight * x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * act
    torch.testing.assert_close(out[:4], expected[:4])
    assert torch.equal(out[4:], torch.zeros(1, 3, 8, dtype=torch.float64))


def test_another_activation_is_refused() -> None:
    x = torch.zeros(1, 1, 2)
    with pytest.raises(ValueError, match="'gelu'"):
        rms_norm_gated(x, x, torch.zeros(2), torch.tensor([0, 1]), 1e-6, "gelu")
