"""A block's output into the streams."""

import pytest
import torch

from deltagram.kernels.hyper_add import hyper_add
from deltagram.testing.compiled import LENGTHS, among_nan, assert_close


@pytest.mark.parametrize(("streams", "size"), [(2, 32), (3, 21)])
def test_any_number_of_rows(streams: int, size: int) -> None:
    torch.manual_seed(0)
    for rows in LENGTHS:
        x, inject, out = torch.randn(rows, streams, size), torch.randn(rows, streams), torch.randn(rows, size)
        expected = x.double() + inject.double()[:, :, None] * out.double()[:, None]
        plain = x.double()
        hyper_add(plain, inject.double(), out.double())
        hyper_add(x, inject, among_nan(out), "compiled")
        assert_close(x, expected)
        torch.testing.assert_close(plain, expected)
