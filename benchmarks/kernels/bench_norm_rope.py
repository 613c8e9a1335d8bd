"""Norm and rotary embedding of 4 heads of 64, compiled and as the reference runs it.

python benchmarks/kernels/bench_norm_rope.py
"""

import torch

from deltagram.kernels.norm_rope import norm_rope
from deltagram.testing.compiled import print_times

if __name__ == "__main__":
    torch.manual_seed(0)
    scale, cos, sin = torch.randn(64), torch.randn(1024, 32), torch.randn(1024, 32)
    print_times(
        norm_rope,
        {
            f"{rows} rows": (torch.randn(rows, 4, 64), scale, cos, sin, torch.arange(rows, dtype=torch.int32), 1e-6)
            for rows in (1, 8, 512)
        },
    )
