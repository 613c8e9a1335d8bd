"""The input of a block between hyper-connections, against the reference in float64."""

import pytest
import torch

from deltagram.kernels.hyper_mix import hyper_mix
from deltagram.testing.compiled import LENGTHS, among_nan, assert_close, exact, weight


@pytest.mark.parametrize(("streams", "size", "rank"), [(2, 32, 8), (3, 21, 5), (1, 16, 16)])
@pytest.mark.parametrize("injects", [True, False])
def test_any_number_of_rows(streams: int, size: int, rank: int, injects: bool) -> None:
    torch.manual_seed(0)
    down, up = weight(rank + streams * injects, streams * size), weight(streams * size, rank)
    x, scale = torch.randn(130, streams, size), torch.randn(streams, size)
    every = hyper_mix(x, scale, down, up, 1e-3, impl="compiled")
    for ours, expected in zip(every, hyper_mix(*exact((x, scale, down, up)), 1e-3), strict=True):
        assert_close(ours, expected)
    for rows in LENGTHS:
        some = hyper_mix(x[-rows:], scale, down, up, 1e-3, impl="compiled")
        assert torch.equal(some[0], every[0][-rows:]) and torch.equal(some[1], every[1][-rows:])


def test_plain_weights_give_the_same() -> None:
    torch.manual_seed(0)
    down, up = weight(9, 24), weight(24, 7)
    x, scale = torch.randn(4, 2, 12), torch.randn(2, 12)
    packed, plain = (hyper_mix(x, scale, a, b, 1e-6) for a, b in ((down, up), (down.unpack(), up.unpack())))
    for ours, expected in zip(packed, plain, strict=True):
        assert_close(ours, expected.double())


@pytest.mark.parametrize("impl", ["compiled", "reference"])
def test_the_last_block_leaves_first(impl: str) -> None:
    torch.manual_seed(0)
    down, up, scale = weight(9, 42), weight(42, 7), torch.randn(2, 21)
    x, inject, out = torch.randn(70, 2, 21), torch.randn(70, 2), among_nan(torch.randn(70, 21))
    after = x.double() + inject.double()[:, :, None] * out.double()[:, None]
    expected = hyper_mix(after.clone(), scale.double(), down, up, 1e-3)
    ours = hyper_mix(x, scale, down, up, 1e-3, inject, out, impl)  # type: ignore[arg-type]
    assert_close(x, after)
    for mine, theirs in zip(ours, expected, strict=True):
        assert_close(mine, theirs)
