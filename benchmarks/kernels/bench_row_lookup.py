"""row_lookup: 24 rows of 264 bytes a token from a table of 1 GiB (GPU) or 64 MiB (CPU). Tables of 28 GiB:
benchmarks/ngram_store.py.

python benchmarks/kernels/bench_row_lookup.py
"""

import sys
from functools import partial
from pathlib import Path

import torch
from torch.utils.benchmark import Timer

sys.path.append(str(Path(__file__).parents[1]))
from environment import save

from deltagram.kernels.row_lookup import row_lookup
from deltagram.testing.timing import captured_us


def microseconds(table: torch.Tensor, num_tokens: int) -> float:
    ids = [torch.randint(len(table), (num_tokens, 24), device=table.device) for _ in range(16)]
    outs = [torch.empty(num_tokens, 24, 264, dtype=torch.uint8, device=table.device) for _ in ids]
    calls = [partial(row_lookup, table, each, out) for each, out in zip(ids, outs, strict=True)]
    if table.device.type == "cuda":
        return captured_us(calls)
    return Timer("calls[0]()", globals={"calls": calls}).blocked_autorange(min_run_time=0.3).median * 1e6


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    nbytes = 1 << (30 if device.type == "cuda" else 26)
    table = torch.randint(256, (nbytes // 264, 264), dtype=torch.uint8, device=device)
    results = {f"{n} tokens, us": round(microseconds(table, n), 2) for n in (1, 6, 48, 384, 4096)}
    print(results)
    print(save(f"ngram_row_lookup_{device.type}", results))


if __name__ == "__main__":
    main()
