"""Drafts into the history, as the reference runs it on a CPU.

python benchmarks/kernels/bench_place_drafts.py
"""

from functools import partial

import torch

from deltagram.kernels.place_drafts import place_drafts
from deltagram.testing.compiled import microseconds

if __name__ == "__main__":
    history = torch.zeros(64, 4096, dtype=torch.int32), torch.full((64,), 100, dtype=torch.int32)
    for count in (1, 8, 64):
        drafts = torch.zeros(count, 5, dtype=torch.int32), torch.full((count,), 5, dtype=torch.int32)
        rows = torch.arange(count, dtype=torch.int32)
        print(f"{count:3} sequences {microseconds(partial(place_drafts, *drafts, rows, *history)):8.1f} us")
