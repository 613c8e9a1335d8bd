"""peer_lookup: the rows of a rank's columns for all who ask, zeros for ids that are not its own, and nothing else."""

import pytest
import torch

from deltagram.kernels.peer_lookup import peer_lookup
from deltagram.parallel.peer_memory import virtual_ranks

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
ROWS, LAYERS = 60, 2


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("row_bytes", [264, 6, 41])
@pytest.mark.parametrize("slot", [0, 1, 7, 90])
@pytest.mark.parametrize("same_tokens", [False, True])
def test_rows(device, ranks, row_bytes, slot, same_tokens):
    columns, rank = 16, ranks - 2
    width, askers = columns // ranks, 1 if same_tokens else ranks
    asked, size = torch.randint(-1, ROWS, (ranks, LAYERS, slot, columns), dtype=torch.int32), 0
    size = askers * LAYERS * slot * width * row_bytes
    at_rows = -(-asked[0].nbytes // 8) * 8
    memories = virtual_ranks(at_rows + size + 8, ranks, device)
    for buffer, ids in zip(memories[rank].buffers, asked, strict=True):
        buffer.fill_(7)
        buffer[: ids.nbytes] = ids.view(torch.uint8).flatten().to(device)
    whole = torch.randint(256, (LAYERS, ROWS, row_bytes), dtype=torch.uint8)
    bounds = [(10, 30), (25, 60)]
    slices = [whole[layer, a:b].contiguous().to(device) for layer, (a, b) in enumerate(bounds)]
    tables = torch.tensor([each.data_ptr() for each in slices], device=device)
    ids = memories[rank].addresses()
    asking = ids[rank : rank + 1] if same_tokens else ids
    peer_lookup(
        tables, torch.tensor(bounds, device=device), asking, memories[rank].addresses(at_rows), rank, slot, columns,
        row_bytes,
    )  # fmt: skip
    wanted = asked[rank : rank + 1] if same_tokens else asked
    wanted = wanted[..., rank * width : (rank + 1) * width].long()
    rows = torch.stack([whole[layer][wanted[:, layer].clamp(min=0)] for layer in range(LAYERS)], 1)
    for layer, (first, end) in enumerate(bounds):
        rows[:, layer][(wanted[:, layer] < first) | (wanted[:, layer] >= end)] = 0
    buffers = [buffer.cpu() for buffer in memories[rank].buffers]
    assert torch.equal(buffers[rank][at_rows:-8], rows.flatten()[:size]) and (buffers[rank][-8:] == 7).all()
    for peer, buffer in enumerate(buffers):
        assert torch.equal(buffer[: asked[peer].nbytes], asked[peer].view(torch.uint8).flatten())
        assert peer == rank or (buffer[at_rows:] == 7).all()


@pytest.mark.gpu
def test_byte_offsets_pass_two_to_the_31():
    device, row_bytes = torch.device("cuda"), 264
    rows = (1 << 31) // row_bytes + 100
    table = torch.empty(rows, row_bytes, dtype=torch.uint8, device=device)
    table[-90:] = torch.randint(256, (90, row_bytes), dtype=torch.uint8, device=device)
    memories = virtual_ranks(360 + 90 * row_bytes, 2, device)
    memories[0].buffers[0][:360] = torch.arange(rows - 90, rows, dtype=torch.int32).view(torch.uint8).to(device)
    bounds = torch.tensor([[0, rows]], device=device)
    ids, out = memories[0].addresses()[:1], memories[0].addresses(360)
    peer_lookup(torch.tensor([table.data_ptr()], device=device), bounds, ids, out, 0, 45, 2, row_bytes)
    found = memories[0].buffers[0][360:].view(-1, row_bytes)[:45]
    assert torch.equal(found, table[-90::2])
