"""peer_publish: the ids of T tokens, two layers of 24 columns.

python benchmarks/kernels/bench_peer_publish.py
"""

import sys
from functools import partial
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))
from environment import save
from kernels.bench_peer_lookup import COLUMNS, LAYERS, TOKENS, microseconds

from deltagram.kernels.peer_publish import peer_publish
from deltagram.parallel.peer_memory import virtual_ranks


def measure(device: torch.device) -> dict[str, float]:
    """Microseconds by tokens."""
    found = {}
    for tokens in TOKENS:
        memories = virtual_ranks(4 * LAYERS * tokens * COLUMNS, 2, device)
        hashes = torch.randint(1 << 30, (LAYERS, tokens, COLUMNS), device=device)
        found[f"{tokens} tokens"] = round(
            microseconds([partial(peer_publish, hashes, memories[0].addresses(), 0, tokens)] * 16, device), 2
        )
    return found


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = {"us": measure(device)}
    print(results)
    print(save(f"peer_publish_{device.type}", results))


if __name__ == "__main__":
    main()
