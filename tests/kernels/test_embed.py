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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [32, 21, 2560])
def test_on_a_gpu_too(size: int, dtype: torch.dtype) -> None:
    words = torch.randn(50, size, device="cuda").to(dtype)
    for rows in (0, 1, 8, 50):
        token = torch.randint(50, (rows,), dtype=torch.int32, device="cuda")
        assert torch.equal(embed(token, words), embed(token, words, impl="reference"))
        assert torch.equal(embed(token, words, 4), embed(token, words, 4, "reference"))
