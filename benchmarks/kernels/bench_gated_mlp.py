"""A gated MLP of 256 x 768, compiled and as the reference runs it.

python benchmarks/kernels/bench_gated_mlp.py
"""

import torch

from deltagram.kernels.gated_mlp import gated_mlp
from deltagram.testing.compiled import print_times, weight

if __name__ == "__main__":
    torch.manual_seed(0)
    packed = weight(1536, 256), weight(256, 768)
    print_times(
        gated_mlp,
        {f"{rows} rows": (torch.randn(rows, 256), *packed) for rows in (1, 8, 512)},
    )
