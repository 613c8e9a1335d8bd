"""The derived sequence table of one and of eight decodes, and of a prompt of 512, compiled and as the reference runs
it.

python benchmarks/kernels/bench_derive_table.py
"""

import torch

from deltagram.kernels.derive_table import derive_table
from deltagram.testing.compiled import print_times


def case(sequences: int, new: int) -> tuple[object, ...]:
    def full(*shape: int, value: int = 0) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int32)

    kind = full(sequences, value=0 if new == 1 else 2)
    counts = torch.tensor([sequences * new, sequences, 0, 0], dtype=torch.int32)
    cu_tokens = torch.arange(sequences + 1, dtype=torch.int32) * new
    rows, grants = torch.arange(sequences, dtype=torch.int32), full(2 * sequences, 3)
    history = full(9, 2048), full(9, value=100), full(9, value=1)
    return counts, kind, rows, cu_tokens, full(sequences), grants, *history, full(9, 32), 64, sequences * new


if __name__ == "__main__":
    cases = ((1, 1), (8, 1), (1, 512))
    print_times(derive_table, {f"{n} of {new}": case(n, new) for n, new in cases})
