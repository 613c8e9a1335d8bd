"""The rows of this rank's columns for the tokens of all who ask, as stored bytes: one launch a step.

    rows[asker, layer, t, c] = table[layer][id - first[layer]] where first[layer] <= id < end[layer], else zeros
    with id = ids of asker [layer, t, rank * width + c]

A table split by whole columns (heads) over ranks: a rank holds `width` = columns / ranks of them, which are the rows
[first, end) of the whole table. Ids are read where the askers wrote them; id -1 gives a row of zeros.

Shapes: tables int64 [layers], the addresses of this rank's slices, uint8 [end - first, row_bytes]; bounds int64
[layers, 2], first and end; ids int64 [askers], the addresses of ids, int32 [layers, slot, columns], of every rank, or
of this one alone where all have the same; rows int64 [ranks], the addresses of every rank's rows, uint8 [askers,
layers, slot, width, row_bytes]. Writes this rank's. Addresses are multiples of 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._pointers import at
from deltagram.kernels._triton import Build, Impl, choose, jit, tl

_WORDS, _WARPS = 512, 4  # a program's words, each the largest integer that divides a row
_FEW, _FEW_WORDS = 1 << 16, 128  # as in row_lookup.py


def peer_lookup(
    tables: Tensor,
    bounds: Tensor,
    ids: Tensor,
    rows: Tensor,
    rank: int,
    slot: int,
    columns: int,
    row_bytes: int,
    impl: Impl = None,
) -> None:
    """See the file's docstring."""
    assert columns % len(rows) == 0 and bounds.shape == (len(tables), 2)
    body = choose(impl, rows.device, _reference, _launch)
    body(tables, bounds, ids, rows, rank, slot, columns, row_bytes)


def _reference(
    tables: Tensor, bounds: Tensor, ids: Tensor, rows: Tensor, rank: int, slot: int, columns: int, row_bytes: int
) -> None:
    layers, device, width = len(tables), rows.device, columns // len(rows)
    out = at(int(rows[rank]), (len(ids), layers, slot, width, row_bytes), torch.uint8, device)
    mine = slice(rank * width, (rank + 1) * width)
    asked = [at(a, (layers, slot, columns), torch.int32, device)[:, :, mine] for a in ids.tolist()]
    wanted = torch.stack(asked).long()  # [askers, layers, slot, width]
    for layer, (address, (first, end)) in enumerate(zip(tables.tolist(), bounds.tolist(), strict=True)):
        table = at(address, (end - first, row_bytes), torch.uint8, device)
        here = wanted[:, layer]
        found = (here >= first) & (here < end)
        out[:, layer] = 0
        out[:, layer][found] = table[here[found] - first]


@jit(do_not_specialize=["rank", "layers", "words", "slot"])
def _kernel(  # type: ignore[no-untyped-def]
    tables,
    bounds,
    ids,
    rows,
    rank,
    layers,
    words,  # of an asker's tokens in one layer
    slot,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    WORD: tl.constexpr,
    WORDS: tl.constexpr,
):
    part = tl.program_id(1)  # asker * layers + layer
    asker = part // layers
    layer = part % layers
    at = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    row = at // ROW_WORDS
    theirs = tl.load(ids + asker).to(tl.pointer_type(tl.int32)) + layer.to(tl.int64) * slot * COLUMNS
    out = tl.load(rows + rank).to(tl.pointer_type(WORD)) + part.to(tl.int64) * words
    table = tl.load(tables + layer).to(tl.pointer_type(WORD))
    first = tl.load(bounds + layer * 2)
    end = tl.load(bounds + layer * 2 + 1)
    column = rank * WIDTH + row % WIDTH
    inside = at < words
    wanted = tl.load(theirs + row // WIDTH * COLUMNS + column, mask=inside, other=-1).to(tl.int64)
    held = (wanted >= first) & (wanted < end)
    word = tl.load(table + (wanted - first) * ROW_WORDS + at % ROW_WORDS, mask=held & inside, other=0)
    tl.store(out + at, word, mask=inside)


def _launch(
    tables: Tensor, bounds: Tensor, ids: Tensor, rows: Tensor, rank: int, slot: int, columns: int, row_bytes: int
) -> None:
    layers, width, (word, word_bytes) = len(tables), columns // len(rows), word_of(row_bytes)
    words = slot * width * (row_bytes // word_bytes)
    assert words < 2**31, "a lookup of 16 GiB"
    if slot:
        size = _FEW_WORDS if words * len(ids) * layers < _FEW else _WORDS
        grid = (-(-words // size), len(ids) * layers)
        constants = {"COLUMNS": columns, "WIDTH": width, "ROW_WORDS": row_bytes // word_bytes, "WORD": word}
        _kernel[grid](tables, bounds, ids, rows, rank, layers, words, slot, **constants, WORDS=size, num_warps=_WARPS)


def word_of(row_bytes: int) -> tuple[tl.dtype, int]:
    """The largest integer that divides a row, as Triton names it, and its bytes."""
    types = ((tl.int64, 8), (tl.int32, 4), (tl.int16, 2), (tl.uint8, 1))
    return next(found for found in types if row_bytes % found[1] == 0)


def ahead_of_time() -> list[Build]:
    types = dict.fromkeys(("tables", "bounds", "ids", "rows"), "*i64")
    types |= dict.fromkeys(("rank", "layers", "words", "slot"), "i32")
    forms = ((24, 12, 33, tl.int64), (24, 3, 33, tl.int64), (16, 8, 41, tl.int32))
    return [
        Build(_kernel, types, {"COLUMNS": columns, "WIDTH": width, "ROW_WORDS": row, "WORD": word, "WORDS": _WORDS})
        for columns, width, row, word in forms
    ]
