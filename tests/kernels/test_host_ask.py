"""host_ask: when the host sees the question, the ids are there."""

import threading

import pytest
import torch

from deltagram.kernels._layouts import BITS, PIECE
from deltagram.kernels.host_ask import host_ask

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
CAPACITY = 1600 * PIECE


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_the_ids_of_each_lookup(device):
    """A thread that looks at the question alone finds the ids of that lookup, up to whole pieces."""
    pinned = device == "cuda"
    host_ids = torch.full((CAPACITY,), 1 << 60, dtype=torch.int64, pin_memory=pinned)
    asked = torch.zeros(1, dtype=torch.int64, pin_memory=pinned)
    counters = torch.zeros(2, dtype=torch.int64, device=device)
    for lookup, count in enumerate((1, PIECE, PIECE + 1, 70 * PIECE - 5, 3, CAPACITY, 98304), 1):
        ids, found = torch.randint(-1, 1 << 40, (count,)), []

        def watch(lookup: int = lookup, found: list = found) -> None:
            words, ids_there = asked.numpy(), host_ids.numpy()
            while words[0] >> BITS < lookup:
                pass
            found.append((int(words[0]) & ((1 << BITS) - 1), ids_there.copy()))

        thread = threading.Thread(target=watch)
        on_device = ids.to(device)
        thread.start()
        host_ask(on_device, host_ids, asked, counters)
        thread.join()
        pieces, there = found[0]
        assert pieces == -(-count // PIECE)
        assert torch.equal(torch.from_numpy(there[:count]), ids) and (there[count : pieces * PIECE] == -1).all()
        assert counters.tolist() == [lookup, 0]


def test_too_many_rows_are_refused():
    words = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="a lookup of 65 rows through the host; expected at most 64"):
        host_ask(torch.zeros(65, dtype=torch.int64), torch.zeros(64, dtype=torch.int64), words[:1], words)
