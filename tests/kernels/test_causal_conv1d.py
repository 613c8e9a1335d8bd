"""The convolution against torch's own, and its ring against rejected drafts."""

import pytest
import torch
import torch.nn.functional as F

from deltagram.kernels.causal_conv1d import causal_conv1d


def run(x: torch.Tensor, weight: torch.Tensor, ring: torch.Tensor, start: int, dilation: int) -> torch.Tensor:
    """One sequence of len(x) tokens in slot 1, and two rows of padding."""
    size = len(x)
    rows = torch.cat([x, torch.full((2, x.shape[1]), float("nan"), dtype=x.dtype)])
    cu_tokens = torch.tensor([0, size, size], dtype=torch.int32)
    sequence = torch.tensor([0] * size + [-1] * 2, dtype=torch.int32)
    position = torch.tensor([*range(start, start + size), 0, 0], dtype=torch.int32)
    starts, slots = torch.tensor([start, 0], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32)
    out = causal_conv1d(rows, weight, ring, cu_tokens, sequence, position, starts, slots, dilation)
    assert torch.equal(out[size:], torch.zeros(2, x.shape[1], dtype=x.dtype))
    return out[:size]


@pytest.mark.parametrize(("width", "dilation"), [(4, 1), (4, 3), (2, 1), (3, 2)])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 40), (40, 1, 1, 1), (2, 30, 5, 6), (9, 9, 9)])
def test_any_split_is_one_convolution(width: int, dilation: int, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    length, channels, reach = sum(sizes), 5, (width - 1) * dilation
    x, weight = torch.randn(length, channels, dtype=torch.float64), torch.randn(channels, width, dtype=torch.float64)
    whole = F.conv1d(F.pad(x.T[None], (reach, 0)), weight[:, None], groups=channels, dilation=dilation)
    expected = F.silu(whole)[0].T
    for drafts in (0, 3):
        ring = torch.full((3, reach + 1 + drafts, channels), float("nan"), dtype=torch.float64)
        done = 0
        for size in sizes:
            if drafts and done:  # three tokens that turn out wrong, after one that is right
                wrong = torch.cat([x[done : done + 1], torch.randn(3, channels, dtype=torch.float64)])
                run(wrong, weight, ring, done, dilation)
            y = run(x[done : done + size], weight, ring, done, dilation)
            torch.testing.assert_close(y, expected[done : done + size])
            done += size
        assert ring[[0, 2]].isnan().all()


def test_a_ring_too_short_is_refused() -> None:
    x, index = torch.zeros(1, 4), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="a ring of 2 entries"):
        causal_conv1d(x, torch.zeros(4, 4), torch.zeros(1, 2, 4), torch.tensor([0, 1]), index, index, index, index)
