"""peer_barrier: nobody passes before all have come, one rank may be a barrier ahead, and who does not come is named."""

import time
from functools import partial

import pytest
import torch

from deltagram.kernels.peer_barrier import peer_barrier
from deltagram.parallel.peer_memory import virtual_ranks
from deltagram.testing.virtual import play

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
POLLS = 5_000_000


class Ranks:
    def __init__(self, ranks: int, device: torch.device) -> None:
        self.device, self.memories = device, virtual_ranks(256, ranks, device)
        self.epochs = torch.zeros(ranks, 1, dtype=torch.int64, device=device)
        self.stalled = torch.zeros(ranks, 1, dtype=torch.int64, pin_memory=device.type == "cuda")
        play([partial(self.barrier, rank, 0) for rank in range(ranks)], device)  # compiled before anybody waits
        self.start()

    def start(self) -> None:
        for tensor in (self.epochs, self.stalled, *self.memories[0].buffers):
            tensor.zero_()

    def barrier(self, rank: int, polls: int = POLLS) -> None:
        peer_barrier(self.memories[rank].addresses(), self.epochs[rank], self.stalled[rank], rank, polls)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_what_was_written_before_is_read_after(device, ranks):
    """Each rank writes its turn, passes, and sums up all; were one early or late, a sum would be off."""
    group, turns = Ranks(ranks, device), 40
    board = torch.zeros(ranks, dtype=torch.int64, device=device)

    def run(rank: int, polls: int = POLLS) -> torch.Tensor:
        sums = []
        for turn in range(turns):
            board[rank].fill_(turn)  # assigning a number would wait for the stream
            if device.type == "cpu" and turn % 7 == rank % 7:
                time.sleep(0.002)
            group.barrier(rank, polls)
            sums.append(board.sum())
            group.barrier(rank, polls)
        return torch.stack(sums)

    if device.type == "cuda":
        play([partial(run, rank, 0) for rank in range(ranks)], device)
        group.start()
    for found in play([partial(run, rank) for rank in range(ranks)], device):
        assert found.tolist() == [turn * ranks for turn in range(turns)]
    assert group.epochs.flatten().tolist() == [2 * turns] * ranks and not group.stalled.any()


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_a_rank_that_does_not_come_is_named_and_later_barriers_hardly_wait(device):
    group = Ranks(4, device)
    began = time.perf_counter()
    play([partial(group.barrier, rank, 1_000_000) for rank in (0, 1, 3)], device)
    assert group.stalled.flatten().tolist() == [4, 4, 0, 4] and time.perf_counter() - began < 10
    began = time.perf_counter()
    for _ in range(3):
        group.barrier(0)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert time.perf_counter() - began < 0.5 * POLLS * 1e-6


@pytest.mark.gpu
def test_replays_count_on():
    """One barrier of each rank in a graph: what a replay waits for is its own turn, not the captured one."""
    device = torch.device("cuda")
    group, graphs = Ranks(2, device), []
    for rank in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[rank]):
            group.barrier(rank)
    for turn in range(5):
        play([graph.replay for graph in graphs], device)
        assert group.epochs.flatten().tolist() == [turn + 1] * 2 and not group.stalled.any()
