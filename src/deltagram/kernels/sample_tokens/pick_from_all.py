"""The token of a row whose filters do not end among its likely tokens: picked from the whole vocabulary.

PARTS programs share a row, each with a stretch of the vocabulary that stays in its first cache, and meet after every
look at it: eleven looks find where top_k ends, as many where top_p does, three bits of the tokens' keys each, and one
more where the draw falls. So the time is bounded, whatever the distribution. GROUPS rows go on at once; only the PARTS
programs of one row wait for each other, and these start together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deltagram.kernels._triton import jit, tl
from deltagram.kernels.sample_tokens.rows import (
    BLOCK,
    ONE,
    SIZES,
    asked_for,
    let_next,
    ordered,
    owner_of,
    target_of,
    wait,
)

if TYPE_CHECKING:
    from deltagram.kernels.sample_tokens import Requests, Scratch

PARTS, GROUPS = 64, 4
SUMS = 2 * 16 * 16  # of up to 16 looks a filter: how many tokens there are from each of 8 keys on, and their weight
MEETING = SUMS + 2 + 2 * PARTS  # int64 a row: those sums, programs that came and that left, and each one's share


@jit
def _meet(arrived, wanted):  # type: ignore[no-untyped-def]
    """Wait until `wanted` programs have come: what each wrote before, all read after, past their first cache."""
    tl.debug_barrier()  # all of the program's writes come before its arrival
    seen = tl.atomic_add(arrived, 1, sem="acq_rel") + 1
    while seen < wanted:
        seen = tl.atomic_add(arrived, 0, sem="acquire")
    tl.debug_barrier()


@jit
def _load(adjusted, weights, at, last, least):  # type: ignore[no-untyped-def]
    """Keys and weights of the tokens `at`, and which count: not those that min_p drops, or past the stretch's end."""
    weight = tl.load(weights + at, mask=at < last, other=-1)
    key = ordered(tl.load(adjusted + at, mask=at < last, other=0.0))
    return key, weight, (weight.to(tl.float64) >= least) & (at < last)


