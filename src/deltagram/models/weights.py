"""Safetensors checkpoints in: what a folder holds, whether it fits a model, and its bytes into the model's tensors.

`open_checkpoint` reads headers alone. A model states what it wants as a load plan, `dict[name, Weight]`;
`check_weights` compares the two before anything is allocated (the plan's destinations may be meta tensors), and
`load_weights` reads. Files are read into the destination, or through one small staging buffer where the dtype, the
layout or the device differ; never mapped, as mapped pages count as resident memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from itertools import groupby
from pathlib import Path

import torch

from deltagram.models.fields import read_json_object
from deltagram.models.safetensors_header import TensorInfo, read_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
STAGING_BYTES = 16 << 20
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MAX_LISTED = 50

# Multimodal checkpoints keep the text model one level deeper.
_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_VISION = ("model.visual.", "visual.")
_MTP = ("mtp.",)


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a checkpoint folder by the name a text-only checkpoint would give them.

    The vision tower is left out, and the multi-token prediction weights unless they were asked for. `notes` are lines
    for the user.
    """

    folder: Path
    tensors: dict[str, TensorInfo]
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of `tensors` in the files."""
        return sum(info.nbytes for info in self.tensors.values())


@dataclass(frozen=True, eq=False)
class Weight:
    """What a model does with one checkpoint tensor.

    `destination`: the tensor that receives it, of its shape; possibly a strided view into a fused parameter, on any
    device; or several, which receive its rows one after the other; rows of a meta tensor among several are not read.
    `expected`: integers the checkpoint must hold (constants it stores and the model computes). With neither, the tensor
    is known and ignored. `optional`: the checkpoint may lack it, as it may an ignored one.
    """

    destination: torch.Tensor | tuple[torch.Tensor, ...] | None = None
    optional: bool = False
    expected: torch.Tensor | None = None

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The destinations, in the order of the checkpoint's rows."""
        if self.destination is None:
            return ()
        return self.destination if isinstance(self.destination, tuple) else (self.destination,)

    @property
    def wanted(self) -> torch.Tensor | None:
        """A tensor of the shape and dtype that the checkpoint must hold; None for an ignored one."""
        if not isinstance(self.destination, tuple):
            return self.destination if self.destination is not None else self.expected
        first = self.destination[0]
        rows = sum(len(part) for part in self.destination)
        return torch.empty((rows, *first.shape[1:]), dtype=first.dtype, device="meta")


def rows_of(held: torch.Tensor, rows: range, first: int, count: int) -> Weight:
    """A checkpoint tensor with rows [first, first + count) of a table of which `held` has the `rows`, and no others."""
    begin = min(max(first, rows.start), first + count)
    end = max(min(first + count, rows.stop), begin)
    if end - begin == count:
        return Weight(held[first - rows.start : first - rows.start + count])
    left_out = [held.new_empty((size, *held.shape[1:]), device="meta") for size in (begin - first, first + count - end)]
    parts = left_out[0], held[begin - rows.start : end - rows.start], left_out[1]
    return Weight(tuple(part for part in parts if len(part)))


