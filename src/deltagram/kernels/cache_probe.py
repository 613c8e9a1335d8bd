"""Which rows of a lookup a set of hot rows holds; the first half of a cached lookup, cache_keep.py is the other.

    missing[i] = -1 where slot ids[i] mod slots holds row ids[i], or ids[i] is -1;  else ids[i]

Writes, in place: USED of each slot whose row is hit = turn; CLAIM of each slot that misses would go to = turn + i of
the last of them; hits and lookups counted (absent ids are none). No row is moved: what is held stays so until
cache_keep.

Shapes: ids int64 [...], each -1 or a row's; slots int64 [num_slots, 4] and state int64 [4]: see _layouts.py. Returns
missing, like ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._layouts import CLAIM, HELD, HITS, LOOKUPS, TURN, USED
from deltagram.kernels._triton import Build, Impl, choose, jit, tl

_ROWS, _WARPS = 128, 4  # a program's


def cache_probe(ids: Tensor, slots: Tensor, state: Tensor, impl: Impl = None) -> Tensor:
    """See the file's docstring."""
    return choose(impl, ids.device, _reference, _launch)(ids, slots, state)


def _reference(ids: Tensor, slots: Tensor, state: Tensor) -> Tensor:
    flat = ids.reshape(-1)
    slot = flat.remainder(len(slots))
    present = flat >= 0
    hit = present & (slots[slot, HELD] == flat)
    missed = present & ~hit
    slots[slot[hit], USED] = state[TURN]
    order = state[TURN] + torch.arange(len(flat), device=ids.device)
    slots.view(-1).scatter_reduce_(0, slot[missed] * 4 + CLAIM, order[missed], "amax")
    state[HITS] += hit.sum()
    state[LOOKUPS] += present.sum()
    return torch.where(hit, -1, flat).view_as(ids)


@jit(do_not_specialize=["num_rows", "num_slots"])
def _kernel(  # type: ignore[no-untyped-def]
    ids, slots, state, missing, num_rows, num_slots, HITS: tl.constexpr, LOOKUPS: tl.constexpr, ROWS: tl.constexpr
):
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wanted = tl.load(ids + i, mask=i < num_rows, other=-1)
    present = wanted >= 0
    turn = tl.load(state)
    at = slots + tl.where(present, wanted % num_slots, 0) * 4
    hit = present & (tl.load(at, mask=present, other=-1) == wanted)
    tl.store(at + 1, turn, mask=hit)
    tl.atomic_max(at + 3, turn + i, mask=present & (hit == 0), sem="relaxed")
    tl.store(missing + i, tl.where(hit, -1, wanted), mask=i < num_rows)
    tl.atomic_add(state + HITS, tl.sum(hit.to(tl.int64), 0), sem="relaxed")
    tl.atomic_add(state + LOOKUPS, tl.sum(present.to(tl.int64), 0), sem="relaxed")


def _launch(ids: Tensor, slots: Tensor, state: Tensor) -> Tensor:
    assert ids.is_contiguous() and ids.dtype == torch.int64
    missing, count = torch.empty_like(ids), ids.numel()
    if count:
        grid = (-(-count // _ROWS),)
        _kernel[grid](ids, slots, state, missing, count, len(slots), HITS, LOOKUPS, _ROWS, num_warps=_WARPS)
    return missing


def ahead_of_time() -> list[Build]:
    types = dict.fromkeys(("ids", "slots", "state", "missing"), "*i64") | dict.fromkeys(
        ("num_rows", "num_slots"), "i32"
    )
    return [Build(_kernel, types, {"HITS": HITS, "LOOKUPS": LOOKUPS, "ROWS": _ROWS}, {"num_warps": _WARPS})]
