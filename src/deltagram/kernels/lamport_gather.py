"""All-gather without a barrier: every rank writes its part into every peer's buffer, and a reader waits for the words.

    out[i, r * width + j] = part of rank r [i, j], but +0.0 where that is -0.0

A word of a buffer that still reads -0.0 (0x80000000) has not been written: writers turn -0.0 into +0.0, the one
exception to the same bits. So it carries numbers, fp32 or bf16, two of which make a word, and never packed rows, whose
scale bytes can be the sentinel. Buffers rotate over three generations: of round i, a rank writes and reads generation
i mod 3, and sets what round i - 1 used back to the sentinel. No peer can write that again before round i + 2, and so
not before this rank has entered round i + 1. The round, and the extent that the last one used, live on the device, so
that a replayed graph is right; the last program to finish advances them. Leslie Lamport's idea (1977) that data can be
its own flag; messages marked by a value that data never takes are the "LL" protocols of communication libraries.

One instance a stream, and all ranks make the same calls in one order, of parts of one shape. `programs` blocks must be
able to run beside everything else that may wait for a peer (parallel/residency.py). A block looks at most `polls` times
for each of its tiles and then sets `stalled`: a peer that never comes ends as an error, `out` being void, and not as a
hang. While `stalled` is not 0, a wait ends after PATIENCE looks, and the buffers must be made anew.

Shapes: part [n, width], n > 0 (a round without words would not wait for anybody), contiguous, fp32 or bf16, a row
being a multiple of 4 bytes; buffers int64 [ranks], the
addresses of every rank's int32 [3, ranks, capacity] with capacity >= the words of a part, all words the sentinel at
first, addresses multiples of 16; state int64 [3] on the device: round, extent (words) of the last one, programs that
have finished; stalled int64 [1] in page-locked host memory; out [n, ranks * width], contiguous, of part's dtype.
Returns out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._pointers import at, wait_until
from deltagram.kernels._triton import Build, Impl, choose, jit, tl

SENTINEL = -(1 << 31)  # the bits of -0.0
WORDS, WARPS, REGISTERS = 4096, 8, 80  # words a program reads at a time; what a block needs: parallel/residency.py
PATIENCE = 1024  # looks between two at `stalled`, which is far away
_OPTIONS = {"num_warps": WARPS, "maxnreg": REGISTERS}
ROUND, EXTENT, FINISHED = range(3)  # places of `state`


def lamport_gather(
    part: Tensor,
    buffers: Tensor,
    state: Tensor,
    stalled: Tensor,
    out: Tensor,
    rank: int,
    capacity: int,
    polls: int,
    programs: int,
    impl: Impl = None,
) -> Tensor:
    """See the file's docstring."""
    assert part.dtype in (torch.float32, torch.bfloat16) and part.dtype == out.dtype
    assert part.shape[1] * part.itemsize % 4 == 0 and part.nbytes <= 4 * capacity and capacity % 4 == 0
    assert (
        len(part)
        and out.shape == (len(part), part.shape[1] * len(buffers))
        and part.is_contiguous()
        and out.is_contiguous()
    )
    body = choose(impl, part.device, _reference, _launch)
    return body(part, buffers, state, stalled, out, rank, capacity, polls, programs)


def _reference(
    part: Tensor,
    buffers: Tensor,
    state: Tensor,
    stalled: Tensor,
    out: Tensor,
    rank: int,
    capacity: int,
    polls: int,
    programs: int,
) -> Tensor:
    ranks, words = len(buffers), part.nbytes // 4
    round_, extent = int(state[ROUND]), int(state[EXTENT])
    shape = (3, ranks, capacity)
    views = [at(address, shape, torch.int32, part.device) for address in buffers.tolist()]
    sent = torch.where(part == 0, 0.0, part).to(part.dtype).view(torch.int32).reshape(-1)
    for view in views:
        view[round_ % 3, rank, :words] = sent
    came = views[rank][round_ % 3, :, :words]
    if not wait_until(lambda: not bool((came == SENTINEL).any()), polls, stalled, PATIENCE):
        stalled.fill_(1)
    rows = came.view(part.dtype).view(ranks, *part.shape)
    out.view(len(part), ranks, -1).copy_(rows.transpose(0, 1))
    views[rank][(round_ + 2) % 3, :, :extent] = SENTINEL
    state[ROUND], state[EXTENT] = round_ + 1, words
    return out


