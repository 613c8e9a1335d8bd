"""Words of 256 numbers as two streams, compiled and as the reference runs it.

python benchmarks/kernels/bench_embed.py
"""

import torch

from deltagram.kernels.embed import embed
from deltagram.testing.compiled import print_times

if __name__ == "__main__":
    torch.manual_seed(0)
    words = torch.randn(4096, 256)
    print_times(embed, {f"{rows} rows": (torch.randint(4096, (rows,)), words, 2) for rows in (1, 8, 512)})