@jit
def _look(adjusted, weights, first, last, least, edge, shift, sums, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add to `sums` how many of the stretch's tokens have a key of at least edge + (j << shift), and their weight."""
    j = tl.arange(0, 8)
    edges = edge + (j.to(tl.int64) << shift)
    exist = edges < (1 << 32)
    edges = (edges - (1 << 31)).to(tl.int32)
    number = tl.zeros([8, TILE], tl.int32)  # a token's numbers in one thread
    mass = tl.zeros([8, TILE], tl.int64)
    for low in range(first, last, 8 * TILE):
        for i in tl.static_range(8):  # unrolled, so that eight tiles are on their way at once
            key, weight, mine = _load(adjusted, weights, low + i * TILE + tl.arange(0, TILE), last, least)
            inside = (key[None, :] >= edges[:, None]) & mine[None, :]
            number += inside.to(tl.int32)
            mass += tl.where(inside, weight[None, :], 0)
    tl.atomic_add(sums + j, tl.where(exist, tl.sum(number, 1), 0).to(tl.int64), sem="relaxed")
    tl.atomic_add(sums + 8 + j, tl.where(exist, tl.sum(mass, 1), 0), sem="relaxed")


@jit
def _descend(  # type: ignore[no-untyped-def]
    adjusted, weights, first, last, least, goal, share, total, sums, arrived, met, BY_WEIGHT: tl.constexpr,
    PARTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The largest key such that the tokens from it on suffice: `goal` of them, or all if there are fewer; BY_WEIGHT:
    `share` of the weight `total`, or of all of it where that is below 0. Then the number and weight of the tokens above
    it, those of the tokens at it, and the weight `total`."""
    j = tl.arange(0, 8)
    edge = goal - goal
    above, above_mass, upto, upto_mass = edge, edge, edge, edge
    for level in range(11):
        shift = 30 - 3 * level
        mine = sums + level * 16
        _look(adjusted, weights, first, last, least, edge, shift, mine, TILE)
        _meet(arrived, (met + level + 1) * PARTS)
        number = tl.load(mine + j, cache_modifier=".cg")
        mass = tl.load(mine + 8 + j, cache_modifier=".cg")
        if BY_WEIGHT:
            total = tl.where(total < 0, tl.max(mass, 0), total)
            suffices = mass.to(tl.float64) >= share * total.to(tl.float64)
        else:
            goal = tl.minimum(goal, tl.max(number, 0))
            suffices = number >= goal
        step = tl.sum(suffices.to(tl.int32), 0) - 1
        edge += step.to(tl.int64) << shift
        upto, upto_mass = tl.sum(tl.where(j == step, number, 0), 0), tl.sum(tl.where(j == step, mass, 0), 0)
        above = tl.where(step < 7, tl.sum(tl.where(j == step + 1, number, 0), 0), above)
        above_mass = tl.where(step < 7, tl.sum(tl.where(j == step + 1, mass, 0), 0), above_mass)
    return edge, above, above_mass, upto - above, upto_mass - above_mass, total


@jit(do_not_specialize=SIZES)
def _kernel(  # type: ignore[no-untyped-def]
    sampled, cu_samples, sampled_end, sequence, position, row, whole, real, adjusted, weights, unsettled, meeting,
    tokens, vocab, num, PARTS: tl.constexpr, GROUPS: tl.constexpr, MEETING: tl.constexpr, SUMS: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, SCAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next(PDL)
    part = tl.program_id(0) % PARTS
    stretch = (vocab + PARTS * BLOCK - 1) // (PARTS * BLOCK) * BLOCK
    first = part * stretch
    last = tl.minimum(first + stretch, vocab)
    n = tl.program_id(0) // PARTS
    asked = asked_for(32, row, whole, sampled_end)
    wait(PDL)
    if not asked:
        return
    while n < num:
        if tl.load(unsettled + n) != 0:
            owner, token, _ = owner_of(n, sampled, cu_samples, sampled_end, sequence, row, whole)
            keys, heavy = adjusted + n.to(tl.int64) * vocab, weights + n.to(tl.int64) * vocab
            sums = meeting + n.to(tl.int64) * MEETING
            arrived, left, shares = sums + SUMS, sums + SUMS + 1, sums + SUMS + 2
            top_k, top_p = tl.load(whole + owner * 6 + 2), tl.load(real + owner * 6 + 1)
            least = tl.load(real + owner * 6 + 2) * ONE
            seed, place = tl.load(whole + owner * 6 + 1), (tl.load(position + token) + 1).to(tl.int64)
            # Tokens above `edge` are kept, and the first `equals` at it, of weight `each`: as top_k has it, then top_p.
            zero = top_k - top_k
            edge, equals, each, total, met = zero - 1, zero, zero, zero - 1, zero
            if top_k > 0:
                edge, above, above_mass, number, level, _ = _descend(
                    keys, heavy, first, last, least, top_k, top_p, total, sums, arrived, met, False, PARTS, TILE
                )
                equals, each = tl.minimum(top_k - above, number), level // tl.maximum(number, 1)
                total = above_mass + equals * each
                met += 11
            if top_p < 1:
                lower, most = edge, equals
                edge, above, above_mass, number, level, total = _descend(
                    keys, heavy, first, last, least, top_k, top_p, total, sums + SUMS // 2, arrived, met, True, PARTS,
                    TILE,
                )  # fmt: skip
                each = level // tl.maximum(number, 1)
                most = tl.where(edge == lower, most, number)
                enough = top_p * total.to(tl.float64)
                equals = zero  # the first j equals with above_mass + (j - 1) * each < enough
                for step in range(24):
                    tried = equals + ((zero + 1) << (23 - step))
                    fits = (tried <= most) & ((above_mass + (tried - 1) * each).to(tl.float64) < enough)
                    equals = tl.where(fits, tried, equals)
                met += 11
            at_edge = (tl.maximum(edge, 0) - (1 << 31)).to(tl.int32)
            every = edge < 0  # neither filter is asked for
            above_here = tl.zeros([SCAN], tl.int64)
            level_here = tl.zeros([SCAN], tl.int32)
            for low in range(first, last, SCAN):
                key, weight, mine = _load(keys, heavy, low + tl.arange(0, SCAN), last, least)
                above_here += tl.where(mine & ((key > at_edge) | every), weight, 0)
                level_here += (mine & (key == at_edge) & (edge >= 0)).to(tl.int32)
            tl.store(shares + 2 * part, tl.sum(above_here, 0))
            tl.store(shares + 2 * part + 1, tl.sum(level_here, 0).to(tl.int64))
            _meet(arrived, (met + 1) * PARTS)
            p = tl.arange(0, PARTS)
            level_of = tl.load(shares + 2 * p + 1, cache_modifier=".cg")
            level_before = tl.cumsum(level_of, 0) - level_of
            kept = tl.minimum(tl.maximum(equals - level_before, 0), level_of)
            mass_of = tl.load(shares + 2 * p, cache_modifier=".cg") + kept * each
            target = target_of(seed, place, tl.sum(mass_of, 0))
            if part == tl.sum((tl.cumsum(mass_of, 0) <= target).to(tl.int32), 0):
                before = tl.sum(tl.where(p < part, mass_of, 0), 0)
                equals -= tl.sum(tl.where(p < part, level_of, 0), 0)
                chosen = zero - 1
                for low in range(first, last, SCAN):
                    key, weight, mine = _load(keys, heavy, low + tl.arange(0, SCAN), last, least)
                    equal = mine & (key == at_edge) & (edge >= 0)
                    inside = (mine & ((key > at_edge) | every)) | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= equals))
                    summed = before + tl.cumsum(tl.where(inside, weight, 0), 0)
                    here = low + tl.sum((summed <= target).to(tl.int32), 0)
                    chosen = tl.where((chosen < 0) & (here < low + SCAN), here.to(tl.int64), chosen)
                    before += tl.sum(tl.where(inside, weight, 0), 0)
                    equals -= tl.sum(equal.to(tl.int64), 0)
                tl.store(tokens + n, chosen)
            tl.debug_barrier()  # the program has read all it wants
            if tl.atomic_add(left, 1, sem="acq_rel") == PARTS - 1:
                tl.store(sums + tl.arange(0, SUMS), tl.zeros([SUMS], tl.int64))
                tl.store(arrived, zero)
                tl.store(left, zero)
                tl.store(unsettled + n, 0)
        n += GROUPS


def launch(
    sampled: Tensor,
    cu_samples: Tensor,
    sequence: Tensor,
    position: Tensor,
    row: Tensor,
    requests: Requests,
    work: Scratch,
    num: int,
    vocab: int,
    pdl: bool,
) -> None:
    """Pick for those of the first `num` rows that are unsettled."""
    if work.tokens.is_cuda:  # who waits for each other must run at once: one a multiprocessor, on a small GPU
        processors = torch.cuda.get_device_properties(work.tokens.device).multi_processor_count
        shared = {"PARTS": min(PARTS, 1 << (processors.bit_length() - 1)), "GROUPS": GROUPS}
    else:  # the interpreter runs one program after the other: there nobody may wait
        shared = {"PARTS": 1, "GROUPS": 1}
    KERNEL[(shared["PARTS"] * shared["GROUPS"],)](
        sampled, cu_samples, len(cu_samples) - 1, sequence, position, row, requests.whole, requests.real, work.adjusted,
        work.weights, work.unsettled, work.meeting, work.tokens, vocab, num, **CONSTANTS | shared, PDL=pdl,
        launch_pdl=pdl, **OPTIONS,
    )  # fmt: skip


KERNEL = _kernel
CONSTANTS = {"PARTS": PARTS, "GROUPS": GROUPS, "MEETING": MEETING, "SUMS": SUMS}
CONSTANTS |= {"BLOCK": BLOCK, "TILE": 256, "SCAN": 1024}
OPTIONS = {"num_warps": 8, "maxnreg": 128, "enable_fp_fusion": False}  # two programs a multiprocessor
