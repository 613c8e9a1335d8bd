"""lamport_gather: the parts of all ranks bit by bit but for -0.0, round after round; an error where one is missing."""

import time
from functools import partial

import pytest
import torch

from deltagram.kernels.lamport_gather import ROUND, SENTINEL, lamport_gather
from deltagram.parallel.peer_memory import virtual_ranks
from deltagram.testing.ngram import same_bits
from deltagram.testing.virtual import play

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
POLLS, CAPACITY, WIDTH = 5_000_000, 40 * 48, 48


class Ranks:
    def __init__(self, ranks: int, device: torch.device, dtype: torch.dtype, width: int = WIDTH) -> None:
        self.device, self.dtype, self.ranks, self.width = device, dtype, ranks, width
        self.memories = virtual_ranks(4 * 3 * ranks * CAPACITY, ranks, device)
        self.states = torch.zeros(ranks, 3, dtype=torch.int64, device=device)
        self.stalled = torch.zeros(ranks, 1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.start()
        part = torch.zeros(1, width, dtype=dtype, device=device)
        play([partial(self.gather, rank, part, 0) for rank in range(ranks)], device)  # compiled before anybody waits
        self.start()

    def start(self) -> None:
        self.states.zero_()
        self.stalled.zero_()
        for buffer in self.memories[0].buffers:
            buffer.view(torch.int32).fill_(SENTINEL)

    def gather(self, rank: int, part: torch.Tensor, polls: int = POLLS, programs: int = 4) -> torch.Tensor:
        out = part.new_full((len(part), self.ranks * self.width), torch.nan)
        buffers = self.memories[rank].addresses()
        given = part, buffers, self.states[rank], self.stalled[rank], out
        return lamport_gather(*given, rank, CAPACITY, polls, programs)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks, width", [(2, WIDTH), (4, 46), (8, WIDTH)])
def test_rounds_of_changing_sizes(device, dtype, ranks, width):
    group = Ranks(ranks, device, dtype, width)
    for turn in range(20):
        rows = (40, 1, 17, 3, 33)[turn % 5] if turn < 15 else turn % 3 + 1
        parts = [torch.randn(rows, width).to(dtype) for _ in range(ranks)]
        parts[turn % ranks].view(-1)[::3] = torch.nan
        given = [part.to(device) for part in parts]
        for found in play([partial(group.gather, rank, given[rank]) for rank in range(ranks)], device):
            assert same_bits(found.cpu(), torch.cat(parts, 1)), turn
    assert group.states[:, ROUND].tolist() == [20] * ranks and not group.stalled.any()


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_minus_zero_comes_as_zero_and_does_not_stall(device, dtype):
    """In every place of a word, beside every neighbour, the sentinel's halves among them."""
    group = Ranks(2, device, dtype)
    values = torch.tensor([-0.0, 0.0, 1.0, -1.0, 1e-40, -1e-40, torch.inf, -torch.inf], dtype=torch.float64)
    part = torch.cartesian_prod(values, values).flatten().to(dtype)
    part = torch.cat([part, part.new_tensor([-0.0] * 16)]).view(-1, WIDTH)
    for found in play([partial(group.gather, rank, part.to(device)) for rank in range(2)], device):
        assert same_bits(found.cpu(), torch.cat([torch.where(part == 0, 0.0, part).to(dtype)] * 2, 1))


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_a_rank_that_does_not_come_ends_the_wait(device):
    group = Ranks(2, device, torch.float32)
    part = torch.ones(40, WIDTH, device=device)
    began = time.perf_counter()
    play([partial(group.gather, 0, part, 20_000)], device)
    assert group.stalled.flatten().tolist() == [1, 0] and time.perf_counter() - began < 10
    began = time.perf_counter()
    play([partial(group.gather, 0, part)], device)
    assert time.perf_counter() - began < 0.5 * POLLS * 1e-6, "later rounds hardly wait"


@pytest.mark.gpu
@pytest.mark.parametrize("programs", [1, 3, 1000])
def test_replays(programs):
    """Graphs of two sizes, replayed in turn: each round re-arms what the one before it used, whatever its size."""
    device = torch.device("cuda")
    group = Ranks(4, device, torch.bfloat16)
    parts = {rows: torch.zeros(4, rows, WIDTH, dtype=torch.bfloat16, device=device) for rows in (40, 5)}
    graphs, outs = {}, {}
    for rows, part in parts.items():
        for rank in range(4):
            graphs[rows, rank] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[rows, rank]):
                outs[rows, rank] = group.gather(rank, part[rank], programs=programs)
    for turn in range(60):
        rows = 40 if turn % 3 else 5
        parts[rows].normal_()
        play([graphs[rows, rank].replay for rank in range(4)], device)
        want = torch.cat(list(parts[rows]), 1)
        assert all(same_bits(outs[rows, rank], want + 0.0) for rank in range(4)), turn
    assert not group.stalled.any()
