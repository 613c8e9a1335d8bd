"""Words' vectors, once and as residual streams."""

import pytest
import torch

from deltagram.kernels.embed import embed
from deltagram.testing.compiled import LENGTHS


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("size", [32, 21])
def test_rows_are_those_of_the_words(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    words = torch.randn(50, size, generator=generator)
    for rows in LENGTHS:
        token = torch.randint(50, (rows,), dtype=dtype, generator=generator)
        expected = torch.stack([words[int(one)] for one in token])
        for impl in ("compiled", "reference"):
            assert torch.equal(embed(token, words, impl=impl), expected)
            assert torch.equal(embed(token, words, 3, impl), torch.stack([expected] * 3, 1))
