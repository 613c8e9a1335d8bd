"""Rows of a lookup that a set of hot rows holds, and what the set keeps of the others: after cache_probe.py, and
the lookup of what was missing. _layouts.py says what `slots` and `state` are.

    packed[i] = rows[slot]           where cache_probe hit
    rows[slot] = packed[i]           for the one missed row that claimed the slot, unless the slot's row was hit since
                                     another last wanted its place: its second chance, which it has then had

A slot whose row is hit in this lookup is never written in it, and one row at most claims a slot: whatever order
programs run in, what is handed out and kept is the same, and each row the bytes it is.

Shapes: ids, missing int64 [n]; packed uint8 [n, row_bytes], what was missing looked up, and rows uint8 [num_slots,
row_bytes], both updated in place, as are slots and state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._layouts import CHALLENGED, CLAIM, FINISHED, HELD, TURN, USED, word_type
from deltagram.kernels._triton import Build, Impl, choose, jit, power_of_two, tl

_WORDS, _WARPS = 1024, 4  # a program's


def cache_keep(
    ids: Tensor, missing: Tensor, packed: Tensor, rows: Tensor, slots: Tensor, state: Tensor, impl: Impl = None
) -> None:
    """See the file's docstring."""
    choose(impl, ids.device, _reference, _launch)(ids, missing, packed, rows, slots, state)


def _reference(ids: Tensor, missing: Tensor, packed: Tensor, rows: Tensor, slots: Tensor, state: Tensor) -> None:
    slot, missed = ids.remainder(len(slots)), missing >= 0
    hit = (ids >= 0) & ~missed
    packed[hit] = rows[slot[hit]]
    wins = missed & (slots[slot, CLAIM] == state[TURN] + torch.arange(len(ids), device=ids.device))
    enters = wins & (slots[slot, USED] < slots[slot, CHALLENGED])
    rows[slot[enters]] = packed[enters]
    slots[slot[enters], HELD] = ids[enters]
    slots[slot[enters], USED] = 0
    slots[slot[wins], CHALLENGED] = state[TURN]
    state[TURN] += len(ids)


@jit(do_not_specialize=["num_rows", "num_slots"])
def _kernel(  # type: ignore[no-untyped-def]
    ids,
    missing,
    packed,
    rows,
    slots,
    state,
    num_rows,
    num_slots,
    FINISHED: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wanted = tl.load(ids + i, mask=i < num_rows, other=-1)
    missed = tl.load(missing + i, mask=i < num_rows, other=-1) >= 0
    hit = (wanted >= 0) & (missed == 0)
    turn = tl.load(state)
    slot = tl.where(wanted >= 0, wanted % num_slots, 0)
    at = slots + slot * 4
    wins = missed & (tl.load(at + 3, mask=missed, other=0) == turn + i)
    enters = wins & (tl.load(at + 1, mask=wins, other=0) < tl.load(at + 2, mask=wins, other=0))
    tl.debug_barrier()  # what the slots were is known to every thread before it is overwritten
    tl.store(at, wanted, mask=enters)
    tl.store(at + 1, 0, mask=enters)
    tl.store(at + 2, turn, mask=wins)
    word = tl.arange(0, BLOCK)[None, :]
    inside = word < ROW_WORDS
    mine = packed + i.to(tl.int64)[:, None] * ROW_WORDS + word
    held = rows + slot[:, None] * ROW_WORDS + word
    tl.store(mine, tl.load(held, mask=hit[:, None] & inside), mask=hit[:, None] & inside)
    tl.store(held, tl.load(mine, mask=enters[:, None] & inside), mask=enters[:, None] & inside)
    tl.debug_barrier()
    if tl.atomic_add(state + FINISHED, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(state + FINISHED, 0)
        tl.store(state, turn + num_rows)


def _launch(ids: Tensor, missing: Tensor, packed: Tensor, rows: Tensor, slots: Tensor, state: Tensor) -> None:
    count, row_bytes = len(ids), rows.shape[1]
    assert packed.is_contiguous() and rows.is_contiguous() and ids.is_contiguous() and missing.is_contiguous()
    if count:
        word = word_type(row_bytes)
        constants = _constants(row_bytes // word.itemsize)
        grid = (-(-count // constants["ROWS"]),)
        moved = packed.view(word), rows.view(word)
        _kernel[grid](ids, missing, *moved, slots, state, count, len(slots), **constants, num_warps=_WARPS)


def _constants(row_words: int) -> dict[str, int]:
    block = power_of_two(row_words)
    return {"FINISHED": FINISHED, "ROW_WORDS": row_words, "ROWS": max(1, _WORDS // block), "BLOCK": block}


def ahead_of_time() -> list[Build]:
    types = dict.fromkeys(("ids", "missing", "slots", "state"), "*i64") | dict.fromkeys(
        ("num_rows", "num_slots"), "i32"
    )
    builds = []
    for word, row_words in (("*i64", 33), ("*u8", 41)):
        builds.append(
            Build(_kernel, types | {"packed": word, "rows": word}, _constants(row_words), {"num_warps": _WARPS})
        )
    return builds
