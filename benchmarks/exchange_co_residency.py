"""Whether a Lamport gather on a side stream, beside a main stream that gathers too, goes on or stalls: with as many
blocks as it has work for, and with those that fit. See tests/parallel/co_residency.py, which this runs.

python benchmarks/exchange_co_residency.py            2, 4 and 8 ranks that one process plays on one card
python benchmarks/exchange_co_residency.py --cards N  N processes, a card each
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from environment import save

SCRIPT = Path(__file__).parents[1] / "tests" / "parallel" / "co_residency.py"
ROUNDS = 20_000


def played(ranks: int, *how: str) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), str(ranks), str(ROUNDS if "capped" in how else 64), *how]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", type=int, default=1)
    cards = parser.parse_args().cards
    if cards == 1:
        print(save("exchange_co_residency", [played(2, "uncapped"), *(played(ranks, "capped") for ranks in (2, 4, 8))]))
    else:
        print(save(f"exchange_co_residency_{cards}_cards", [played(cards, "capped", "processes")]))


if __name__ == "__main__":
    main()
