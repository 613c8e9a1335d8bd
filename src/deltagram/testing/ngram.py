"""Tables of random rows in every format and every placement, and comparing what they give, bit by bit."""

from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from deltagram.ngram.disk import Segment
from deltagram.ngram.formats import RowFormat
from deltagram.ngram.placement import Placement, make_store, table_of
from deltagram.ngram.stores import RowStore

FORMATS = {
    "bf16": RowFormat(torch.bfloat16, 20),
    "fp16": RowFormat(torch.float16, 6),
    "fp32": RowFormat(torch.float32, 5),
    "ue8m0": RowFormat(torch.float8_e4m3fn, 64, group=32),
    "one scale": RowFormat(torch.float8_e4m3fn, 20, table_scale=True),
}
SCALE = 0.37  # of a table with one scale


def random_table(form: RowFormat, num_rows: int, seed: int = 0) -> Tensor:
    """uint8 [num_rows, row_bytes]; of fp8, every byte is among them, NaN and both zeros too."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(256, (num_rows, form.row_bytes), dtype=torch.uint8, generator=generator)
    if form.values != torch.float8_e4m3fn:
        values, _ = form.split(table)
        values.copy_(torch.randn(values.shape, generator=generator))
    return table


def write_segments(form: RowFormat, table: Tensor, folder: Path) -> list[Segment]:
    """Write a table as checkpoints lay it out: values in uneven shards, scales in one, other bytes before each."""
    segments, num_rows = [], len(table)
    cuts = [0, num_rows // 3, num_rows // 3 + 1, num_rows]
    for at, width in ((0, form.value_bytes), (form.value_bytes, form.row_bytes - form.value_bytes)):
        shards = list(pairwise(cuts)) if at == 0 else [(0, num_rows)]
        for first, end in shards if width else []:
            path = folder / f"{at}-{first}.bin"
            path.write_bytes(b"head" + table[first:end, at : at + width].contiguous().numpy().tobytes())
            segments.append(Segment(f"part.{at}.{first}", path, 4, first, end - first, at, width))
    return segments


def filled_store(placement: str, form: RowFormat, table: Tensor, folder: Path | None, device: torch.device) -> RowStore:
    """A store of `table`. `folder` receives its files if rows are to stay on disk."""
    scale = torch.tensor([SCALE], device=device) if form.table_scale else None
    segments: list[Segment] = []
    if placement.endswith("disk"):
        assert folder is not None, "rows on disk need a folder"
        segments = write_segments(form, table, folder)
    store = make_store(Placement.parse(placement), len(table), form, device, segments, scale)
    if (held := table_of(store)) is not None:
        held.table.copy_(table)
        if held.scale is not None:
            held.scale.fill_(SCALE)
    return store


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit by bit, but for which of the NaNs a NaN is."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    bits_a, bits_b = (x.masked_fill(x.isnan(), 0).view(integer) for x in (a, b))
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(bits_a, bits_b)
