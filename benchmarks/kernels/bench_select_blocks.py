"""select_blocks on this machine: one decode token and a 256-token chunk, over growing contexts.

python benchmarks/kernels/bench_select_blocks.py
"""

import sys
from pathlib import Path

import torch
from torch.utils.benchmark import Timer

sys.path.append(str(Path(__file__).parents[1]))
from environment import save

from deltagram.kernels.select_blocks import select_blocks  # noqa: F401 (the timed statement names it)

PAGE, BLOCK, HEADS, DIM, TOP_K = 64, 16, 4, 64, 64


def microseconds(context: int, new: int) -> float:
    pages = -(-context // PAGE)
    pool = torch.randn(pages, PAGE // BLOCK, DIM)
    table = torch.arange(pages, dtype=torch.int32)[None]
    q = torch.randn(new, HEADS, DIM)
    one = torch.zeros(1, dtype=torch.int32)
    cu, length = torch.tensor([0, new], dtype=torch.int32), torch.tensor([context], dtype=torch.int32)
    position = torch.arange(context - new, context, dtype=torch.int32)
    call = "select_blocks(q, pool, table, one, cu, length, position, BLOCK, TOP_K)"
    return Timer(call, globals=globals() | locals()).blocked_autorange(min_run_time=0.3).median * 1e6


def main() -> None:
    results = {
        f"context {context}, {new} new": round(microseconds(context, new), 1)
        for context in (1024, 8192, 32768)
        for new in (1, 256)
    }
    for name, value in results.items():
        print(f"{name:24} {value:10.1f} us")
    print(save("bench_select_blocks", results))


if __name__ == "__main__":
    main()
