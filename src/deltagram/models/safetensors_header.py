"""Where the tensors of a safetensors file lie: a strict reader of its header.

A file is an 8-byte little-endian length, that many bytes of JSON, then the tensors' bytes (row-major, little-endian).
The JSON maps a name to `dtype`, `shape` and `data_offsets` [begin, end) counted from the end of the header;
`__metadata__` holds free text. The tensors cover the rest of the file without a gap or an overlap.

Our own reader, rather than the safetensors package, because weights are read straight into their destinations and rows
of n-gram tables straight from the disk: both need offsets, and neither may map the file into memory.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MAX_HEADER = 100_000_000  # bytes; the format's own limit

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a file: `nbytes` bytes from byte `offset` of the file on, row-major. `name` is the file's own."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(path: Path, problems: list[str]) -> dict[str, TensorInfo]:
    """The tensors of `path` by name. What is wrong goes into `problems`, each line with the file's name; the tensors it
    concerns are left out."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if prefix == b"version ":
                raise ValueError("it is a git-lfs pointer, not the file itself: run `git lfs pull`")
            if len(prefix) < 8 or length > size - 8:
                needs = f"its header ends at byte {length + 8}" if len(prefix) == 8 else "a header takes at least 8"
                raise ValueError(f"truncated or no safetensors file: it has {size} bytes, but {needs}")
            if length > MAX_HEADER:
                raise ValueError(f"the header has {length} bytes; expected at most {MAX_HEADER}")
            header = json.loads(file.read(length), object_pairs_hook=_object_without_duplicates)
        if not isinstance(header, dict):
            raise ValueError(f"the header is a JSON {type(header).__name__}; expected an object")
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return {}
    header.pop("__metadata__", None)
    tensors: dict[str, TensorInfo] = {}
    start, found = 8 + length, len(problems)
    for name, entry in header.items():
        fault, info = _tensor(path, name, entry, start, size)
        if info is None:
            problems.append(f"{path.name}: tensor {name}: {fault}")
        else:
            tensors[name] = info
    if len(problems) == found:
        problems += _coverage_problems(path, tensors, start, size)
    return tensors


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate key {next(name for name in names if names.count(name) > 1)!r}")
    return values


def _tensor(path: Path, name: str, entry: Any, start: int, size: int) -> tuple[str, TensorInfo | None]:
    """The tensor that a header entry describes, or what is wrong with it."""
    if not isinstance(entry, dict) or not entry.keys() >= {"dtype", "shape", "data_offsets"}:
        return f"header entry is {entry!r:.100}; expected dtype, shape and data_offsets", None
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        return f"dtype is {entry['dtype']!r:.100}; expected one of {', '.join(DTYPES)}", None
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_counts(shape):
        return f"shape is {shape!r:.100}; expected a list of non-negative integers", None
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"data_offsets is {offsets!r:.100}; expected [begin, end]", None
    begin, end = offsets
    nbytes = math.prod(shape) * dtype.itemsize
    if end - begin != nbytes:
        return f"data_offsets {offsets} span {end - begin} bytes; {entry['dtype']} {shape} takes {nbytes}", None
    if start + end > size:
        return f"ends at byte {start + end}, but the file has {size}: it is truncated", None
    return "", TensorInfo(name, path, dtype, tuple(shape), start + begin, nbytes)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(entry) is int and entry >= 0 for entry in value)


def _coverage_problems(path: Path, tensors: dict[str, TensorInfo], start: int, size: int) -> list[str]:
    """Overlaps of tensors, gaps between them and bytes after the last one."""
    problems, at = [], start
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.nbytes)):
        if info.offset != at:
            what = "overlaps the tensor before it" if info.offset < at else "leaves a gap before it"
            problems.append(f"{path.name}: tensor {info.name} {what}: it begins at byte {info.offset}, expected {at}")
        at = max(at, info.offset + info.nbytes)
    if at != size:
        problems.append(f"{path.name} has {size} bytes; its tensors end at byte {at}")
    return problems
