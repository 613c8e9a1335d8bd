"""What lies between projection and attention, against the ops it is made of; NaN in padding and between heads."""

from functools import partial

import pytest
import torch

from deltagram.kernels.cache_write import cache_write
from deltagram.kernels.norm_rope import norm_rope
from deltagram.kernels.qkv_write import qkv_write


@pytest.mark.parametrize("impl", ["compiled", "reference"])
def test_queries_keys_and_values(impl: str) -> None:
    torch.manual_seed(0)
    rows, heads, key_heads, size, dim, real = 9, 6, 2, 20, 6, 7
    angles = torch.rand(50, dim // 2) * 7
    cos, sin = (torch.cat((part, part), 1) for part in (angles.cos(), angles.sin()))
    projected = torch.randn(rows, (2 * heads + 2 * key_heads) * size)
    projected[real:] = float("nan")
    q, gate = projected[:, : 2 * heads * size].unflatten(1, (heads, 2 * size)).chunk(2, -1)
    gate.fill_(float("nan"))
    k, v = projected[:, 2 * heads * size :].unflatten(1, (2 * key_heads, size)).chunk(2, 1)
    weights, position = torch.randn(2, size), torch.randint(50, (rows,), dtype=torch.int32)
    index = torch.tensor([31, 0, 5, 8, 17, 18, 19, -1, 1 << 40])
    cu_tokens = torch.tensor([0, 1, real, real], dtype=torch.int32)
    pools = torch.randn(2, 4, 8, key_heads, size)
    expected = pools.clone()
    turned = partial(norm_rope, cos=cos, sin=sin, position=position, eps=1e-6, impl=impl)  # type: ignore[arg-type]
    cache_write(expected[0], turned(k, weights[1]), index, cu_tokens, impl)  # type: ignore[arg-type]
    cache_write(expected[1], v, index, cu_tokens, impl)  # type: ignore[arg-type]
    tables = position, index, cu_tokens
    out = qkv_write(q, k, v, weights[0], weights[1], cos, sin, *tables, pools[0], pools[1], 1e-6, impl)  # type: ignore[arg-type]
    assert torch.equal(out[:real], turned(q, weights[0])[:real]) and not out[:real].isnan().any()
    assert torch.equal(pools, expected)
