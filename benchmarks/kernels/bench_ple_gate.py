"""The memory gate: 2 streams of 256, compiled and as the reference runs it.

python benchmarks/kernels/bench_ple_gate.py
"""

import torch

from deltagram.kernels.ple_gate import ple_gate
from deltagram.testing.compiled import print_times

if __name__ == "__main__":
    torch.manual_seed(0)
    norms = torch.randn(2, 2, 256)
    print_times(
        ple_gate,
        {
            f"{rows} rows": (torch.randn(rows, 2, 256), torch.randn(rows, 2, 256), torch.randn(rows, 256), *norms, 1e-6)
            for rows in (1, 8, 512)
        },
    )
