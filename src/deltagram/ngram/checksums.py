"""Checksums of a checkpoint's tables, kept in a file beside them: a damaged shard is refused before it is loaded."""

import json
import threading
import zlib
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from deltagram.ngram.checkpoint import TensorInfo
from deltagram.ngram.helpers import Workers

FILE = "ngram_checksums.json"
_PIECE = 16 << 20
_READERS = 4


def compute(tensors: Iterable[TensorInfo]) -> dict[str, str]:
    """The CRC-32 of the bytes of each tensor, by its name in the checkpoint."""
    found: dict[str, str] = {}
    lock = threading.Lock()

    def one(info: TensorInfo) -> None:
        value, left = 0, info.nbytes
        with info.file.open("rb", buffering=0) as file:
            file.seek(info.offset)
            while left:
                piece = file.read(min(_PIECE, left))
                if not piece:
                    raise ValueError(f"{info.file} ended while tensor {info.name} was read, {left} bytes too early")
                value, left = zlib.crc32(piece, value), left - len(piece)
        with lock:
            found[info.name] = f"{value:08x}"

    workers = Workers(_READERS, "computing checksums", patience=600)
    try:
        workers.run([partial(one, info) for info in tensors])
    finally:
        workers.close()
    return found


def write(folder: Path, tensors: Iterable[TensorInfo]) -> Path:
    """Compute and keep the checksums of `tensors`; returns the file."""
    path = folder / FILE
    path.write_text(json.dumps({"crc32": dict(sorted(compute(tensors).items()))}, indent=1) + "\n")
    return path


def verify(folder: Path, tensors: Iterable[TensorInfo]) -> bool:
    """Compare `tensors` with the checksums kept in `folder`; False where none are kept.

    Raises ValueError naming every tensor that differs or that the file does not know.
    """
    path = folder / FILE
    if not path.is_file():
        return False
    try:
        kept = json.loads(path.read_text())["crc32"]
        assert isinstance(kept, dict)
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise ValueError(f"{path} is not a file of checksums: {error}") from error
    problems = []
    for name, value in sorted(compute(tensors).items()):
        if name not in kept:
            problems.append(f"{name} has no checksum in {FILE}")
        elif kept[name] != value:
            problems.append(f"{name} is damaged: its checksum is {value}, {FILE} has {kept[name]}")
    if problems:
        raise ValueError("\n".join([f"the memory tables in {folder} are not those of their checksums:", *problems]))
    return True
