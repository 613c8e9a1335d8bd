"""What `deltagram ngram` says of a checkpoint, and what it refuses: every tensor of every family, by name."""

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from deltagram.models.config import read_config
from deltagram.models.load import load_model
from deltagram.models.weights import open_checkpoint
from deltagram.ngram import checksums, report, verify
from deltagram.ngram.cli import app, placement_report
from deltagram.ngram.families import read_memory
from deltagram.ngram.spec import HashConstants
from deltagram.ngram.tokens import read_token_map
from deltagram.testing.checkpoints import write_tiny_checkpoint
from deltagram.testing.ngram_checkpoints import FAMILIES, write_memory_checkpoint


def run(*arguments) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("family", FAMILIES)
def test_inspect_and_verify(family, tmp_path):
    write_memory_checkpoint(tmp_path, family)
    shown = run("inspect", tmp_path)
    assert {"engram": "Engram", "qwen4_exp": "PLE", "longcat": "LongCat"}[family] in shown
    assert ("polynomial" if family == "longcat" else "xor") in shown and "multipliers" in shown and "moduli" in shown
    found = run("verify", tmp_path, "--tokens", 60)
    assert "equal the rules" in found and "cached:1MiB:disk equal the files" in found and "none are kept" in found
    assert "not compared: the table has" in run("verify", tmp_path, "--tokens", 9, "--max-gib", 0)
    run("verify", tmp_path, "--tokens", 9, "--write-checksums")
    assert "tensors are as they were" in run("verify", tmp_path, "--tokens", 9)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_missing_or_misshapen_tensor_is_refused_by_name(family, tmp_path):
    write_memory_checkpoint(tmp_path, family)
    whole = load_file(tmp_path / "model.safetensors")
    tables = [name for name in whole if "ngram_embedding" in name or ".embed." in name]
    assert len(tables) in (4, 6, 8)
    for name in tables:
        for changed in (None, whole[name][:-1] if whole[name].dim() else whole[name].repeat(3)):
            spoilt = {**whole, name: changed} if changed is not None else {k: v for k, v in whole.items() if k != name}
            save_file(spoilt, tmp_path / "model.safetensors")
            with pytest.raises(ValueError, match=re.escape(name)):
                run("inspect", tmp_path)


def test_verify_notices_a_hash_that_is_not_the_rules(tmp_path, monkeypatch):
    write_memory_checkpoint(tmp_path, "engram")
    right = HashConstants.ids
    monkeypatch.setattr(
        HashConstants, "ids", lambda *a: right(*a) + (torch.arange(right(*a).numel()) == 7).view(right(*a).shape)
    )
    with pytest.raises(ValueError, match="layer 1: hashes differ from the rules"):
        run("verify", tmp_path)


def test_verify_notices_a_placement_that_gives_other_rows(tmp_path, monkeypatch):
    write_memory_checkpoint(tmp_path, "engram")
    monkeypatch.setattr(verify, "table_of", lambda store: None)  # tables stay as they were allocated
    with pytest.raises(ValueError, match="gives other rows than the files"):
        run("verify", tmp_path)


def test_a_missing_config_field_is_named(tmp_path):
    write_memory_checkpoint(tmp_path, "engram")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["engram_n_heads"], config["engram_head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config.json lacks engram_n_heads"):
        run("inspect", tmp_path)


def test_a_checkpoint_without_memory(tmp_path):
    write_tiny_checkpoint(tmp_path, "qwen3_5")
    assert "no n-gram memory" in run("inspect", tmp_path) and placement_report(tmp_path) == []


def damage(folder: Path) -> None:
    """Flip one bit of a row."""
    info = next(i for n, i in open_checkpoint(folder).tensors.items() if n.endswith("shard_1.weight"))
    with info.file.open("r+b") as file:
        file.seek(info.offset + 5)
        byte = file.read(1)[0]
        file.seek(info.offset + 5)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("placement", ["device", "disk"])
def test_a_damaged_shard_is_refused_by_its_checksum(tmp_path, placement):
    write_tiny_checkpoint(tmp_path)
    load = partial(load_model, tmp_path, read_config(tmp_path), 64, torch.device("cpu"), torch.float32)
    tables = [i for n, i in open_checkpoint(tmp_path).tensors.items() if ".ngram_embedding." in n]
    checksums.write(tmp_path, tables)
    load(ngram_placement=placement)
    damage(tmp_path)
    with pytest.raises(ValueError, match=r"shard_1.weight is damaged: its checksum is"):
        load(ngram_placement=placement)
    (tmp_path / checksums.FILE).write_text(json.dumps({"crc32": {}}))
    with pytest.raises(ValueError, match=r"shard_0.weight has no checksum"):
        load(ngram_placement=placement)
    (tmp_path / checksums.FILE).write_text("nonsense")
    with pytest.raises(ValueError, match="is not a file of checksums"):
        load(ngram_placement=placement)


def test_checksums_are_crc32(tmp_path):
    import zlib

    write_tiny_checkpoint(tmp_path)
    info = next(i for n, i in open_checkpoint(tmp_path).tensors.items() if n.endswith("shard_1.weight"))
    raw = info.file.read_bytes()[info.offset : info.offset + info.nbytes]
    assert checksums.compute([info]) == {info.name: f"{zlib.crc32(raw):08x}"}


def test_the_placement_report_says_what_fits(tmp_path, monkeypatch):
    write_memory_checkpoint(tmp_path, "engram")
    _, tables = read_memory(
        json.loads((tmp_path / "config.json").read_text()),
        open_checkpoint(tmp_path).tensors,
        lambda: read_token_map(tmp_path),
    )
    need = sum(table.nbytes for table in tables)
    for free, word in ((need, "fits"), (need - 1, "does not fit")):
        monkeypatch.setattr(report, "free_host_memory", lambda free=free: free)
        rows = dict(report.placement_rows(tables, torch.device("cpu")))
        assert all(f": {word}" in rows[name] for name in ("device", "host", "shared")), rows
        assert "staging a process" in rows["disk"]
    monkeypatch.setattr(report, "free_host_memory", lambda: need)
    rows = dict(report.placement_rows(tables, torch.device("cpu"), processes=2))
    assert "does not fit" in rows["host"] and ": fits" in rows["shared"]  # a copy a process, and one a node
    assert report.free_host_memory() > 0
    monkeypatch.undo()
    assert report.free_host_memory() > 1 << 20 and placement_report(tmp_path)[0][0] == "device"


def test_the_commands_import_no_torch_before_they_run():
    code = "import sys, deltagram.ngram.cli; assert not {'torch', 'numpy'} & set(sys.modules), 'heavy'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
