"""The input of a block between hyper-connections, against the reference in float64."""

import pytest
import torch

from deltagram.kernels.hyper_mix import hyper_mix
from deltagram.testing.compiled import LENGTHS, assert_close, exact, weight


@pytest.mark.parametrize(("streams", "size", "rank"), [(2, 32, 8), (3, 21, 5), (1, 16, 16)])
@pytest.mark.parametrize("injects", [True, False])
def test_any_number_of_rows(streams: int, size: int, rank: int, injects: bool) -> None:
    torch.manual_seed(0)
    down, up = weight(rank + streams * injects, streams * size), weight(streams * size, rank)
    x, scale = torch.randn(130, streams, size), torch.randn(streams, size)
    every = hyper_mix(x, scale, down, up, 1e-3, "compiled")
    for ours, expected in zip(every, hyper_mix(*exact((x, scale, down, up)), 1e-3), strict=True):
        assert_close(ours, expected)
    for rows in LENGTHS:
        some = hyper_mix(x[-rows:], scale, down, up, 1e-3, "compiled")
        assert torch.equal(some[0], every[0][-rows:]) and torch.equal(some[1], every[1][-rows:])


def test_plain_weights_give_the_same() -> None:
    torch.manual_seed(0)
    down, up = weight(9, 24), weight(24, 7)
    x, scale = torch.randn(4, 2, 12), torch.randn(2, 12)
    packed, plain = (hyper_mix(x, scale, a, b, 1e-6) for a, b in ((down, up), (down.unpack(), up.unpack())))
    for ours, expected in zip(packed, plain, strict=True):
        assert_close(ours, expected.double())
