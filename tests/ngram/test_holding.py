"""What a rank loads of tables that ranks hold together: its own rows, and no more."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deltagram.models import weights
from deltagram.models.config import read_config
from deltagram.models.load import load_model
from deltagram.ngram import checksums
from deltagram.ngram.disk import DiskStore
from deltagram.ngram.placement import table_of
from deltagram.parallel.groups import Group
from deltagram.testing.checkpoints import write_tiny_checkpoint
from deltagram.testing.ranks import Ranks

CPU = torch.device("cpu")


class Alone:
    """One rank of several, as far as loading asks a group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def check(self, problem: str | None) -> None:
        if problem:
            raise ValueError(problem)


def load(folder: Path, placement: str, group=None, way: str = "auto"):
    model, _ = load_model(
        folder, read_config(folder), 64, CPU, torch.float32, ngram_placement=placement, group=group, ngram_split=way
    )
    return model


@pytest.fixture
def reads(monkeypatch):
    """Bytes read of memory tables, and of all else, since the test began."""
    counts = {"tables": 0, "others": 0}
    read = weights._read

    def counting(file, info, offset, into):
        counts["tables" if ".ngram_embedding." in info.name else "others"] += into.nbytes
        read(file, info, offset, into)

    monkeypatch.setattr(weights, "_read", counting)
    return counts


@pytest.mark.parametrize("parts", [1, 4, 100])
@pytest.mark.parametrize("way", ["auto", "rows"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_reads_its_own_rows_alone(tmp_path, reads, parts, way, ranks):
    """Tables in one tensor, in a few and in many; of rows in places that no tensor begins or ends at."""
    write_tiny_checkpoint(tmp_path, split_ngram_parts=parts)
    whole = load(tmp_path, "device")
    tables = [table_of(store).table for store in whole.stores]
    row = whole.stores[0].format.row_bytes
    others, total = reads["others"], 0
    assert reads["tables"] == sum(len(table) for table in tables) * row
    for rank in range(ranks):
        reads.update(tables=0, others=0)
        part = load(tmp_path, "host", Alone(rank, ranks), way)
        held = [part.holding.rows(spec) for spec in part.specs]
        assert reads == {"tables": sum(map(len, held)) * row, "others": others}
        for store, table, rows in zip(part.stores, tables, held, strict=True):
            assert torch.equal(table_of(store).table, table[rows.start : rows.stop])
        total += reads["tables"]
    assert total == sum(len(table) for table in tables) * row


def test_a_rank_reads_its_own_rows_of_a_table_on_disk(tmp_path, reads):
    write_tiny_checkpoint(tmp_path)
    tables = [table_of(store).table for store in load(tmp_path, "device").stores]
    reads.update(tables=0, others=0)
    for rank in range(3):
        part = load(tmp_path, "disk", Alone(rank, 3))
        assert reads["tables"] == 0
        for store, table, spec in zip(part.stores, tables, part.specs, strict=True):
            assert isinstance(store, DiskStore)
            rows = part.holding.rows(spec)
            assert torch.equal(store.lookup(torch.arange(len(rows)), None), table[rows.start : rows.stop])


def share(group: Group, folder: Path) -> tuple[int, bool, bool]:
    """On each rank: table bytes it read, whether the rows are the checkpoint's, and whether it can write them."""
    read, counted = weights._read, []

    def counting(file, info, offset, into):
        counted.append(into.nbytes if ".ngram_embedding." in info.name else 0)
        read(file, info, offset, into)

    weights._read = counting
    try:
        model = load(folder, "shared", group)
    finally:
        weights._read = read
    plain = load(folder, "device")
    same = all(
        torch.equal(table_of(a).table, table_of(b).table) for a, b in zip(model.stores, plain.stores, strict=True)
    )
    group.barrier()
    if group.rank == 0:
        table_of(model.stores[1]).table[3] = 7
    group.barrier()
    return sum(counted), same, bool((table_of(model.stores[1]).table[3] == 7).all())


def damaged(group: Group, folder: Path) -> str:
    try:
        load(folder, "device", group)
    except ValueError as error:
        return str(error)
    return ""


def test_shared_tables_are_one_copy_and_a_damaged_one_is_refused_by_every_rank(tmp_path):
    folder = tmp_path / "plain"
    write_tiny_checkpoint(folder)
    tensors = load_file(folder / "model.safetensors")
    nbytes = sum(t.nbytes for name, t in tensors.items() if ".ngram_embedding.shard" in name)
    spoilt = tmp_path / "spoilt"
    write_tiny_checkpoint(spoilt)
    infos = [info for name, info in weights.open_checkpoint(spoilt).tensors.items() if ".ngram_embedding." in name]
    path = checksums.write(spoilt, infos)
    kept = json.loads(path.read_text())
    kept["crc32"][infos[1].name] = "0" * 8
    path.write_text(json.dumps(kept))
    with Ranks(2) as ranks:
        assert ranks.run(share, folder) == [(nbytes, True, True), (0, True, True)]
        first, second = ranks.run(damaged, spoilt)
        assert first == second and f"rank 1: the memory tables in {spoilt}" in first and infos[1].name in first


def test_rows_between_tensors_fall_to_where_they_belong():
    held = torch.arange(12.0).view(4, 3)
    rows = range(5, 9)
    for first, count, taken in ((0, 5, []), (0, 6, [0]), (4, 3, [0, 1]), (6, 2, [1, 2]), (8, 9, [3]), (9, 4, [])):
        parts = weights.rows_of(held, rows, first, count).parts
        assert sum(map(len, parts)) == count
        inside = [row for part in parts if not part.is_meta for row in part[:, 0].tolist()]
        assert inside == [3.0 * i for i in taken]
        before = len(parts[0]) if parts[0].is_meta else 0
        assert before == (max(rows.start - first, 0) if taken else count)
