"""cache_probe: 24 rows of 264 bytes a token, half of them in a set of 262144 rows.

python benchmarks/kernels/bench_cache_probe.py
"""

import sys
from functools import partial
from pathlib import Path

import torch
from torch.utils.benchmark import Timer

sys.path.append(str(Path(__file__).parents[1]))
from environment import save

from deltagram.kernels._layouts import HELD, new_slots, new_state
from deltagram.kernels.cache_probe import cache_probe
from deltagram.testing.timing import captured_us

SLOTS = 1 << 18


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    slots, state = new_slots(SLOTS, device), new_state(device)
    slots[:, HELD] = torch.arange(SLOTS, device=device)
    results = {}
    for tokens in (1, 6, 48, 384, 4096):
        ids = [torch.randint(2 * SLOTS, (tokens * 24,), device=device) for _ in range(8)]
        calls = [partial(cache_probe, each, slots, state) for each in ids]
        if device.type == "cuda":
            taken = captured_us(calls)
        else:
            taken = Timer("calls[0]()", globals={"calls": calls}).blocked_autorange(min_run_time=0.3).median * 1e6
        results[f"{tokens} tokens, us"] = round(taken, 2)
    print(results)
    print(save(f"ngram_cache_probe_{device.type}", results))


if __name__ == "__main__":
    main()
