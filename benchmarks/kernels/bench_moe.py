"""Two of 8 experts of 256 x 96 and a shared one of 256 x 128, compiled and as the reference runs it.

python benchmarks/kernels/bench_moe.py
"""

import torch

from deltagram.kernels.moe import moe
from deltagram.testing.compiled import print_times, weight

if __name__ == "__main__":
    torch.manual_seed(0)
    packed = weight(9, 256), weight(8, 192, 256), weight(8, 256, 96), weight(256, 256), weight(256, 128)
    print_times(
        moe,
        {f"{rows} rows": (torch.randn(rows, 256), *packed, 2, True) for rows in (1, 8, 512)},
    )
