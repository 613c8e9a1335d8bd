"""A device asks the host for rows: their ids to page-locked memory, then the number of the lookup and of its pieces.

    host_ids = ids, and -1 up to a whole piece of PIECE rows;  lookup += 1;  then asked = lookup * 2^BITS + pieces

When the host sees `asked`, all ids are there. It has until the lookup's rows are waited for (flag_wait.py) to bring
them.

Shapes: ids int64 [n]; host_ids int64 [capacity], capacity a multiple of PIECE, and asked int64 [1], in page-locked host
memory; counters int64 [2] on the device of `ids`, zeros at first: the lookup's number, and one for the kernel's own
use. Errors: ValueError for more ids than there is room for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._layouts import BITS, PIECE
from deltagram.kernels._triton import Build, Impl, choose, jit, tl

_ROWS, _WARPS = 1024, 4  # a program's


def host_ask(ids: Tensor, host_ids: Tensor, asked: Tensor, counters: Tensor, impl: Impl = None) -> None:
    """See the file's docstring."""
    if len(ids) > len(host_ids):
        raise ValueError(f"a lookup of {len(ids)} rows through the host; expected at most {len(host_ids)}")
    choose(impl, ids.device, _reference, _launch)(ids, host_ids, asked, counters)


def _reference(ids: Tensor, host_ids: Tensor, asked: Tensor, counters: Tensor) -> None:
    pieces = -(-len(ids) // PIECE)
    host_ids[: len(ids)] = ids
    host_ids[len(ids) : pieces * PIECE] = -1
    counters[0] += 1
    asked.fill_((int(counters[0]) << BITS) + pieces)


@jit(do_not_specialize=["num_rows"])
def _kernel(  # type: ignore[no-untyped-def]
    ids, host_ids, asked, counters, num_rows, PIECE: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr
):
    pieces = tl.cdiv(num_rows, PIECE)
    lookup = tl.load(counters) + 1
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(host_ids + i, tl.load(ids + i, mask=i < num_rows, other=-1), mask=i < pieces * PIECE)
    tl.debug_barrier()
    # In the eyes of the whole system, what every program has written is there before what the last one writes next.
    if tl.atomic_add(counters + 1, 1, sem="acq_rel", scope="sys") == tl.num_programs(0) - 1:
        tl.store(counters + 1, 0)
        tl.store(counters, lookup)
        tl.store(asked, (lookup << BITS) + pieces)


def _launch(ids: Tensor, host_ids: Tensor, asked: Tensor, counters: Tensor) -> None:
    assert ids.is_contiguous() and ids.dtype == torch.int64 and len(ids) > 0
    grid = (-(-len(ids) // _ROWS),)
    _kernel[grid](ids, host_ids, asked, counters, len(ids), PIECE, BITS, _ROWS, num_warps=_WARPS)


def ahead_of_time() -> list[Build]:
    types = dict.fromkeys(("ids", "host_ids", "asked", "counters"), "*i64") | {"num_rows": "i32"}
    return [Build(_kernel, types, {"PIECE": PIECE, "BITS": BITS, "ROWS": _ROWS}, {"num_warps": _WARPS})]
