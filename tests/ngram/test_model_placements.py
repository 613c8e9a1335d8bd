"""A Qwen4-Exp model gives the same logits from every placement of its tables, and refuses tables that are not whole."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deltagram import LLM
from deltagram.models.config import read_config
from deltagram.models.load import load_model
from deltagram.ngram.disk import DiskStore
from deltagram.ngram.helpers import HelperError
from deltagram.ngram.host_step import FetchedRows
from deltagram.testing.checkpoints import write_tiny_checkpoint

PROMPT = list(b"the cat sat on the mat, the cat sat") + [256] + list(b"on the mat")
FP8 = torch.float8_e4m3fn


def logits(folder: Path, placement: str) -> torch.Tensor:
    return LLM(folder, device="cpu", dtype="float32", ngram_placement=placement).prompt_logits(PROMPT)


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def quantize(tensors: dict[str, torch.Tensor]) -> None:
    """The tables in fp8, each with one scale, as the fp8 variant of the family ships them."""
    for name in [name for name in tensors if ".ngram_embedding.shard_" in name]:
        tensors[name] = (tensors[name] / 0.01).to(FP8)
        tensors[re.sub(r"shard_\d+.weight", "weight_scale", name)] = torch.tensor(0.01)


@pytest.fixture(params=[torch.float32, torch.bfloat16, FP8], ids=["fp32", "bf16", "fp8"])
def folder(request, tmp_path):
    form = request.param
    write_tiny_checkpoint(tmp_path, dtype=torch.float32 if form == FP8 else form)
    if form == FP8:
        rewrite(tmp_path, quantize)
    return tmp_path


def test_placements_give_the_same_logits(folder):
    plain = logits(folder, "device")
    assert plain.shape == (len(PROMPT), 264) and plain.isfinite().all()
    for placement in ("host", "shared", "disk", "cached:2KiB:host", "cached:2KiB:disk"):
        assert torch.equal(logits(folder, placement), plain), placement


def test_a_table_on_disk_is_not_loaded(folder):
    """More table than the memory budget is served: of a table on disk, the process holds no row but those it stages."""
    config = read_config(folder)
    model, _ = load_model(folder, config, 64, torch.device("cpu"), torch.float32, ngram_placement="disk")
    assert all(isinstance(store, DiskStore) for store in model.stores) and not hasattr(model.stores[0], "table")


def constant(tensors, name: str, which: str, count: int) -> None:
    tensors[name.replace("ngram_embedding.shard_2.weight", which)] = torch.ones(count, dtype=torch.int64)


@pytest.mark.parametrize("placement", ["device", "disk"])
@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda t, name: t.pop(name), r"missing: \S+shard_2.weight"),
        (lambda t, name: t.update({name: t[name][:-1]}), r"shard_2.weight in model.safetensors has shape"),
        (lambda t, name: t.pop(name.replace("shard_2.weight", "weight_scale")), r"missing: \S+weight_scale"),
        (
            lambda t, name: t.update({name.replace("shard_2.weight", "weight_scale"): torch.tensor(float("nan"))}),
            r"weight_scale is nan; expected a positive number",
        ),
        (lambda t, name: constant(t, name, "ngram_heads_vocab_sizes", 4), r"ngram_heads_vocab_sizes in \S+ holds"),
        (lambda t, name: constant(t, name, "layer_multipliers", 3), r"layer_multipliers in model.safetensors holds"),
    ],
    ids=["missing shard", "short shard", "missing scale", "NaN scale", "other moduli", "other multipliers"],
)  # fmt: skip
def test_a_table_that_is_not_whole_is_refused_by_name(tmp_path, spoil, problem, placement):
    write_tiny_checkpoint(tmp_path)
    rewrite(tmp_path, quantize)
    name = next(name for name in load_file(tmp_path / "model.safetensors") if name.endswith("shard_2.weight"))
    rewrite(tmp_path, lambda tensors: spoil(tensors, name))
    with pytest.raises(ValueError, match=problem):
        logits(tmp_path, placement)


def test_an_unknown_placement_is_refused(tmp_path):
    write_tiny_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="ngram_placement is 'gpu'"):
        logits(tmp_path, "gpu")


def test_a_chain_without_its_rows_makes_the_step_void(tmp_path):
    """The engine's check after a step reaches the helper of every table, under a cache too."""
    write_tiny_checkpoint(tmp_path)
    for placement in ("disk", "cached:1KiB:disk"):
        model, _ = load_model(
            tmp_path, read_config(tmp_path), 64, torch.device("cpu"), torch.float32, ngram_placement=placement
        )
        store = getattr(model.stores[1], "below", model.stores[1])
        store.by_host = FetchedRows(store.fetch, store.format, torch.device("cpu"), 64)  # what it has on a GPU
        model.run_ahead.wake()
        model.run_ahead.check()
        store.by_host.close()
        store.by_host.thread.join(timeout=5)
        with pytest.raises(HelperError, match="fetching rows for the device has died"):
            model.run_ahead.check()
