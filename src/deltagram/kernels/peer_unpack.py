"""This rank's rows, which their owners looked up for it, out of the owners' memory.

    out[layer, t, owner * width + c] = rows of owner [asker, layer, t, c]

Shapes: rows int64 [ranks], the addresses of every rank's rows, uint8 [askers, layers, slot, width, row_bytes], as
peer_lookup.py writes them, where this rank is `asker`; out uint8 [layers, T, columns, row_bytes], contiguous,
T <= slot, columns = ranks * width. Returns out. Addresses are multiples of 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._pointers import at
from deltagram.kernels._triton import Build, Impl, choose, jit, tl

_WORDS, _WARPS = 512, 4  # a program's words, each the largest integer that divides a row
_FEW, _FEW_WORDS = 1 << 16, 128  # as in row_lookup.py


def peer_unpack(rows: Tensor, out: Tensor, asker: int, slot: int, impl: Impl = None) -> Tensor:
    """See the file's docstring."""
    assert out.shape[1] <= slot and out.shape[2] % len(rows) == 0 and out.is_contiguous()
    return choose(impl, out.device, _reference, _launch)(rows, out, asker, slot)


def _reference(rows: Tensor, out: Tensor, asker: int, slot: int) -> Tensor:
    layers, tokens, columns, row_bytes = out.shape
    ranks = len(rows)
    width = columns // ranks
    for owner, address in enumerate(rows.tolist()):
        theirs = at(address, (asker + 1, layers, slot, width, row_bytes), torch.uint8, out.device)
        out[:, :, owner * width : (owner + 1) * width] = theirs[asker, :, :tokens]
    return out


@jit(do_not_specialize=["asker", "layers", "words", "slot_words"])
def _kernel(  # type: ignore[no-untyped-def]
    rows,
    out,
    asker,
    layers,
    words,  # of the tokens in one layer, from one owner
    slot_words,  # of the slot in one layer, from one owner
    RANKS: tl.constexpr,
    TOKEN_WORDS: tl.constexpr,  # of a token in one layer, from one owner
    WORD: tl.constexpr,
    WORDS: tl.constexpr,
):
    owner = tl.program_id(1) // layers
    layer = tl.program_id(1) % layers
    at = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    inside = at < words
    theirs = tl.load(rows + owner).to(tl.pointer_type(WORD)) + (asker * layers + layer).to(tl.int64) * slot_words
    word = tl.load(theirs + at, mask=inside)
    token = at // TOKEN_WORDS
    place = token * (RANKS * TOKEN_WORDS) + owner * TOKEN_WORDS + at % TOKEN_WORDS
    tl.store(out + layer.to(tl.int64) * words * RANKS + place, word, mask=inside)


def _launch(rows: Tensor, out: Tensor, asker: int, slot: int) -> Tensor:
    layers, tokens, columns, row_bytes = out.shape
    ranks = len(rows)
    word = next(t for t in (torch.int64, torch.int32, torch.int16, torch.uint8) if row_bytes % t.itemsize == 0)
    token_words = columns // ranks * row_bytes // word.itemsize
    assert slot * token_words * ranks < 2**31, "a step of 16 GiB"
    if tokens:
        words = tokens * token_words
        size = _FEW_WORDS if words * ranks * layers < _FEW else _WORDS
        grid = (-(-words // size), ranks * layers)
        kinds = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.uint8}
        constants = {"RANKS": ranks, "TOKEN_WORDS": token_words, "WORD": kinds[word.itemsize], "WORDS": size}
        _kernel[grid](rows, out.view(word), asker, layers, words, slot * token_words, **constants, num_warps=_WARPS)
    return out


def ahead_of_time() -> list[Build]:
    types = {"rows": "*i64"} | dict.fromkeys(("asker", "layers", "words", "slot_words"), "i32")
    forms = ((2, 12 * 33, "*i64", tl.int64), (8, 3 * 33, "*i64", tl.int64), (2, 8 * 41, "*i32", tl.int32))
    return [
        Build(_kernel, types | {"out": out}, {"RANKS": ranks, "TOKEN_WORDS": words, "WORD": word, "WORDS": _WORDS})
        for ranks, words, out, word in forms
    ]
