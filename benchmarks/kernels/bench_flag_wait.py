"""flag_wait with the flag already up: what the node costs a step that does not have to wait.

python benchmarks/kernels/bench_flag_wait.py
"""

import sys
from functools import partial
from pathlib import Path

import torch
from torch.utils.benchmark import Timer

sys.path.append(str(Path(__file__).parents[1]))
from environment import save

from deltagram.kernels.flag_wait import flag_wait
from deltagram.testing.timing import captured_us


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    flag, failed = (torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda") for _ in range(2))
    call = partial(flag_wait, flag, torch.zeros(1, dtype=torch.int64, device=device), failed, 1000)
    if device.type == "cuda":
        taken = captured_us([call] * 16)
    else:
        taken = Timer("call()", globals={"call": call}).blocked_autorange(min_run_time=0.3).median * 1e6
    results = {"flag is up, us": round(taken, 2)}
    print(results)
    print(save(f"ngram_flag_wait_{device.type}", results))


if __name__ == "__main__":
    main()
