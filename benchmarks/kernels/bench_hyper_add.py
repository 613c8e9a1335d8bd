"""A block's output into 2 streams of 256, compiled and as the reference runs it.

python benchmarks/kernels/bench_hyper_add.py
"""

import torch

from deltagram.kernels.hyper_add import hyper_add
from deltagram.testing.compiled import print_times

if __name__ == "__main__":
    torch.manual_seed(0)
    print_times(
        hyper_add,
        {
            f"{rows} rows": (torch.randn(rows, 2, 256), torch.randn(rows, 2), torch.randn(rows, 256))
            for rows in (1, 8, 512)
        },
    )
