"""The derived sequence table: on a GPU one launch, on a CPU compiled and as the reference runs it.

python benchmarks/kernels/bench_derive_table.py
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))
from environment import save

from deltagram.kernels.derive_table import derive_table
from deltagram.testing.compiled import print_times
from deltagram.testing.timing import captured_us


def case(sequences: int, new: int, device: str = "cpu") -> tuple[Any, ...]:
    def full(*shape: int, value: int = 0) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=device)

    kind = full(sequences, value=0 if new == 1 else 2)
    counts = torch.tensor([sequences * new, sequences, 0, sequences], dtype=torch.int32, device=device)
    cu_tokens = torch.arange(sequences + 1, dtype=torch.int32, device=device) * new
    rows, grants = torch.arange(sequences, dtype=torch.int32, device=device), full(2 * sequences, 3)
    grants[:sequences, 0] = rows
    history = full(sequences + 1, 4096), full(sequences + 1, value=100), full(sequences + 1, value=1)
    pages = full(sequences + 1, 64)
    return counts, kind, rows, cu_tokens, full(sequences), grants, *history, pages, 64, sequences * new


if __name__ == "__main__":
    if torch.cuda.is_available():
        results = {}
        for n, new in ((1, 1), (8, 1), (48, 1), (256, 1), (1, 2048), (16, 512)):
            taken = captured_us([partial(derive_table, *case(n, new, "cuda")) for _ in range(8)])
            results[f"{n} of {new}"] = {"us": round(taken, 2)}
        print(save("derive_table_cuda", results))
    else:
        print_times(derive_table, {f"{n} of {new}": case(n, new) for n, new in ((1, 1), (8, 1), (1, 512))})
