"""A memory layer's sum for 2 streams of 256, compiled and as the reference runs it.

python benchmarks/kernels/bench_ple_add.py
"""

import torch

from deltagram.kernels.ple_add import ple_add
from deltagram.testing.compiled import print_times

if __name__ == "__main__":
    torch.manual_seed(0)
    print_times(ple_add, {f"{rows} rows": tuple(torch.randn(3, rows, 2, 256)) for rows in (1, 8, 512)})
