"""Norms and gates for 1 to 8192 tokens, in time and in bytes of inputs and outputs.

python benchmarks/kernels/bench_gated_delta_prep.py
"""

from typing import Any

import torch

from deltagram.kernels.gated_delta_prep import gated_delta_prep
from deltagram.testing.timing import captured_us, eager_us

H, HV, K, V = 16, 32, 128, 128


def measure() -> list[Any]:
    A_log, dt_bias = torch.rand(HV, device="cuda"), torch.rand(HV, device="cuda")
    rows = []
    for tokens in (1, 64, 1024, 8192):
        qkv = torch.randn(tokens, 2 * H * K + HV * V, device="cuda").bfloat16()
        a, b = torch.randn(2, tokens, HV, device="cuda").bfloat16()

        def call(qkv: torch.Tensor = qkv, a: torch.Tensor = a, b: torch.Tensor = b) -> None:
            gated_delta_prep(qkv, a, b, A_log, dt_bias, H, K)

        time = captured_us([call] * 8)
        row = {"tokens": tokens, "us": time, "eager_host_us": eager_us([call] * 8)[0]}
        rows.append(row | {"tb_per_s": tokens * (2 * 2 * H * K * 2 + HV * (2 * 2 + 2 * 4)) / time / 1e6})
    return rows


if __name__ == "__main__":
    for row in measure():
        print(row)
