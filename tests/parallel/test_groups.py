"""Joining a group, deciding for it, and what is refused: by every rank, in the same words."""

import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from deltagram.parallel import groups
from deltagram.parallel import launch as launch_module
from deltagram.parallel.groups import Communicator, DisagreementError, Group, Place, device_of, number_of
from deltagram.parallel.launch import environment, free_port
from deltagram.parallel.shared_memory import shared_memory
from deltagram.parallel.watchdog import process_state
from deltagram.step.plan import Bucket, Entry, Kind, StepPlan
from deltagram.testing.ranks import Ranks


def plan(start: int) -> StepPlan:
    return StepPlan(7, Bucket(4, 2, False), (Entry(1, 3, 1, Kind.DECODE, 1, start),))


def same(group: Group, mine: StepPlan) -> None:
    digests = group.gather_numbers([number_of(mine.digest())])
    group.check_same([digest for (digest,) in digests], "plan")


def decide(group: Group) -> tuple[object, list[list[int]], list[str]]:
    """What rank 0 decided; numbers of all; and what is said of plans that differ."""
    decided = group.broadcast_decision({"crossover": 100 * group.rank + 5})
    numbers = group.gather_numbers([group.rank, 2**62 + group.rank])
    same(group, plan(9))
    said = []
    try:
        same(group, plan(9 + (group.rank == 1)))
    except DisagreementError as error:
        said.append(str(error))
    group.barrier()
    return decided, numbers, said


def communicate(group: Group) -> list[list[int]]:
    """What two communicators brought, one after the other and interleaved."""
    first, second = group.communicator("chain"), group.communicator("layers")
    assert first.process_group is not second.process_group and first.index != second.index
    found = []
    for turn, communicator in enumerate((first, second, second, first)):
        part = torch.tensor([10 * turn + group.rank])
        whole = part.new_empty(group.size, 1)
        communicator.all_gather(whole, part)
        parts = 100 * group.rank + torch.arange(group.size)[:, None]
        swapped = torch.empty_like(parts)
        communicator.all_to_all(swapped, parts)
        found.append(whole.flatten().tolist() + swapped.flatten().tolist())
    return found


def share(group: Group) -> tuple[list[int], str]:
    """Bytes that each rank wrote into shared memory; and what is said to too much of it."""
    memory = shared_memory(group, 4096, "a test")
    memory[group.rank] = group.rank + 1
    group.barrier()
    try:
        shared_memory(group, 1 << 50, "a buffer")
    except ValueError as error:
        return list(memory[: group.size + 1]), str(error)
    return [], ""


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_decide_communicate_and_share(size):
    with Ranks(size) as ranks:
        said = ["rank 1 has another plan than rank 0; nothing of it was run"]
        numbers = [[rank, 2**62 + rank] for rank in range(size)]
        assert ranks.run(decide) == [({"crossover": 5}, numbers, said)] * size
        gathered = [[10 * turn + rank for rank in range(size)] for turn in range(4)]
        assert ranks.run(communicate) == [
            [row + [100 * other + rank for other in range(size)] for row in gathered] for rank in range(size)
        ]
        for written, refusal in ranks.run(share):
            assert written == [*range(1, size + 1), 0]
            assert refusal.startswith(f"a buffer needs {1 << 50} bytes of shared memory, more than /dev/shm has")


def test_digests_are_numbers_of_64_bits():
    assert number_of("00" * 7 + "05") == 5 and number_of("ff" * 8) == -1
    assert -(2**63) <= number_of(plan(9).digest()) < 2**63
    assert plan(9).digest() != plan(10).digest()


def test_more_than_the_machine_has_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_of("cuda", Place(1, 2)) == torch.device("cuda", 1)
    assert device_of("cuda:1", Place(0, 8)) == torch.device("cuda", 1), "eight ranks on one card"
    assert device_of("cpu", Place(3, 64)) == torch.device("cpu")
    with pytest.raises(ValueError, match="3 ranks asked for, this machine has 2 CUDA devices"):
        device_of("cuda", Place(0, 3))
    with pytest.raises(ValueError, match="'cuda:2' asked for, this machine has 2 CUDA devices"):
        device_of("cuda:2", Place(0, 1))
    with pytest.raises(ValueError, match="device is 'meta'; expected cpu, cuda or cuda:N"):
        device_of("meta", Place(0, 1))


def test_the_environment_says_who_a_process_is(monkeypatch):
    for name in environment(0, 1, 1):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="the environment lacks RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR"):
        Place.from_environment()
    for name, value in environment(1, 4, 29500).items():
        monkeypatch.setenv(name, value)
    assert Place.from_environment() == Place(1, 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="4 ranks of which 2 are on this machine; expected all of them on one"):
        Place.from_environment()


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
def test_ranks_that_do_not_come_are_counted_by_those_that_do(monkeypatch, ranks):
    """Of three; where rank 0, who counts, is missing, the others know of themselves alone."""
    monkeypatch.setattr(groups, "_START", 1.0)
    for name, value in environment(0, 3, free_port()).items():
        monkeypatch.setenv(name, value)
    said = []

    def meet(rank: int) -> None:
        with pytest.raises(ValueError) as refused:
            groups._meet(Place(rank, 3))
        said.append(str(refused.value))

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(said) == len(ranks)
    wanted = rf"{len(ranks)} of 3 ranks came in \d\.\d s; expected all of them within 1 s"
    assert all(re.match(wanted, each) for each in said), said


def test_a_communicator_belongs_to_one_stream(monkeypatch):
    """A side stream's collective never shares one with the main stream."""
    watchdog = SimpleNamespace(abort_with=lambda abort: None, collective=lambda index, name: nullcontext())
    group, process_group = SimpleNamespace(rank=0, size=1, watchdog=watchdog), SimpleNamespace(abort=None)
    communicator = Communicator("chain", 1, process_group, group, on_device=True)  # type: ignore[arg-type]
    streams = iter(["main", "main", "side"])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: next(streams))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(2):
        with communicator.entered("all-gather", torch.device("cuda")):
            pass
    with (
        pytest.raises(AssertionError, match="chain belongs to another stream"),
        communicator.entered("all-gather", torch.device("cuda")),
    ):
        pass


FAILS = "import os, sys, time; time.sleep(60) if os.environ['RANK'] != sys.argv[1] else sys.exit(3)"
SLEEPS = "import os, time; os.write(1, b'%d\\n' % os.getpid()); time.sleep(60)"


@pytest.mark.parametrize("rank", [0, 1])
def test_whichever_rank_fails_the_others_are_ended(monkeypatch, rank):
    monkeypatch.setattr(launch_module, "GRACE", 0.5)
    began = time.monotonic()
    assert launch_module.launch(["-c", FAILS, str(rank)], 2) == 3
    assert time.monotonic() - began < 30


def test_ranks_end_with_who_launched_them():
    launching = f"import sys; from deltagram.parallel.launch import launch; sys.exit(launch(['-c', {SLEEPS!r}], 2))"
    with subprocess.Popen([sys.executable, "-c", launching], stdout=subprocess.PIPE, text=True) as launcher:
        ranks = [int(launcher.stdout.readline()) for _ in range(2)]
        launcher.terminate()
        assert launcher.wait(30) == 128 + signal.SIGTERM
    assert all(process_state(rank) == "gone" for rank in ranks)
