"""A product with a bf16 weight of 1024 x 256, compiled and as the reference runs it.

python benchmarks/kernels/bench_linear.py
"""

import torch

from deltagram.kernels.linear import linear
from deltagram.testing.compiled import print_times, weight

if __name__ == "__main__":
    torch.manual_seed(0)
    packed = weight(1024, 256)
    print_times(
        linear,
        {f"{rows} rows": (torch.randn(rows, 256), packed) for rows in (1, 8, 512)},
    )
