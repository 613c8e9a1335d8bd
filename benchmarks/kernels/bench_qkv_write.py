"""Queries, keys and values between projection and attention: 4 heads of 64 on a CPU, compiled and as the reference runs
it; 16 of 256 over 4 on a GPU, in a graph.

python benchmarks/kernels/bench_qkv_write.py
"""

from functools import partial
from typing import Any

import torch

from deltagram.kernels.qkv_write import qkv_write
from deltagram.testing.compiled import print_times
from deltagram.testing.timing import captured_us


def case(rows: int, heads: int, key_heads: int, size: int, dim: int, like: torch.Tensor) -> tuple[Any, ...]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=like.device).to(like.dtype)

    projected = random(rows, (2 * heads + 2 * key_heads) * size)
    q = projected[:, : 2 * heads * size].unflatten(1, (heads, 2 * size))[..., :size]
    k, v = projected[:, 2 * heads * size :].unflatten(1, (2 * key_heads, size)).chunk(2, 1)
    weights, tables = torch.randn(2, size, device=like.device), torch.randn(2, 4096, dim, device=like.device)
    index = torch.arange(rows, device=like.device)
    cu_tokens = torch.tensor([0, rows], dtype=torch.int32, device=like.device)
    pools = random(2, -(-rows // 64), 64, key_heads, size)
    return q, k, v, *weights, *tables, index.int(), index, cu_tokens, *pools, 1e-6


if __name__ == "__main__":
    torch.manual_seed(0)
    print_times(qkv_write, {f"{rows} rows": case(rows, 4, 2, 64, 32, torch.zeros(0)) for rows in (1, 8, 512)})
    if torch.cuda.is_available():
        for rows in (1, 8, 48, 512, 2048):
            inputs = case(rows, 16, 4, 256, 64, torch.zeros(0, device="cuda", dtype=torch.bfloat16))
            print(f"{rows} rows on a GPU {captured_us([partial(qkv_write, *inputs)] * 8):10.1f} us")
