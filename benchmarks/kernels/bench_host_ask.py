"""host_ask: what a step pays to tell the host its ids, 24 rows a token.

python benchmarks/kernels/bench_host_ask.py
"""

import sys
from functools import partial
from pathlib import Path

import torch
from torch.utils.benchmark import Timer

sys.path.append(str(Path(__file__).parents[1]))
from environment import save

from deltagram.kernels.host_ask import host_ask
from deltagram.testing.timing import captured_us


def main() -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    host_ids = torch.zeros(4096 * 24, dtype=torch.int64, pin_memory=cuda)
    asked = torch.zeros(1, dtype=torch.int64, pin_memory=cuda)
    counters = torch.zeros(2, dtype=torch.int64, device=device)
    results = {}
    for tokens in (1, 48, 384, 4096):
        call = partial(host_ask, torch.arange(tokens * 24, device=device), host_ids, asked, counters)
        if cuda:
            taken = captured_us([call] * 8)
        else:
            taken = Timer("call()", globals={"call": call}).blocked_autorange(min_run_time=0.3).median * 1e6
        results[f"{tokens} tokens, us"] = round(taken, 2)
    print(results)
    print(save(f"ngram_host_ask_{device.type}", results))


if __name__ == "__main__":
    main()