@jit(do_not_specialize=["num_rows", "rank", "capacity", "polls"])
def _kernel(  # type: ignore[no-untyped-def]
    part,
    buffers,
    state,
    stalled,
    out,
    num_rows,
    rank,
    capacity,
    polls,
    RANKS: tl.constexpr,
    WIDTH: tl.constexpr,  # words of a row of `part`
    PAIRS: tl.constexpr,  # bf16, two a word
    TILE: tl.constexpr,
    PATIENCE: tl.constexpr,
):
    SENTINEL: tl.constexpr = -2147483648
    first = tl.program_id(0)
    programs = tl.num_programs(0)
    lane = tl.arange(0, TILE)
    peer = tl.arange(0, RANKS)
    turn = tl.load(state)
    extent = tl.cdiv(tl.load(state + 1).to(tl.int32), 4) * 4
    segment = (capacity // 4).to(tl.int64) * 4  # which tells the compiler that four words can move at once
    words = num_rows * WIDTH
    now = (turn % 3) * RANKS * segment
    last = ((turn + 2) % 3) * RANKS * segment
    theirs = tl.load(buffers + peer).to(tl.pointer_type(tl.int32))[:, None] + now + rank * segment
    mine = tl.load(buffers + rank).to(tl.pointer_type(tl.int32)) + (peer * segment)[:, None]
    for tile in range(first, tl.cdiv(words, TILE), programs):
        at = tile * TILE + lane
        word = tl.load(part + at, mask=at < words, other=0)
        if PAIRS:
            word = tl.where((word & 0xFFFF) == 0x8000, word & -65536, word)
            word = tl.where((word & -65536) == SENTINEL, word & 0xFFFF, word)
        else:
            word = tl.where(word == SENTINEL, 0, word)
        there = tl.multiple_of(theirs + at[None, :], (1, 16))
        tl.store(there, tl.broadcast_to(word[None, :], (RANKS, TILE)), mask=(at < words)[None, :])
    for tile in range(first, tl.cdiv(words, TILE), programs):
        at = tile * TILE + lane
        inside = (at < words)[None, :]
        there = tl.multiple_of(mine + now + at[None, :], (1, 16))
        word = tl.load(there, mask=inside, other=0, volatile=True)
        missing = tl.max(tl.max((word == SENTINEL).to(tl.int32), 1), 0)
        looks = 0
        while (missing > 0) & (looks < polls):
            word = tl.load(there, mask=inside, other=0, volatile=True)
            missing = tl.max(tl.max((word == SENTINEL).to(tl.int32), 1), 0)
            looks += 1
            if looks % PATIENCE == 0:
                looks = tl.where(tl.load(stalled, volatile=True) == 0, looks, polls)
        if missing > 0:
            tl.store(stalled, 1)
        place = at // WIDTH * (RANKS * WIDTH) + at % WIDTH
        tl.store(out + (peer * WIDTH)[:, None] + place[None, :], word, mask=inside)
    for tile in range(first, tl.cdiv(extent, TILE), programs):
        at = tile * TILE + lane
        back = tl.full((RANKS, TILE), SENTINEL, tl.int32)
        tl.store(tl.multiple_of(mine + last + at[None, :], (1, 16)), back, mask=(at < extent)[None, :])
    tl.debug_barrier()  # every warp has read the state
    if tl.atomic_add(state + 2, 1) == programs - 1:
        tl.store(state + 2, 0)
        tl.store(state + 1, words.to(tl.int64))
        tl.store(state, turn + 1)


def _launch(
    part: Tensor,
    buffers: Tensor,
    state: Tensor,
    stalled: Tensor,
    out: Tensor,
    rank: int,
    capacity: int,
    polls: int,
    programs: int,
) -> Tensor:
    ranks, rows, width = len(buffers), part.shape[0], part.shape[1] * part.itemsize // 4
    views = part.view(torch.int32), buffers, state, stalled, out.view(torch.int32)
    constants = _constants(ranks, width, part.dtype == torch.bfloat16)
    grid = (min(programs, -(-rows * width // constants["TILE"])),)
    _kernel[grid](*views, rows, rank, capacity, polls, **constants, **_OPTIONS)
    return out


def _constants(ranks: int, width: int, pairs: bool) -> dict[str, int]:
    return {"RANKS": ranks, "WIDTH": width, "PAIRS": pairs, "TILE": WORDS // ranks, "PATIENCE": PATIENCE}


def ahead_of_time() -> list[Build]:
    types = {"part": "*i32", "buffers": "*i64", "state": "*i64", "stalled": "*i64", "out": "*i32"}
    types |= dict.fromkeys(("num_rows", "rank", "capacity", "polls"), "i32")
    forms = ((2, 6400, True), (4, 3200, True), (8, 3200, False))
    return [Build(_kernel, types, _constants(*form), _OPTIONS) for form in forms]
