"""lamport_gather between 2, 4 and 8 ranks that one process plays: bf16 parts of T rows that make rows of 25600, by the
blocks that each rank may have. On a card in captured graphs on a stream each, on a CPU in threads.

python benchmarks/kernels/bench_lamport_gather.py
"""

import sys
import time
from functools import partial
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))
from environment import save

from deltagram.parallel.lamport import LamportAllGather
from deltagram.parallel.peer_memory import virtual_ranks
from deltagram.testing.virtual import lockstep_us, play

WIDTH = 25600
ROWS = (1, 6, 16, 48, 96, 192)


def measure(device: torch.device, ranks: int, blocks: int) -> dict[str, float]:
    """Microseconds by rows."""
    width, dtype, found = WIDTH // ranks, torch.bfloat16, {}
    memories = virtual_ranks(LamportAllGather.nbytes(ranks, ROWS[-1], width, dtype), ranks, device)
    gathers = [LamportAllGather(memory, ROWS[-1], width, dtype, blocks, 0) for memory in memories]
    parts = torch.randn(ranks, ROWS[-1], width, device=device).to(dtype)
    outs = torch.empty(ranks, ROWS[-1], WIDTH, dtype=dtype, device=device)

    def gather(rank: int, rows: int, count: int) -> None:
        for _ in range(count):
            gathers[rank].gather(parts[rank, :rows], outs[rank, :rows])

    play([partial(gather, rank, 1, 1) for rank in range(ranks)], device)
    for each in gathers:
        each.release()
    for each in gathers:
        each.take_back()
        each.polls = 1_000_000 if device.type == "cuda" else 20_000_000
    for rows in ROWS:
        if device.type == "cuda":
            taken = lockstep_us([partial(gather, rank, rows, 1) for rank in range(ranks)], device)
        else:
            began = time.perf_counter()
            play([partial(gather, rank, rows, 20) for rank in range(ranks)], device)
            taken = (time.perf_counter() - began) * 1e6 / 20
        found[f"{rows} rows"] = round(taken, 2)
    for each in gathers:
        each.check()
    return found


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tried = ((2, (8, 32, 64, 128)), (4, (8, 32, 64)), (8, (4, 16, 32))) if device.type == "cuda" else ((2, (1,)),)
    results = {
        f"{ranks} ranks, {blocks} blocks each, us": measure(device, ranks, blocks)
        for ranks, counts in tried
        for blocks in counts
    }
    print(results)
    print(save(f"lamport_gather_{device.type}", results))


if __name__ == "__main__":
    main()
