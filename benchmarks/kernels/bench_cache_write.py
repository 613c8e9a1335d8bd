"""Keys of 2 heads of 64 into their pages, compiled and as the reference runs it.

python benchmarks/kernels/bench_cache_write.py
"""

import torch

from deltagram.kernels.cache_write import cache_write
from deltagram.testing.compiled import print_times

if __name__ == "__main__":
    torch.manual_seed(0)
    pool = torch.zeros(16, 64, 2, 64)
    print_times(
        cache_write,
        {
            f"{rows} rows": (
                pool,
                torch.randn(rows, 2, 64),
                torch.arange(rows),
                torch.tensor([0, rows], dtype=torch.int32),
            )
            for rows in (1, 8, 512)
        },
    )
