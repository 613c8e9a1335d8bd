"""peer_barrier between 2, 4 and 8 ranks that one process plays: on a card in captured graphs on a stream each, on a CPU
in threads.

python benchmarks/kernels/bench_peer_barrier.py
"""

import sys
import time
from functools import partial
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))
from environment import save

from deltagram.kernels.peer_barrier import peer_barrier
from deltagram.parallel.peer_memory import virtual_ranks
from deltagram.testing.virtual import lockstep_us, play


def measure(device: torch.device, ranks: int) -> float:
    """Microseconds of one."""
    memories = virtual_ranks(256, ranks, device)
    epochs = torch.zeros(ranks, 1, dtype=torch.int64, device=device)
    stalled = torch.zeros(ranks, 1, dtype=torch.int64, pin_memory=device.type == "cuda")

    def barriers(rank: int, polls: int, count: int) -> None:
        for _ in range(count):
            peer_barrier(memories[rank].addresses(), epochs[rank], stalled[rank], rank, polls)

    play([partial(barriers, rank, 0, 1) for rank in range(ranks)], device)
    for tensor in (epochs, stalled, *memories[0].buffers):
        tensor.zero_()
    if device.type == "cuda":
        found = lockstep_us([partial(barriers, rank, 1_000_000, 1) for rank in range(ranks)], device)
    else:
        began = time.perf_counter()
        play([partial(barriers, rank, 10_000_000, 200) for rank in range(ranks)], device)
        found = (time.perf_counter() - began) * 1e6 / 200
    assert not stalled.any()
    return round(found, 2)


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = {f"{ranks} ranks, us": measure(device, ranks) for ranks in (2, 4, 8)}
    print(results)
    print(save(f"peer_barrier_{device.type}", results))


if __name__ == "__main__":
    main()
