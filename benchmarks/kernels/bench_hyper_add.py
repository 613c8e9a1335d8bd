"""A block's output into the streams. On a GPU: 4 streams of 2560 in bf16, beside the time that its bytes take at 4.27
TB/s. On a CPU: 2 streams of 256, compiled and as the reference runs it.

python benchmarks/kernels/bench_hyper_add.py
"""

import sys
from functools import partial
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))
from environment import save

from deltagram.kernels.hyper_add import hyper_add
from deltagram.testing.compiled import print_times
from deltagram.testing.timing import captured_us

STREAMS, HIDDEN, BANDWIDTH = 4, 2560, 4.27e12


def on_gpu() -> dict[str, dict[str, float]]:
    results = {}
    for rows in (1, 8, 48, 2048):
        sizes = (rows, STREAMS, HIDDEN), (rows, STREAMS), (rows, HIDDEN)
        calls = [
            partial(hyper_add, *(torch.randn(*size, device="cuda").bfloat16() for size in sizes)) for _ in range(8)
        ]
        moved = 2 * rows * HIDDEN * (2 * STREAMS + 1)
        taken = captured_us(calls)
        results[f"{rows} rows"] = {"us": round(taken, 2), "us of its bytes": round(moved / BANDWIDTH * 1e6, 2)}
    return results


if __name__ == "__main__":
    torch.manual_seed(0)
    if torch.cuda.is_available():
        print(save("hyper_add_cuda", on_gpu()))
    else:
        print_times(
            hyper_add,
            {
                f"{rows} rows": (torch.randn(rows, 2, 256), torch.randn(rows, 2), torch.randn(rows, 256))
                for rows in (1, 8, 512)
            },
        )
