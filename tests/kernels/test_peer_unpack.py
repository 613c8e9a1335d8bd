"""peer_unpack: a rank's own rows, from each owner's memory to their columns."""

import pytest
import torch

from deltagram.kernels.peer_unpack import peer_unpack
from deltagram.parallel.peer_memory import virtual_ranks

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("ranks, asker", [(2, 1), (8, 3), (8, 0)])
@pytest.mark.parametrize("row_bytes", [264, 6, 41])
@pytest.mark.parametrize("tokens, slot", [(0, 2), (1, 1), (5, 9), (90, 90)])
def test_rows(device, ranks, asker, row_bytes, tokens, slot):
    layers, columns = 2, 16
    held = torch.randint(256, (ranks, ranks, layers, slot, columns // ranks, row_bytes), dtype=torch.uint8)
    memories = virtual_ranks(held[0].nbytes, ranks, device)
    for buffer, rows in zip(memories[0].buffers, held, strict=True):
        buffer.copy_(rows.flatten())
    out = torch.full((layers, tokens, columns, row_bytes), 7, dtype=torch.uint8, device=device)
    assert peer_unpack(memories[0].addresses(), out, asker, slot) is out
    want = held[:, asker, :, :tokens].permute(1, 2, 0, 3, 4).reshape(out.shape)
    assert torch.equal(out.cpu(), want)
