"""Peer memory and what goes through it, between processes: on CPUs here, on one card where there is one (`gpu`)."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deltagram.parallel.watchdog import EXIT_CODE

HERE = Path(__file__).parent
START = "import sys; from deltagram.parallel.launch import launch; sys.exit(launch(sys.argv[2:], int(sys.argv[1])))"


def run(ranks: int, *arguments: str, timeout: float = 250) -> subprocess.CompletedProcess:
    """peer_rank.py as `ranks` processes."""
    command = [sys.executable, "-c", START, str(ranks), str(HERE / "peer_rank.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_on_a_cpu(ranks):
    done = run(ranks, "cpu", "120")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("as one process") == ranks


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_processes_on_one_card(ranks):
    done = run(ranks, "cuda:0", "60")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("as one process") == ranks


@pytest.mark.gpu
def test_processes_on_a_card_each():
    cards = max((n for n in (2, 4, 8) if n <= torch.cuda.device_count()), default=0)
    if not cards:
        pytest.skip("needs two CUDA devices")
    done = run(cards, "cuda", "200")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("as one process") == cards


@pytest.mark.parametrize(
    "ranks, reason", [(2, "of peer memory asked for; this machine has"), (3, "peer memory between 3 ranks; expected 2")]
)
def test_more_than_the_machine_has_is_refused_by_every_rank_once(ranks, reason):
    done = run(ranks, "cpu", "refuse")
    assert done.returncode == 0, done.stderr[-4000:]
    assert all(f"rank {rank}: " in done.stdout for rank in range(ranks)) and done.stdout.count(reason) == ranks


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton (no GPU)")
def test_kernels_read_what_they_should():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE / "interpreted.py")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


def stopped(device: str, ranks: int, exchange: str) -> None:
    command = [sys.executable, "-c", START, str(ranks), str(HERE / "stopped_rank.py"), device, exchange]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == EXIT_CODE, (done.stdout, done.stderr[-3000:])
    began = float(re.search(r"stopped at (\S+)", done.stdout)[1])
    for rank in range(ranks - 1):
        missing = rf"rank {ranks - 1} is missing: its process \d+ is stopped(.*)"
        said = re.search(rf"rank {rank} at (\S+) failed: {missing}", done.stdout)
        assert said, (done.stdout, done.stderr[-3000:])
        assert float(said[1]) - began < 15, said[0]
        print(f"rank {rank} named rank {ranks - 1} after {float(said[1]) - began:.1f} s{said[2]}")


def test_a_rank_that_stops_within_a_peer_exchange_is_named_by_every_other():
    stopped("cpu", 2, "peer")


@pytest.mark.gpu
def test_the_watchdog_speaks_while_a_copy_waits_for_the_device():
    """A call into the driver from its thread would wait for the copy, and hold the interpreter's lock."""
    command = [sys.executable, "-c", START, "1", str(HERE / "waiting_rank.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == EXIT_CODE, (done.stdout, done.stderr[-3000:])
    assert float(re.search(r"after (\S+) s: a step took too long", done.stdout)[1]) < 3, done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("exchange", ["peer", "collective"])
def test_a_rank_that_stops_on_a_card_of_its_own_is_named_by_every_other(exchange):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    stopped("cuda", 2, exchange)
