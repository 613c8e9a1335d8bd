"""On a card: a gather that asks for more blocks than fit stalls (and says so, as every wait is bounded), one within the
budget goes on for 20,000 rounds beside a main stream that spins too."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "co_residency.py"


def play(ranks: int, rounds: int, *how: str) -> dict:
    command = [sys.executable, str(SCRIPT), str(ranks), str(rounds), *how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_within_the_budget_it_goes_on(ranks):
    found = play(ranks, 20_000, "capped")
    assert found["fits"] and not found["stalled"] and found["rounds"] >= 20_000 and found["wrong"] == 0, found


@pytest.mark.gpu
def test_without_a_cap_it_stalls():
    found = play(2, 64, "uncapped")
    assert not found["fits"] and found["stalled"], found


@pytest.mark.gpu
def test_on_a_card_each():
    cards = max((n for n in (2, 4, 8) if n <= torch.cuda.device_count()), default=0)
    if not cards:
        pytest.skip("needs two CUDA devices")
    found = play(cards, 20_000, "capped", "processes")
    assert found["fits"] and not found["stalled"] and found["rounds"] >= 20_000 and found["wrong"] == 0, found
