"""What a draft head runs on after a step: on a GPU one launch, on a CPU compiled and as the reference runs it.

python benchmarks/kernels/bench_derive_drafts.py
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))
from environment import save

from deltagram.kernels.derive_drafts import derive_drafts
from deltagram.testing.compiled import print_times
from deltagram.testing.timing import captured_us


def case(sequences: int, max_draft: int, device: str = "cpu") -> tuple[Any, ...]:
    """After a verify step of `max_draft` drafts a sequence, all of which want as many again."""

    def full(*shape: int, value: int = 0) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=device)

    new = 1 + max_draft
    numbers = torch.arange(sequences * new, dtype=torch.int32, device=device)
    rows, ends = numbers[:sequences], torch.arange(sequences + 1, dtype=torch.int32, device=device) * new
    step = full(sequences, value=max_draft), rows, ends, full(sequences, value=100), numbers // new, 100 + numbers % new
    return *step, full(sequences + 1, 4096), full(sequences + 1, value=103), full(sequences + 1, 64), 64, max_draft


SIZES = [(n, k) for k in (1, 5) for n in (1, 8, 48, 256)]

if __name__ == "__main__":
    if torch.cuda.is_available():
        results = {}
        for n, k in SIZES:
            taken = captured_us([partial(derive_drafts, *case(n, k, "cuda")) for _ in range(8)])
            results[f"{n} sequences, {k} drafts"] = {"us": round(taken, 2)}
        print(save("derive_drafts_cuda", results))
    else:
        print_times(derive_drafts, {f"{n} sequences, {k} drafts": case(n, k) for n, k in SIZES if n < 256})
