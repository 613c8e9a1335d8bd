"""One decode token for 1 to 256 sequences: time and state traffic, beside flash-linear-attention if installed.

State traffic counts one read and one write of every state. Calls work on different slots of one pool of 1 GiB.

    python benchmarks/kernels/bench_gated_delta_recurrent.py
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from deltagram.kernels.gated_delta_recurrent import gated_delta_recurrent
from deltagram.testing.timing import captured_us, eager_us

H, HV, K, V, SLOTS = 16, 32, 128, 128, 512
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def calls(n: int, pool: torch.Tensor) -> tuple[list[Any], list[Any]]:
    """Steps of ours for `n` sequences, each in its own slots, and the peer's (none without it) on the same inputs."""
    q, k = (F.normalize(torch.randn(n, H, K, device="cuda"), dim=-1).bfloat16() for _ in range(2))
    v = torch.randn(n, HV, V, device="cuda").bfloat16()
    g, beta = -torch.rand(n, HV, device="cuda"), torch.rand(n, HV, device="cuda")
    kind, start, pending = (torch.zeros(n, dtype=torch.int32, device="cuda") for _ in range(3))
    stores = torch.ones_like(kind)
    cu_tokens = torch.arange(n + 1, dtype=torch.int32, device="cuda")
    out = torch.empty_like(v)

    def step(slot: torch.Tensor) -> None:
        gated_delta_recurrent(q, k, v, g, beta, pool, kind, cu_tokens, start, pending, stores, slot, out)

    firsts = [i * n % SLOTS for i in range(max(2, min(64, SLOTS // n)))]
    slots = [torch.arange(first, first + n, dtype=torch.int32, device="cuda") for first in firsts]
    ours = [partial(step, slot) for slot in slots]
    try:
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
    except ImportError:
        return ours, []
    inputs = [x[:, None] for x in (q, k, v, g)]
    options = {"beta": beta[:, None], "scale": 1.0, "output_final_state": True}
    states = [pool[first : first + n] for first in firsts]  # K = V, so the peer's layout reads as well
    return ours, [partial(fused_recurrent_gated_delta_rule, *inputs, initial_state=s, **options) for s in states]


def measure(state_dtype: torch.dtype = torch.float32, sizes: tuple[int, ...] = SIZES) -> list[Any]:
    torch.manual_seed(0)
    pool = torch.randn(SLOTS, HV, V, K, device="cuda").to(state_dtype)
    rows = []
    for n in sizes:
        ours, theirs = calls(n, pool)
        time = captured_us(ours)
        row = {"sequences": n, "us": time, "eager_host_us": eager_us(ours)[0]}
        row["tb_per_s"] = 2 * n * HV * V * K * pool.element_size() / time / 1e6
        if theirs and state_dtype is torch.float32:
            row["fla_us"] = captured_us(theirs)
            row["fla_tb_per_s"] = row["tb_per_s"] * time / row["fla_us"]
        rows.append(row)
    return rows


if __name__ == "__main__":
    for row in measure():
        print(row)
