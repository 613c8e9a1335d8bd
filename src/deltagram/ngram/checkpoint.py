"""The memory tables of a checkpoint: which tensors hold them, and whether those are what the config says.

Reads no row: names, shapes and dtypes, of safetensors headers read elsewhere, decide.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from deltagram.ngram.disk import Segment
from deltagram.ngram.formats import RowFormat
from deltagram.ngram.spec import HashSpec


class TensorInfo(Protocol):
    """A tensor in a file: `nbytes` bytes from byte `offset` of the file on, row-major."""

    @property
    def name(self) -> str: ...
    @property
    def file(self) -> Path: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class TableSource:
    """One layer's table in a checkpoint.

    values: the tensors that hold its rows, in order, [rows, dim] each. scales: those of its ue8m0 bytes, [rows, dim /
    group]. scale: the number that scales it, one value. The last two are empty and None where the format has none.
    """

    title: str
    spec: HashSpec
    format: RowFormat
    values: tuple[TensorInfo, ...]
    scales: tuple[TensorInfo, ...] = ()
    scale: TensorInfo | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole table."""
        return self.spec.num_rows * self.format.row_bytes

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """Everything that belongs to the table."""
        return (*self.values, *self.scales, *((self.scale,) if self.scale else ()))

    @property
    def segments(self) -> list[Segment]:
        """Where the table lies, for a DiskStore."""
        found = []
        for at, width, parts in (
            (0, self.format.value_bytes, self.values),
            (self.format.value_bytes, self.format.row_bytes - self.format.value_bytes, self.scales),
        ):
            first = 0
            for info in parts:
                found.append(Segment(info.name, info.file, info.offset, first, info.shape[0], at, width))
                first += info.shape[0]
        return found


def read_scale(source: TableSource) -> torch.Tensor | None:
    """The number that scales the table, fp32 [1]. Raises ValueError for one that is no positive number."""
    if source.scale is None:
        return None
    with source.scale.file.open("rb") as file:
        file.seek(source.scale.offset)
        raw = bytearray(file.read(source.scale.nbytes))
    number = torch.frombuffer(raw, dtype=source.scale.dtype).float()
    if not 0 < float(number) < float("inf"):
        raise ValueError(f"{source.scale.name} is {float(number)}; expected a positive number")
    return number


def find_table(
    title: str,
    spec: HashSpec,
    dim: int,
    tensors: Mapping[str, TensorInfo],
    values: Sequence[str],
    rows: Sequence[int],
    scales: str | None = None,
    scale: str | None = None,
    group: int = 32,
) -> TableSource:
    """The table whose rows are in the tensors named `values`, `rows` of them in each.

    scales, scale: names of the ue8m0 bytes and of the table's one number; an fp8 table must have the one its family
    names. Raises ValueError naming every tensor that is missing or of another shape or dtype.
    """
    problems: list[str] = []
    found = [_tensor(tensors, name, [(count, dim)], None, problems) for name, count in zip(values, rows, strict=True)]
    dtypes = {info.dtype for info in found if info is not None}
    if len(dtypes) > 1:
        problems.append(
            f"{values[0]} and its other parts have dtypes {', '.join(sorted(map(str, dtypes)))}; expected one"
        )
    fp8 = torch.float8_e4m3fn in dtypes
    scale_bytes = scale_number = None
    if fp8 and scales is not None:
        kinds = (torch.float8_e8m0fnu, torch.uint8)
        scale_bytes = _tensor(tensors, scales, [(sum(rows), dim // group)], kinds, problems)
    elif fp8:
        assert scale is not None
        floats = (torch.float32, torch.bfloat16, torch.float16)
        scale_number = _tensor(tensors, scale, [(), (1,), (1, 1)], floats, problems)
    if problems or not dtypes:
        raise ValueError("\n".join([f"the memory table of {title} cannot be used:", *problems]))
    form = RowFormat(dtypes.pop(), dim, group if scale_bytes else 0, scale_number is not None)
    parts = tuple(info for info in found if info is not None)
    return TableSource(title, spec, form, parts, (scale_bytes,) if scale_bytes else (), scale_number)


def qwen4_exp_table(spec: HashSpec, layer: int, dim: int, parts: int, tensors: Mapping[str, TensorInfo]) -> TableSource:
    """The table of decoder layer `layer` (from 0) of a Qwen4-Exp checkpoint, whole or in up to `parts` equal shards."""
    prefix = f"model.layers.{layer}.ple.ple_embedding.ngram_embedding"
    names, rows = [f"{prefix}.weight"], [spec.num_rows]
    if names[0] not in tensors:
        even = -(-spec.num_rows // parts)
        rows = [min(even, spec.num_rows - first) for first in range(0, spec.num_rows, even)]
        names = [f"{prefix}.shard_{part}.weight" for part in range(len(rows))]
    return find_table(f"layer {layer}", spec, dim, tensors, names, rows, scale=f"{prefix}.weight_scale")


def engram_table(spec: HashSpec, layer: int, dim: int, tensors: Mapping[str, TensorInfo]) -> TableSource:
    """The table of decoder layer `layer` of a DeepSeek-V4.1 checkpoint."""
    prefix = f"layers.{layer}.engram.embed"
    return find_table(
        f"layer {layer}", spec, dim, tensors, [f"{prefix}.weight"], [spec.num_rows], scales=f"{prefix}.scale"
    )


def longcat_table(spec: HashSpec, dim: int, tensors: Mapping[str, TensorInfo]) -> TableSource:
    """LongCat's tables, one after the other as one."""
    names = [f"model.ngram_embeddings.embedders.{column}.weight" for column in range(spec.num_columns)]
    return find_table("the n-gram embedding", spec, dim, tensors, names, spec.moduli, scale="")


def _tensor(
    tensors: Mapping[str, TensorInfo],
    name: str,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype] | None,
    problems: list[str],
) -> TensorInfo | None:
    info = tensors.get(name)
    if info is None:
        problems.append(f"{name} is missing; expected {list(shapes[0])}")
    elif info.shape not in shapes:
        problems.append(f"{name} in {info.file.name} has shape {list(info.shape)}; expected {list(shapes[0])}")
    elif dtypes is not None and info.dtype not in dtypes:
        problems.append(f"{name} in {info.file.name} has dtype {info.dtype}; expected {' or '.join(map(str, dtypes))}")
    else:
        return info
    return None
