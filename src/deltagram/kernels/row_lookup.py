"""Rows of a memory table by their ids, as the bytes they are stored in.

    out[i] = table[ids[i]];  zeros where ids[i] is -1, or with `keep` what out[i] held before

A row is values and their scales side by side (ngram/formats.py), so that one request to memory brings both. The table
may lie in page-locked host memory, which a CUDA device reads in place.

Shapes: table uint8 [rows, row_bytes], rows contiguous; ids int32 or int64 [...], each -1 or in [0, rows); out uint8
[..., row_bytes], contiguous, on the device of `ids`. Returns out. Errors: ValueError for `keep` without `out`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._layouts import word_type
from deltagram.kernels._triton import Build, Impl, choose, jit, tl

_WORDS, _WARPS = 512, 4  # a program's words, each the largest integer that divides a row
_FEW, _FEW_WORDS = 1 << 16, 128  # lookups of fewer words are spread over more programs, to have more reads under way


def row_lookup(table: Tensor, ids: Tensor, out: Tensor | None = None, keep: bool = False, impl: Impl = None) -> Tensor:
    """See the file's docstring."""
    if keep and out is None:
        raise ValueError("keep=True leaves rows of `out` as they are; expected an `out`")
    return choose(impl, ids.device, _reference, _launch)(table, ids, out, keep)


def _reference(table: Tensor, ids: Tensor, out: Tensor | None = None, keep: bool = False) -> Tensor:
    flat, row_bytes = ids.reshape(-1), table.shape[1]
    if out is None:
        out = torch.empty(*ids.shape, row_bytes, dtype=torch.uint8, device=ids.device)
    rows = out.view(-1, row_bytes)
    if flat.numel() == 0 or int(flat.min()) >= 0:
        torch.index_select(table, 0, flat, out=rows)
    elif keep:
        present = flat >= 0
        rows[present] = table.index_select(0, flat[present])
    else:
        torch.index_select(table, 0, flat.clamp(min=0), out=rows)
        rows[flat < 0] = 0
    return out


@jit(do_not_specialize=["num_rows"])
def _kernel(  # type: ignore[no-untyped-def]
    table, ids, out, num_rows, ROW_WORDS: tl.constexpr, KEEP: tl.constexpr, WORDS: tl.constexpr
):
    at = tl.program_id(0) * WORDS + tl.arange(0, WORDS)  # words of `out` fit int32: dividing int64 would take longest
    row = at // ROW_WORDS
    inside = row < num_rows
    wanted = tl.load(ids + row, mask=inside, other=-1).to(tl.int64)
    present = wanted >= 0
    word = tl.load(table + wanted * ROW_WORDS + at % ROW_WORDS, mask=present, other=0)
    tl.store(out + at, word, mask=present if KEEP else inside)


def _launch(table: Tensor, ids: Tensor, out: Tensor | None = None, keep: bool = False) -> Tensor:
    row_bytes, count = table.shape[1], ids.numel()
    if out is None:
        out = torch.empty(*ids.shape, row_bytes, dtype=torch.uint8, device=ids.device)
    assert table.is_contiguous() and ids.is_contiguous() and out.is_contiguous()
    word = word_type(row_bytes)
    row_words = row_bytes // word.itemsize
    assert count * row_words < 2**31, "a lookup of 16 GiB"
    if count:
        words = _FEW_WORDS if count * row_words < _FEW else _WORDS
        grid = (-(-count * row_words // words),)
        _kernel[grid](table.view(word), ids, out.view(word), count, row_words, keep, words, num_warps=_WARPS)
    return out


def ahead_of_time() -> list[Build]:
    builds = []
    forms = ((False, "*i64", "*i64", 33), (True, "*i64", "*i64", 40), (False, "*i32", "*i32", 41))
    for keep, ids, word, row_words in forms:
        types = {"table": word, "out": word, "ids": ids, "num_rows": "i32"}
        builds.append(
            Build(_kernel, types, {"ROW_WORDS": row_words, "KEEP": keep, "WORDS": _WORDS}, {"num_warps": _WARPS})
        )
    return builds
