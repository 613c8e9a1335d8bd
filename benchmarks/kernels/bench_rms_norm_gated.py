"""The gated norm for 1 to 8192 tokens, in time and in bytes of inputs and outputs.

python benchmarks/kernels/bench_rms_norm_gated.py
"""

from typing import Any

import torch

from deltagram.kernels.rms_norm_gated import rms_norm_gated
from deltagram.testing.timing import captured_us, eager_us

HV, V = 32, 128


def measure() -> list[Any]:
    weight = torch.rand(V, device="cuda")
    rows = []
    for tokens in (1, 64, 1024, 8192):
        x, z = torch.randn(2, tokens, HV, V, device="cuda").bfloat16()
        cu_tokens = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")

        def call(x: torch.Tensor = x, z: torch.Tensor = z, cu_tokens: torch.Tensor = cu_tokens) -> None:
            rms_norm_gated(x, z, weight, cu_tokens, 1e-6, "silu")

        time = captured_us([call] * 8)
        row = {"tokens": tokens, "us": time, "eager_host_us": eager_us([call] * 8)[0]}
        rows.append(row | {"tb_per_s": 3 * x.nbytes / time / 1e6})
    return rows


if __name__ == "__main__":
    for row in measure():
        print(row)
