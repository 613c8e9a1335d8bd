"""peer_publish: the ids as they are, -1 behind them, and nothing in anybody else's memory."""

import pytest
import torch

from deltagram.kernels.peer_publish import peer_publish
from deltagram.parallel.peer_memory import virtual_ranks

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("tokens, slot", [(0, 3), (1, 1), (5, 8), (33, 40)])
def test_ids_and_padding(device, tokens, slot):
    layers, columns = 2, 12
    size = 4 * layers * slot * columns
    memories = virtual_ranks(size + 4, 2, device)
    for buffer in memories[0].buffers:
        buffer.fill_(7)
    hashes = torch.randint(-1, 2**31 - 1, (layers, tokens, columns))
    peer_publish(hashes.to(device), memories[1].addresses(), 1, slot)
    first, second = (buffer.cpu() for buffer in memories[1].buffers)
    assert (first == 7).all() and (second[size:] == 7).all()
    ids = second[:size].view(torch.int32).view(layers, slot, columns)
    assert torch.equal(ids[:, :tokens].long(), hashes) and (ids[:, tokens:] == -1).all()
