"""Block keys of 32 numbers, blocks of 16 tokens, compiled and as the reference runs it.

python benchmarks/kernels/bench_pool_blocks.py
"""

import torch

from deltagram.kernels.pool_blocks import pool_blocks
from deltagram.testing.compiled import print_times

if __name__ == "__main__":
    torch.manual_seed(0)
    keys, blocks, scale = torch.randn(16, 64, 32), torch.zeros(16, 4, 32), torch.randn(32)
    cos, sin = torch.randn(2, 1024, 16)
    print_times(
        pool_blocks,
        {
            f"{rows} rows": (
                keys,
                blocks,
                scale,
                cos,
                sin,
                torch.arange(15, 15 + rows, dtype=torch.int32),
                torch.arange(15, 15 + rows),
                torch.tensor([0, rows], dtype=torch.int32),
                16,
                1e-6,
            )
            for rows in (1, 8, 512)
        },
    )