def open_checkpoint(folder: Path, mtp: bool = False) -> Checkpoint:
    """Reads the headers of the safetensors files in `folder`: model.safetensors, or the shards that
    model.safetensors.index.json names. With `mtp`, the multi-token prediction weights are wanted too. Raises ValueError
    naming every problem: no safetensors file, a missing or damaged one, an index and shards that disagree."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; expected a checkpoint folder as Hugging Face tools write it")
    problems: list[str] = []
    if (folder / INDEX_FILE).is_file():
        found = _read_shards(folder, problems)
    elif (folder / SINGLE_FILE).is_file():
        found = list(read_header(folder / SINGLE_FILE, problems).values())
    else:
        raise ValueError(_nothing_to_read(folder))
    tensors: dict[str, TensorInfo] = {}
    for info in found:
        name = _text_name(info.name)
        if name in tensors:
            other = tensors[name]
            problems.append(
                f"{info.file.name} has {info.name}, and {other.file.name} has {other.name}: the same weight"
            )
        tensors[name] = info
    if problems:
        raise ValueError("\n".join([f"cannot load the weights in {folder}:", *_bullets(problems)]))
    vision = [name for name in tensors if name.startswith(_VISION)]
    heads = [name for name in tensors if name.startswith(_MTP)]
    notes = []
    if vision:
        notes.append(f"the vision tower ({len(vision)} tensors) is skipped: this model reads text alone")
    if mtp and not heads:
        raise ValueError(f"{folder} has no multi-token prediction weights (mtp.*) to draft with")
    if heads and not mtp:
        notes.append(f"multi-token prediction weights ({len(heads)} tensors) are recognised and not loaded")
    left_out = {*vision, *([] if mtp else heads)}
    return Checkpoint(folder, {name: tensors[name] for name in tensors if name not in left_out}, tuple(notes))


def check_weights(checkpoint: Checkpoint, plan: dict[str, Weight]) -> None:
    """Raises one ValueError listing every tensor of `plan` the checkpoint lacks, every tensor it has too many, and
    every one of another shape, kind of dtype or (for `expected` ones) value. Reads the bytes of those alone."""
    missing, wrong = [], []
    for name, weight in plan.items():
        info = checkpoint.tensors.get(name)
        wanted = weight.wanted
        if info is None:
            if wanted is not None and not weight.optional:
                missing.append(f"missing: {name} {list(wanted.shape)}")
        elif wanted is not None and (fault := _fault(info, weight, wanted)):
            wrong.append(f"{name} in {info.file.name} {fault}")
    surplus = [f"surplus: {name} in {checkpoint.tensors[name].file.name}" for name in checkpoint.tensors.keys() - plan]
    if missing or wrong or surplus:
        counts = f"{len(missing)} missing, {len(surplus)} surplus, {len(wrong)} wrong"
        heading = f"the weights in {checkpoint.folder} do not fit the model ({counts}):"
        raise ValueError("\n".join([heading, *_bullets(wrong), *_bullets(missing), *_bullets(sorted(surplus))]))


def load_weights(
    checkpoint: Checkpoint, plan: dict[str, Weight], progress: Callable[[int], None] | None = None
) -> None:
    """Checks `plan` (see `check_weights`) and fills its destinations, converting between floating dtypes.

    Needs `STAGING_BYTES` beside the destinations. `progress` is told how many bytes were dealt with since it was last
    called; they add up to `checkpoint.nbytes`. Raises ValueError naming the file and the tensor of a failed read.
    """
    check_weights(checkpoint, plan)
    report = progress or (lambda nbytes: None)
    staging = torch.empty(STAGING_BYTES, dtype=torch.uint8)
    in_file_order = sorted(checkpoint.tensors.items(), key=lambda item: (item[1].file, item[1].offset))
    for path, group in groupby(in_file_order, key=lambda item: item[1].file):
        with _open(path) as file:
            for name, info in group:
                parts, offset = plan[name].parts, info.offset
                if not parts:
                    report(info.nbytes)
                for part in parts:
                    nbytes = part.numel() * info.dtype.itemsize
                    if part.is_meta:
                        assert isinstance(plan[name].destination, tuple), f"{name} has no memory to load into"
                        report(nbytes)
                    else:
                        _fill(file, info, part.detach(), offset, staging, report)
                    offset += nbytes


def read_tensor(info: TensorInfo) -> torch.Tensor:
    """The tensor itself, in CPU memory. Raises ValueError naming the file and the tensor of a failed read."""
    tensor = torch.empty(info.shape, dtype=info.dtype)
    with _open(info.file) as file:
        _read(file, info, info.offset, tensor)
    return tensor


def _open(path: Path) -> FileIO:
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise ValueError(f"{path} cannot be opened: {error}") from error


def _fill(
    file: FileIO,
    info: TensorInfo,
    destination: torch.Tensor,
    offset: int,
    staging: torch.Tensor,
    report: Callable[[int], None],
) -> None:
    """Fills `destination`, a leading-dimension slice of the tensor `info`, from the bytes at `offset` on; in pieces
    that fit the staging buffer, which also paces the reports."""
    nbytes = destination.numel() * info.dtype.itemsize
    if nbytes <= STAGING_BYTES:
        direct = destination.is_contiguous() and destination.device.type == "cpu" and destination.dtype == info.dtype
        piece = destination if direct else staging[:nbytes].view(info.dtype).view(destination.shape)
        _read(file, info, offset, piece)
        if not direct:
            destination.copy_(piece)  # synchronous, so that the buffer is free again
        report(nbytes)
        return
    row = nbytes // destination.shape[0]
    step = max(1, STAGING_BYTES // row)
    for first in range(0, destination.shape[0], step):
        rows = destination[first] if row > STAGING_BYTES else destination[first : first + step]
        _fill(file, info, rows, offset + first * row, staging, report)


def _read(file: FileIO, info: TensorInfo, offset: int, into: torch.Tensor) -> None:
    """Reads the bytes at `offset` into the contiguous CPU tensor `into`."""
    # Not reshape(-1): one element with a stride counts as contiguous and would keep its stride.
    left = into.as_strided((into.numel(),), (1,)).view(torch.uint8).numpy().data
    try:
        file.seek(offset)
        while left:
            count = file.readinto(left)
            if not count:
                raise ValueError(f"{info.file} ended while tensor {info.name} was read, {len(left)} bytes too early")
            left = left[count:]
    except OSError as error:
        raise ValueError(f"reading tensor {info.name} from {info.file} failed: {error}") from error


def _fault(info: TensorInfo, weight: Weight, wanted: torch.Tensor) -> str:
    """What keeps the checkpoint's tensor from serving as `wanted`, or the empty string."""
    if info.shape != tuple(wanted.shape):
        return f"has shape {list(info.shape)}; expected {list(wanted.shape)}"
    accepted = _FLOATS if wanted.dtype in _FLOATS else (wanted.dtype,)
    if info.dtype not in accepted:
        return f"has dtype {_short(info.dtype)}; expected {' or '.join(map(_short, accepted))}"
    if weight.expected is not None and not torch.equal(held := read_tensor(info), weight.expected):
        return f"holds {held.tolist()!s:.100}; expected {weight.expected.tolist()!s:.100}, computed from config.json"
    return ""


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _text_name(name: str) -> str:
    for prefix, replacement in _PREFIXES:
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name


