"""row_lookup against indexing, byte by byte; absent rows, kept rows, and bytes past 2^31."""

import pytest
import torch

from deltagram.kernels.row_lookup import row_lookup

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("row_bytes", [264, 320, 41, 6, 1])
@pytest.mark.parametrize("ids_type", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [0, 1, 3, 500])
def test_rows(device, row_bytes, ids_type, count):
    table = torch.randint(256, (70, row_bytes), dtype=torch.uint8)
    ids = torch.randint(-1, 70, (count, 4), dtype=ids_type)
    held = torch.randint(256, (count, 4, row_bytes), dtype=torch.uint8)
    absent = (ids < 0)[..., None]
    found = table[ids.clamp(min=0).long()]
    on = table.to(device), ids.to(device)
    assert torch.equal(row_lookup(*on).cpu(), found.masked_fill(absent, 0))
    out = held.to(device)
    assert row_lookup(*on, out) is out and torch.equal(out.cpu(), found.masked_fill(absent, 0))
    kept = row_lookup(*on, held.to(device), keep=True)
    assert torch.equal(kept.cpu(), torch.where(absent, held, found))


def test_keep_needs_something_to_keep():
    with pytest.raises(ValueError, match="expected an `out`"):
        row_lookup(torch.zeros(2, 4, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64), keep=True)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_byte_offsets_pass_two_to_the_31(device):
    """The remedy for int32 offsets: row 8388608 of 264 bytes is the first past 2^31. Unwritten pages take no memory."""
    from deltagram.ngram.memory import HostMemory

    rows = (1 << 31) // 264 + 100
    memory = HostMemory(rows * 264, torch.device("cpu"))
    table = memory.bytes.view(rows, 264)
    last = torch.arange(rows - 90, rows)
    table[-90:] = torch.randint(256, (90, 264), dtype=torch.uint8)
    want = table[-90:].clone()
    placed = table.to(device)
    assert torch.equal(row_lookup(placed, last.to(device)).cpu(), want)
    assert torch.equal(row_lookup(placed, last.int().to(device)).cpu(), want)
