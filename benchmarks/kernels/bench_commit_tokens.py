"""The tokens of a step into the history, compiled and as the reference runs it.

python benchmarks/kernels/bench_commit_tokens.py
"""

import torch

from deltagram.kernels.commit_tokens import commit_tokens
from deltagram.testing.compiled import print_times

if __name__ == "__main__":
    history = torch.zeros(64, 4096, dtype=torch.int32), *torch.zeros(2, 64, dtype=torch.int32)
    print_times(
        commit_tokens,
        {
            f"{count} sequences": (
                torch.zeros(count, dtype=torch.int64),
                torch.arange(count + 1, dtype=torch.int32),
                torch.arange(count, dtype=torch.int32),
                torch.full((count,), 100, dtype=torch.int32),
                torch.zeros(count, dtype=torch.int32),
                *history,
                torch.zeros(1, dtype=torch.int64),
                torch.zeros(count, 2, dtype=torch.int32),
            )
            for count in (1, 8, 64)
        },
    )
