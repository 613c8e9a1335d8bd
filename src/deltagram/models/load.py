"""From a checkpoint folder to a model that can run."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from deltagram.layers.basic import Factory
from deltagram.models.base import Model, meta_factory
from deltagram.models.config import ModelConfig, Qwen3NextConfig, Qwen4ExpConfig, Qwen35Config, Qwen35MoeConfig
from deltagram.models.mtp import add_head
from deltagram.models.qwen3_5 import Qwen35
from deltagram.models.qwen3_5_moe import Qwen35Moe
from deltagram.models.qwen3_next import Qwen3Next
from deltagram.models.qwen4_exp import IN_DEVICE, Qwen4Exp
from deltagram.models.weights import Checkpoint, Weight, check_weights, load_weights, open_checkpoint
from deltagram.ngram import checksums
from deltagram.ngram.checkpoint import TensorInfo
from deltagram.ngram.holding import Holding
from deltagram.ngram.placement import Placement
from deltagram.parallel.groups import Group, everywhere


def build(
    config: ModelConfig,
    max_context: int,
    make: Factory,
    table_dtype: torch.dtype,
    placement: Placement = IN_DEVICE,
    tensors: Mapping[str, TensorInfo] | None = None,
    mtp: bool = False,
    holding: Holding | None = None,
) -> Model:
    """A model of `config`'s family with uninitialised weights. `placement` is where its memory tables live, if it has
    any; `tensors` those of the checkpoint, which tables on disk are read from. `mtp` adds the head that drafts;
    `holding` says what of the tables this process has, all if None."""
    model = _build(config, max_context, make, table_dtype, placement, tensors, holding)
    if mtp:
        add_head(model, make)
    return model


def _build(
    config: ModelConfig,
    max_context: int,
    make: Factory,
    table_dtype: torch.dtype,
    placement: Placement,
    tensors: Mapping[str, TensorInfo] | None,
    holding: Holding | None,
) -> Model:
    if isinstance(config, Qwen4ExpConfig):
        return Qwen4Exp(config, max_context, make, table_dtype, placement, tensors, holding)
    if isinstance(config, Qwen3NextConfig):
        return Qwen3Next(config, max_context, make)
    if isinstance(config, Qwen35MoeConfig):
        return Qwen35Moe(config, max_context, make)
    assert isinstance(config, Qwen35Config), config
    return Qwen35(config, max_context, make)


def load_model(
    folder: Path,
    config: ModelConfig,
    max_context: int,
    device: torch.device,
    dtype: torch.dtype,
    progress: Callable[[int], None] | None = None,
    ngram_placement: str = "device",
    mtp: bool = False,
    group: Group | None = None,
    ngram_split: str = "auto",
) -> tuple[Model, Checkpoint]:
    """The model in `folder`. The checkpoint is checked against a model of shapes before memory is taken for the real
    one.

    `progress` is called with the bytes of each piece read. `ngram_placement` is where memory tables live:
    ngram/placement.py. `mtp` asks for the checkpoint's head that drafts. The ranks of a `group` hold the tables
    together, cut as `ngram_split` says (ngram/sharding.py) or as one copy where they are shared; all of them call this.
    Tables are compared with their checksums if the folder has them, by a rank's part of the tensors each. Raises
    ValueError with every problem found.
    """
    placement = Placement.parse(ngram_placement)
    checkpoint, table_dtype = everywhere(group, lambda: _open(folder, config, max_context, dtype, mtp, group))
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    make = Factory(device, dtype, _matrix_dtype(checkpoint))
    holding = Holding(group, placement, ngram_split) if group and isinstance(config, Qwen4ExpConfig) else None
    model = build(config, max_context, make, table_dtype, placement, checkpoint.tensors, mtp, holding)
    load_weights(checkpoint, _plan(model, shapes), progress)
    make.pack()
    if isinstance(model, Qwen4Exp):
        model.check_scales()
        if holding is not None:
            holding.hand_over(model.stores)
    return model, checkpoint


def _open(
    folder: Path, config: ModelConfig, max_context: int, dtype: torch.dtype, mtp: bool, group: Group | None
) -> tuple[Checkpoint, torch.dtype]:
    """The checkpoint, which fits the model, and what its tables' rows are kept in. This rank has compared its part of
    the tables with their checksums."""
    checkpoint = open_checkpoint(folder, mtp)
    if mtp and isinstance(config, Qwen4ExpConfig) and not config.indexer_n_heads:
        raise ValueError(
            f"{folder} has no indexer_n_heads in config.json; its head that drafts (mtp.*) needs an indexer"
        )
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    table_dtype = _table_dtype(checkpoint, dtype)
    check_weights(checkpoint, _plan(build(config, max_context, meta_factory(dtype), table_dtype, mtp=mtp), shapes))
    tables = [info for name, info in checkpoint.tensors.items() if ".ngram_embedding." in name]
    checksums.verify(folder, tables if group is None else tables[group.rank :: group.size])
    return checkpoint, table_dtype


def _plan(model: Model, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Weight]:
    return model.weights(shapes) | (model.mtp.weights(shapes) if model.mtp else {})


def _table_dtype(checkpoint: Checkpoint, dtype: torch.dtype) -> torch.dtype:
    """What n-gram rows are kept in: the checkpoint's own dtype. Raises ValueError for one that no row is stored in."""
    rows = [
        info for name, info in checkpoint.tensors.items() if ".ngram_embedding." in name and name.endswith(".weight")
    ]
    found = {info.dtype for info in rows} or {dtype}
    if len(found) > 1 or not found <= {torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn}:
        names = ", ".join(sorted(str(each) for each in found))
        raise ValueError(f"n-gram tables must all be float32, bfloat16, float16 or float8_e4m3fn, got {names}")
    return found.pop()


def _matrix_dtype(checkpoint: Checkpoint) -> torch.dtype | None:
    """bf16 if every matrix of the checkpoint is; else None."""
    found = {info.dtype for name, info in checkpoint.tensors.items() if len(info.shape) > 1 and ".ngram_" not in name}
    return torch.bfloat16 if found == {torch.bfloat16} else None
