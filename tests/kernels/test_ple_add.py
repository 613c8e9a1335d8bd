"""What a memory layer adds to the residual streams."""

import pytest
import torch

from deltagram.kernels.ple_add import ple_add
from deltagram.testing.compiled import LENGTHS


@pytest.mark.parametrize(("streams", "size"), [(2, 32), (3, 21)])
def test_any_number_of_rows(streams: int, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for rows in LENGTHS:
        x, gated, mixed = torch.randn(3, rows, streams, size, generator=generator).unbind()
        expected, plain = x + (gated + mixed), x.clone()
        ple_add(plain, gated.clone(), mixed, "reference")
        ple_add(x, gated, mixed, "compiled")
        assert torch.equal(x, expected) and torch.equal(plain, expected)
