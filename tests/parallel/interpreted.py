"""Run in a process of its own by test_peer_interpreted.py: the peer kernels under Triton's interpreter, on the CPU.

It checks masks and indices. One rank runs at a time, so that what peers would have written is there before.
"""

import torch

from deltagram.kernels.lamport_gather import SENTINEL, lamport_gather
from deltagram.kernels.peer_barrier import peer_barrier
from deltagram.kernels.peer_lookup import peer_lookup
from deltagram.kernels.peer_publish import peer_publish
from deltagram.kernels.peer_unpack import peer_unpack
from deltagram.parallel.peer_memory import virtual_ranks
from deltagram.testing.interpreter import take_one_element_as_index

take_one_element_as_index()
CPU = torch.device("cpu")
ROWS, LAYERS, COLUMNS, SLOT = 60, 2, 8, 5


def check_barrier(ranks: int, rank: int, late: list[int]) -> None:
    found = []
    for impl in ("reference", "triton"):
        memories = virtual_ranks(256, ranks, CPU)
        memories[0].buffers[rank].view(torch.int64)[:ranks] = torch.tensor([3 + (r not in late) for r in range(ranks)])
        epoch, stalled = torch.tensor([3]), torch.tensor([0])
        peer_barrier(memories[rank].addresses(), epoch, stalled, rank, 3, impl=impl)
        found.append((epoch.item(), stalled.item(), torch.stack(memories[0].buffers)))
    assert found[0][:2] == found[1][:2] == (4, sum(1 << r for r in late)) and torch.equal(found[0][2], found[1][2])


def check_exchange(ranks: int, row_bytes: int) -> None:
    hashes = torch.randint(-1, ROWS, (ranks, LAYERS, SLOT - 2, COLUMNS))
    table = torch.randint(256, (LAYERS, ROWS, row_bytes), dtype=torch.uint8)
    at_rows = 4 * LAYERS * SLOT * COLUMNS
    bounds = torch.tensor([[0, 40], [20, 60]])
    slices = [table[layer, a:b].contiguous() for layer, (a, b) in enumerate(bounds.tolist())]
    tables = torch.tensor([each.data_ptr() for each in slices])
    found = []
    for impl in ("reference", "triton"):
        memories = virtual_ranks(at_rows + ranks * LAYERS * SLOT * COLUMNS // ranks * row_bytes, ranks, CPU)
        for rank, memory in enumerate(memories):
            peer_publish(hashes[rank], memory.addresses(), rank, SLOT, impl=impl)
        for rank, memory in enumerate(memories):
            places = memory.addresses(), memory.addresses(at_rows)
            peer_lookup(tables, bounds, *places, rank, SLOT, COLUMNS, row_bytes, impl=impl)
        out = torch.full((ranks, LAYERS, SLOT - 2, COLUMNS, row_bytes), 7, dtype=torch.uint8)
        for rank, memory in enumerate(memories):
            peer_unpack(memory.addresses(at_rows), out[rank], rank, SLOT, impl=impl)
        found.append((out, torch.stack(memories[0].buffers)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def check_gather(ranks: int, dtype: torch.dtype, sizes: tuple[int, ...], programs: int) -> None:
    """A rank's peers have written ahead of it, as they may by one round."""
    width, capacity, rank = 6, 2048, ranks - 1
    memories = virtual_ranks(4 * 3 * ranks * capacity, ranks, CPU)
    buffers = [buffer.view(torch.int32).view(3, ranks, capacity) for buffer in memories[0].buffers]
    for buffer in buffers:
        buffer.fill_(SENTINEL)
    state, stalled = torch.zeros(3, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for turn, rows in enumerate(sizes):
        parts = torch.randn(ranks, rows, width).to(dtype)
        parts[:, :, ::2] = -0.0
        for peer in range(ranks - 1):
            words = torch.where(parts[peer] == 0, 0.0, parts[peer]).to(dtype).view(torch.int32).flatten()
            buffers[rank][turn % 3, peer, : len(words)] = words
        out = torch.full((rows, ranks * width), torch.nan, dtype=dtype)
        given = parts[rank], memories[rank].addresses(), state, stalled, out
        lamport_gather(*given, rank, capacity, 3, programs, impl="triton")
        assert torch.equal(out, torch.cat(list(parts), 1)) and not torch.signbit(out[out == 0]).any()
        assert (buffers[rank][(turn + 2) % 3] == SENTINEL).all() and (buffers[rank][(turn + 1) % 3] == SENTINEL).all()
        words = out.view(torch.int32)[:, rank * width * dtype.itemsize // 4 :].flatten()
        assert all(torch.equal(buffer[turn % 3, rank, : len(words)], words) for buffer in buffers)
        assert state.tolist() == [turn + 1, len(words), 0] and not stalled
    buffers[rank][:, 0] = SENTINEL
    lamport_gather(*given, rank, capacity, 3, programs, impl="triton")
    assert stalled == 1


torch.manual_seed(0)
for size in (2, 8):
    check_barrier(size, size - 1, [])
    check_barrier(size, 0, [size - 1])
    check_exchange(size, 264)
    check_exchange(size, 6)
check_gather(2, torch.float32, (3, 100, 1, 341), 2)
check_gather(4, torch.bfloat16, (90, 3, 3), 100)
