"""RMS norm of 256 numbers a row, compiled and as the reference runs it.

python benchmarks/kernels/bench_rms_norm.py
"""

import torch

from deltagram.kernels.rms_norm import rms_norm
from deltagram.testing.compiled import print_times

if __name__ == "__main__":
    torch.manual_seed(0)
    scale = torch.randn(256)
    print_times(
        rms_norm,
        {f"{rows} rows": (torch.randn(rows, 256), scale, 1e-6) for rows in (1, 8, 512)},
    )
