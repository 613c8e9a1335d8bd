"""peer_unpack: T tokens of two layers, 24 columns of 264 bytes, out of the memory of 2, 4 and 8 virtual ranks on one
device.

python benchmarks/kernels/bench_peer_unpack.py
"""

import sys
from functools import partial
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))
from environment import save
from kernels.bench_peer_lookup import COLUMNS, LAYERS, ROW_BYTES, TOKENS, microseconds

from deltagram.kernels.peer_unpack import peer_unpack
from deltagram.parallel.peer_memory import virtual_ranks


def measure(device: torch.device, ranks: int) -> dict[str, float]:
    """Microseconds by tokens."""
    found = {}
    for tokens in TOKENS:
        calls, held = [], []
        for _ in range(16):
            memories = virtual_ranks(LAYERS * tokens * COLUMNS * ROW_BYTES, ranks, device)
            held.append(memories)
            out = torch.empty(LAYERS, tokens, COLUMNS, ROW_BYTES, dtype=torch.uint8, device=device)
            calls.append(partial(peer_unpack, memories[0].addresses(), out, 1, tokens))
        found[f"{tokens} tokens"] = round(microseconds(calls, device), 2)
    return found


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = {f"{ranks} ranks, us": measure(device, ranks) for ranks in (2, 4, 8)}
    print(results)
    print(save(f"peer_unpack_{device.type}", results))


if __name__ == "__main__":
    main()
