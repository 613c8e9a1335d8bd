"""The memory gate. On a GPU: 4 streams of 2560 in bf16, beside the time that its bytes take at 4.27 TB/s. On a CPU: 2
streams of 256, compiled and as the reference runs it.

python benchmarks/kernels/bench_ple_gate.py
"""

import sys
from functools import partial
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))
from environment import save

from deltagram.kernels.ple_gate import ple_gate
from deltagram.testing.compiled import print_times
from deltagram.testing.timing import captured_us

STREAMS, HIDDEN, BANDWIDTH = 4, 2560, 4.27e12


def on_gpu() -> dict[str, dict[str, float]]:
    norms = torch.rand(2, STREAMS, HIDDEN, device="cuda")
    results = {}
    for rows in (1, 8, 48, 2048):
        sizes = (rows, STREAMS, HIDDEN), (rows, STREAMS, HIDDEN), (rows, HIDDEN)
        inputs = [[torch.randn(*size, device="cuda").bfloat16() for size in sizes] for _ in range(8)]
        taken = captured_us([partial(ple_gate, *tensors, *norms, 1e-6) for tensors in inputs])
        moved = 2 * rows * HIDDEN * (4 * STREAMS + 1)
        results[f"{rows} rows"] = {"us": round(taken, 2), "us of its bytes": round(moved / BANDWIDTH * 1e6, 2)}
    return results


if __name__ == "__main__":
    torch.manual_seed(0)
    if torch.cuda.is_available():
        print(save("ple_gate_cuda", on_gpu()))
    else:
        norms = torch.randn(2, 2, 256)
        inputs = {rows: [torch.randn(rows, *size) for size in ((2, 256), (2, 256), (256,))] for rows in (1, 8, 512)}
        print_times(ple_gate, {f"{rows} rows": (*tensors, *norms, 1e-6) for rows, tensors in inputs.items()})
