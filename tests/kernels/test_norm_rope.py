"""Head norms and rotary embedding, against complex multiplication in float64."""

import pytest
import torch

from deltagram.kernels.norm_rope import norm_rope
from deltagram.testing.compiled import LENGTHS, assert_close, exact


@pytest.mark.parametrize(("size", "dim"), [(64, 32), (20, 20), (48, 6)])
def test_turns(size: int, dim: int) -> None:
    torch.manual_seed(0)
    angles = torch.rand(200, dim // 2) * 7
    cos, sin = (torch.cat((part, part), 1) for part in (angles.cos(), angles.sin()))
    weight, position = torch.randn(size), torch.randint(200, (130,), dtype=torch.int32)
    projected = torch.full((130, 3, 2 * size + 1), float("nan"))
    x = projected[:, :, 1 : size + 1]  # strided rows and heads, NaN between them
    x.copy_(torch.randn(130, 3, size))
    normed = weight.double() * x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    turn = torch.polar(torch.ones(130, 1, dim // 2, dtype=torch.float64), angles.double()[position.long(), None])
    turned = torch.complex(normed[..., : dim // 2], normed[..., dim // 2 : dim]) * turn
    expected = torch.cat((turned.real, turned.imag, normed[..., dim:]), -1)
    every = norm_rope(x, weight, cos, sin, position, 1e-6, "compiled")
    assert_close(every, expected)
    assert_close(norm_rope(*exact((x, weight, cos, sin)), position, 1e-6).float(), expected)
    for rows in LENGTHS:
        assert torch.equal(norm_rope(x[-rows:], weight, cos, sin, position[-rows:], 1e-6, "compiled"), every[-rows:])
