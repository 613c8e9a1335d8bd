"""peer_lookup beside row_lookup of as many rows: T tokens a rank, two layers, 24 columns of 264 bytes, random rows of
2 x 4 GiB (GPU) or 2 x 32 MiB (CPU). Virtual ranks on one device: one rank's lookup for all.

python benchmarks/kernels/bench_peer_lookup.py
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch.utils.benchmark import Timer

sys.path.append(str(Path(__file__).parents[1]))
from environment import save

from deltagram.kernels.peer_lookup import peer_lookup
from deltagram.kernels.row_lookup import row_lookup
from deltagram.parallel.peer_memory import virtual_ranks
from deltagram.testing.timing import captured_us

LAYERS, COLUMNS, ROW_BYTES = 2, 24, 264
TOKENS = (1, 6, 16, 48, 96, 384)


def microseconds(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    if device.type == "cuda":
        return captured_us(calls)
    return Timer("calls[0]()", globals={"calls": calls}).blocked_autorange(min_run_time=0.2).median * 1e6


def measure(device: torch.device, ranks: int) -> dict[str, dict[str, float]]:
    """Microseconds by tokens a rank, of the local lookup and of rank 0's for all."""
    rows = (1 << (32 if device.type == "cuda" else 25)) // ROW_BYTES
    tables = torch.randint(256, (LAYERS * rows, ROW_BYTES), dtype=torch.uint8, device=device)
    addresses = torch.tensor([tables[layer * rows :].data_ptr() for layer in range(LAYERS)], device=device)
    bounds = torch.tensor([[0, rows]] * LAYERS, device=device)
    found = {}
    for tokens in TOKENS:
        local, peer, held = [], [], []
        for _ in range(16):
            ids = torch.randint(LAYERS * rows, (LAYERS, tokens, COLUMNS), device=device)
            local.append(partial(row_lookup, tables, ids))
            at_rows = 4 * LAYERS * tokens * COLUMNS
            memories = virtual_ranks(at_rows + LAYERS * tokens * COLUMNS * ROW_BYTES, ranks, device)
            held.append(memories)
            for buffer in memories[0].buffers:
                buffer[:at_rows].view(torch.int32).random_(0, rows)
            given = addresses, bounds, memories[0].addresses(), memories[0].addresses(at_rows)
            peer.append(partial(peer_lookup, *given, 0, tokens, COLUMNS, ROW_BYTES))
        found[f"{tokens} tokens"] = {
            "local lookup": round(microseconds(local, device), 2),
            "peer lookup": round(microseconds(peer, device), 2),
        }
    return found


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = {f"{ranks} ranks, us": measure(device, ranks) for ranks in (2, 4, 8)}
    print(results)
    print(save(f"peer_lookup_{device.type}", results))


if __name__ == "__main__":
    main()
