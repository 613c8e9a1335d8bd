"""The input of a block. On a GPU: 4 streams of 2560, rank 320, bf16, beside the time that its bytes take at 4.27 TB/s.
On a CPU: 2 streams of 256, rank 32, compiled and as the reference runs it.

python benchmarks/kernels/bench_hyper_mix.py
"""

import sys
from functools import partial
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))
from environment import save

from deltagram.kernels.hyper_mix import hyper_mix
from deltagram.testing.compiled import print_times, weight
from deltagram.testing.timing import captured_us

STREAMS, HIDDEN, RANK, BANDWIDTH = 4, 2560, 320, 4.27e12


def on_gpu() -> dict[str, dict[str, float]]:
    results = {}
    for rows in (1, 8, 16, 48, 64, 128, 512, 2048):
        calls = []
        for _ in range(8):
            flat = STREAMS * HIDDEN
            scale = torch.rand(STREAMS, HIDDEN, device="cuda")
            sizes = (RANK + STREAMS, flat), (flat, RANK), (rows, STREAMS), (rows, HIDDEN)
            down, up, inject, out = (torch.randn(*size, device="cuda").bfloat16() / size[-1] for size in sizes)
            x = torch.randn(rows, STREAMS, HIDDEN, device="cuda").bfloat16()
            calls.append(partial(hyper_mix, x, scale, down, up, 1e-6, inject, out))
        moved = 2 * (flat * (2 * RANK + STREAMS) + rows * (2 * flat + 2 * HIDDEN))
        taken = captured_us(calls)
        results[f"{rows} rows"] = {"us": round(taken, 2), "us of its bytes": round(moved / BANDWIDTH * 1e6, 2)}
        print(rows, results[f"{rows} rows"])
    return results


if __name__ == "__main__":
    torch.manual_seed(0)
    if torch.cuda.is_available():
        print(save("hyper_mix_cuda", on_gpu()))
    else:
        scale, down, up = torch.randn(2, 256), weight(34, 512), weight(512, 32)
        print_times(
            hyper_mix,
            {f"{rows} rows": (torch.randn(rows, 2, 256), scale, down, up, 1e-6) for rows in (1, 8, 512)},
        )
