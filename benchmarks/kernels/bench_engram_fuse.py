"""engram_fuse at DeepSeek-V4.1-Flash's sizes (4 streams of 5120, bf16), against the time its bytes take at 3.9 TB/s.

python benchmarks/kernels/bench_engram_fuse.py
"""

import sys
from functools import partial
from pathlib import Path

import torch
from torch.utils.benchmark import Timer

sys.path.append(str(Path(__file__).parents[1]))
from environment import save

from deltagram.kernels.engram_fuse import engram_fuse
from deltagram.testing.timing import captured_us

STREAMS, DIM, BANDWIDTH = 4, 5120, 3.9e12


def microseconds(num_tokens: int, device: torch.device) -> float:
    calls = []
    for _ in range(8 if num_tokens < 4096 else 3):
        x = torch.randn(num_tokens, STREAMS, DIM, device=device).bfloat16()
        kv = torch.randn(num_tokens, (STREAMS + 1) * DIM, device=device).bfloat16()
        key, value = kv[:, : STREAMS * DIM].unflatten(1, (STREAMS, DIM)), kv[:, STREAMS * DIM :]
        weight = torch.randn(STREAMS, DIM, device=device)
        calls.append(partial(engram_fuse, x, key, value, weight, 1e-6))
    if device.type == "cuda":
        return captured_us(calls)
    return Timer("calls[0]()", globals={"calls": calls}).blocked_autorange(min_run_time=0.3).median * 1e6


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = {}
    for num_tokens in (1, 16, 256, 1024, 4096) if device.type == "cuda" else (1, 16):
        floor = num_tokens * DIM * 2 * (3 * STREAMS + 1) / BANDWIDTH * 1e6
        taken = microseconds(num_tokens, device)
        results[f"{num_tokens} tokens"] = {"us": round(taken, 2), "us at 3.9 TB/s": round(floor, 2)}
    print(results)
    print(save(f"ngram_engram_fuse_{device.type}", results))


if __name__ == "__main__":
    main()