def _read_shards(folder: Path, problems: list[str]) -> list[TensorInfo]:
    """The tensors of the shards that the index names; where index and shards disagree goes into `problems`."""
    weight_map = read_json_object(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        problems.append(f"{INDEX_FILE} has no weight_map from tensor names to file names")
        return []
    shards = sorted(set(weight_map.values()))
    if (folder / SINGLE_FILE).is_file() and SINGLE_FILE not in shards:
        problems.append(f"there are both {SINGLE_FILE} and {INDEX_FILE}, which does not name it: remove the stale one")
    found: list[TensorInfo] = []
    for shard in shards:
        listed = [name for name, owner in weight_map.items() if owner == shard]
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            problems.append(f"{INDEX_FILE} names {shard!r}; expected a .safetensors file beside it")
        elif not (folder / shard).is_file():
            problems.append(f"{shard} is missing; {INDEX_FILE} places {len(listed)} tensors in it")
        else:
            before = len(problems)
            header = read_header(folder / shard, problems)
            if len(problems) > before:
                continue  # what a damaged header lacks says nothing about the index
            problems += [
                f"{shard} lacks {name}, which {INDEX_FILE} places in it" for name in listed if name not in header
            ]
            for name, info in header.items():
                owner = weight_map.get(name)
                if owner == shard:
                    found.append(info)
                else:
                    place = "does not name" if owner is None else f"places in {owner}"
                    problems.append(f"{shard} has {name}, which {INDEX_FILE} {place}")
    return found


def _nothing_to_read(folder: Path) -> str:
    stray = sorted(path.name for path in folder.glob("*.safetensors"))
    if stray:
        return f"{folder} has {', '.join(stray)} but neither {SINGLE_FILE} nor {INDEX_FILE}, which tell what to load"
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        return (
            f"{folder} has its weights as pickles ({', '.join(pickles)}), which can run code when read; "
            "only safetensors are loaded: convert them first"
        )
    return f"{folder} has no weights; expected {SINGLE_FILE}, or shards and {INDEX_FILE}"


def _bullets(lines: list[str]) -> list[str]:
    more = [f"- and {len(lines) - _MAX_LISTED} more"] if len(lines) > _MAX_LISTED else []
    return [f"- {line}" for line in lines[:_MAX_LISTED]] + more
