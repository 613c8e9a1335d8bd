"""Experts. On a GPU: 8 of 256 of 2048 x 512 and a shared one of the same size in bf16, as in Qwen3.5-35B-A3B, beside
the time that the weights read take at 4.27 TB/s and the products at 500 TFLOP/s. On a CPU: 2 of 8 experts of 256 x 96
and a shared one of 256 x 128, compiled and as the reference runs it.

python benchmarks/kernels/bench_moe.py
"""

import sys
from functools import partial
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))
from environment import save

from deltagram.kernels.moe import moe
from deltagram.testing.compiled import print_times, weight
from deltagram.testing.timing import captured_us

HIDDEN, EXPERTS, TOP_K, INNER = 2048, 256, 8, 512
BANDWIDTH, RATE = 4.27e12, 500e12


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * shape[-1] ** -0.5


def on_gpu() -> dict[str, dict[str, float]]:
    shapes = (
        (EXPERTS + 1, HIDDEN),
        (EXPERTS, 2 * INNER, HIDDEN),
        (EXPERTS, HIDDEN, INNER),
        (2 * INNER, HIDDEN),
        (HIDDEN, INNER),
    )
    layers = [[random(*shape) for shape in shapes] for _ in range(3)]
    results = {}
    for rows in (1, 8, 16, 48, 96, 256, 512, 2048):
        inputs = [torch.randn(rows, HIDDEN, device="cuda").bfloat16() for _ in range(6)]
        calls = [partial(moe, x, *layers[i % 3], TOP_K, True) for i, x in enumerate(inputs)]
        chosen = [(x @ layers[i % 3][0][:-1].T).topk(TOP_K).indices.unique().numel() for i, x in enumerate(inputs)]
        experts = sum(chosen) / len(chosen) + 1
        taken = captured_us(calls)
        read = experts * 3 * HIDDEN * INNER * 2 / BANDWIDTH * 1e6
        computed = rows * (TOP_K + 1) * 6 * HIDDEN * INNER / RATE * 1e6
        results[f"{rows} rows"] = {
            "us": round(taken, 2),
            "experts read": round(experts, 1),
            "us of their bytes": round(read, 2),
            "us of the products": round(computed, 2),
        }
        print(rows, results[f"{rows} rows"])
    return results


if __name__ == "__main__":
    torch.manual_seed(0)
    if torch.cuda.is_available():
        print(save("moe_cuda", on_gpu()))
    else:
        packed = weight(9, 256), weight(8, 192, 256), weight(8, 256, 96), weight(256, 256), weight(256, 128)
        print_times(moe, {f"{rows} rows": (torch.randn(rows, 256), *packed, 2, True) for rows in (1, 8, 512)})
