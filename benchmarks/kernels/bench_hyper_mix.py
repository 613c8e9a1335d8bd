"""The input of a block: 2 streams of 256, rank 32, compiled and as the reference runs it.

python benchmarks/kernels/bench_hyper_mix.py
"""

import torch

from deltagram.kernels.hyper_mix import hyper_mix
from deltagram.testing.compiled import print_times, weight

if __name__ == "__main__":
    torch.manual_seed(0)
    scale, down, up = torch.randn(2, 256), weight(34, 512), weight(512, 32)
    print_times(
        hyper_mix,
        {f"{rows} rows": (torch.randn(rows, 2, 256), scale, down, up, 1e-6) for rows in (1, 8, 512)},
    )
