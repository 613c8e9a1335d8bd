"""Keys and values into their pages: where they go, and that nothing else is touched."""

import pytest
import torch

from deltagram.kernels.cache_write import cache_write
from deltagram.testing.compiled import among_nan


@pytest.mark.parametrize("impl", ["compiled", "reference"])
@pytest.mark.parametrize("shape", [(2, 20), (7,)])
def test_places_and_padding(impl: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    pool = torch.randn(4, 8, *shape)
    expected = pool.clone()
    values, index = torch.randn(6, *shape), torch.tensor([31, 0, 5, 8, -1, 1 << 40])
    for token in range(4):
        expected[int(index[token]) // 8, int(index[token]) % 8] = values[token]
    values[4:] = float("nan")  # padding
    cu_tokens = torch.tensor([0, 1, 4, 4], dtype=torch.int32)
    cache_write(pool, among_nan(values), index, cu_tokens, impl)  # type: ignore[arg-type]
    assert torch.equal(pool, expected)
    cache_write(pool, values, index, torch.zeros(3, dtype=torch.int32), impl)  # type: ignore[arg-type]
    assert torch.equal(pool, expected)
