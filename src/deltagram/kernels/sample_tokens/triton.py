"""Kernels of sample_tokens: see the package's docstring. Row n of the logits, block b of BLOCK tokens.

Arithmetic is that of reference.py step by step: no product and sum is fused, quotients are rounded to nearest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from deltagram.kernels._triton import Build, dependent_launch, jit, power_of_two, tl
from deltagram.kernels.sample_tokens import first_pass, pick_from_all
from deltagram.kernels.sample_tokens.rows import (
    BLOCK,
    LIKELY,
    ONE,
    ROUND,
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

SEGMENT = 128  # likely tokens of a block that are kept aside
# Programs, at most, that share the rows which ask for more than their largest: three a multiprocessor of an H200, for
# which their registers are limited.
PROGRAMS = 396
SHARED = {"num_warps": 8, "maxnreg": 80, "enable_fp_fusion": False}


@jit(do_not_specialize=SIZES)
def _adjust_kernel(  # type: ignore[no-untyped-def]
    logits, sampled, cu_samples, sampled_end, sequence, position, row, whole, real, edits, allowed, counts, adjusted,
    block_real, block_whole, vocab, num, blocks, max_edits, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next(PDL)
    asked = asked_for(5, row, whole, sampled_end)
    wait(PDL)
    if not asked:
        return
    item = tl.program_id(0)
    while item < num * blocks:
        n, b = item // blocks, item % blocks
        owner, token, flags = owner_of(n, sampled, cu_samples, sampled_end, sequence, row, whole)
        if (flags & 5) != 0:
            outputs = (tl.load(position + token) + 1 - tl.load(whole + owner * 6 + 3)).to(tl.int32)
            mine = edits + owner * 3 * max_edits
            number = tl.load(whole + owner * 6 + 4).to(tl.int32)
            at = b * BLOCK + tl.arange(0, BLOCK)
            inside = at < vocab
            x = tl.load(logits + n.to(tl.int64) * vocab + at, mask=inside, other=-float("inf")).to(tl.float32)
            if (flags & 4) != 0:
                bits = tl.load(allowed + owner * ((vocab + 7) // 8) + at // 8, mask=inside, other=0)
                x = tl.where(((bits >> (at % 8).to(tl.uint8)) & 1) != 0, x, -float("inf"))
            if (flags & 1) != 0:
                e = 0
                while e < number:
                    holds = outputs < tl.load(mine + 2 * max_edits + e)
                    value = tl.load(mine + max_edits + e).to(tl.float32, bitcast=True)
                    x = tl.where((at == tl.load(mine + e)) & holds, x + value, x)
                    e += 1
                if (flags & 2) != 0:
                    seen = counts + n.to(tl.int64) * vocab + at
                    count = tl.load(seen, mask=inside, other=0)
                    tl.store(seen, tl.zeros_like(count), mask=inside & (count != 0))
                    said = count & ((1 << 30) - 1)
                    repetition = tl.load(real + owner * 6 + 3).to(tl.float32)
                    presence = tl.load(real + owner * 6 + 4).to(tl.float32)
                    frequency = tl.load(real + owner * 6 + 5).to(tl.float32)
                    repeated = tl.where(
                        x > 0, tl.div_rn(x, tl.full([BLOCK], 1.0, tl.float32) * repetition), x * repetition
                    )
                    x = tl.where(count != 0, repeated, x)
                    x = x - said.to(tl.float32) * frequency - (said > 0).to(tl.float32) * presence
            x = tl.where(inside, x, -float("inf"))
            tl.store(adjusted + n.to(tl.int64) * vocab + at, x, mask=inside)
            part = n.to(tl.int64) * blocks + b
            rank = tl.where(x == x, x, float("inf"))
            largest = tl.max(rank, 0)
            tl.store(block_real + part * 3, largest)
            tl.store(block_whole + part * 3, tl.min(tl.where((rank == largest) & inside, at, vocab), 0))
        item += tl.num_programs(0)


@jit
def _weights(x, largest, temperature):  # type: ignore[no-untyped-def]
    below = (x.to(tl.float64) - largest) / temperature
    below = tl.where(below == below, below, 0.0)
    return ((tl.exp(below) * ONE + ROUND) - ROUND).to(tl.int64)


@jit
def _largest(block_real, n, blocks, raw, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest of each block, adjusted, or `raw` (1)."""
    b = tl.arange(0, BLOCKS)
    part = n.to(tl.int64) * blocks + b
    return tl.load(block_real + part * 3 + raw, mask=b < blocks, other=-float("inf"))


@jit(do_not_specialize=[*SIZES, "vocab"])  # with wide loads the scan below takes half as long again
def _weigh_kernel(  # type: ignore[no-untyped-def]
    logits, sampled, cu_samples, sampled_end, sequence, row, whole, real, adjusted, weights, block_real, block_whole,
    block_weight, likely_token, vocab, num, blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SEGMENT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Drawn rows' weights, and what log-probabilities divide by."""
    let_next(PDL)
    asked = asked_for(24, row, whole, sampled_end)
    wait(PDL)
    if not asked:
        return
    item = tl.program_id(0)
    while item < num * blocks:
        n, b = item // blocks, item % blocks
        owner, _, flags = owner_of(n, sampled, cu_samples, sampled_end, sequence, row, whole)
        line, part = n.to(tl.int64) * vocab, n.to(tl.int64) * blocks + b
        at = b * BLOCK + tl.arange(0, BLOCK)
        inside = at < vocab
        if (flags & 8) != 0:
            x = tl.load(logits + line + at, mask=inside, other=-float("inf")).to(tl.float32)
            most = tl.load(block_real + part * 3 + 1)
            tl.store(block_real + part * 3 + 2, tl.sum(tl.where(inside, tl.exp(x - most), 0.0), 0))
        if (flags & 16) != 0:
            x = tl.load(adjusted + line + at, mask=inside, other=-float("inf"))
            largest = tl.max(_largest(block_real, n, blocks, 0, BLOCKS), 0).to(tl.float64)
            weight = tl.where(inside, _weights(x, largest, tl.load(real + owner * 6)), 0)
            tl.store(block_weight + part, tl.sum(weight, 0))
            if (flags & 32) != 0:
                tl.store(weights + line + at, weight, mask=inside)
                likely = weight.to(tl.float64) >= LIKELY
                place = tl.cumsum(likely.to(tl.int32), 0) - 1
                tl.store(likely_token + part * SEGMENT + place, at, mask=likely & (place < SEGMENT))
                tl.store(block_whole + part * 3 + 2, tl.sum(likely.to(tl.int32), 0))
        item += tl.num_programs(0)


@jit(do_not_specialize=SIZES)
def _pick_kernel(  # type: ignore[no-untyped-def]
    sampled, cu_samples, sampled_end, sequence, position, row, whole, real, adjusted, weights, block_real, block_whole,
    block_weight, likely_token, unsettled, tokens, vocab, blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SEGMENT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next(PDL)
    n = tl.program_id(0)
    owner, token, flags = owner_of(n, sampled, cu_samples, sampled_end, sequence, row, whole)
    wait(PDL)
    if owner < 0:
        tl.store(tokens + n, 0)
        return
    line = n.to(tl.int64) * vocab
    raw = ((flags & 5) == 0).to(tl.int32)
    largest = _largest(block_real, n, blocks, raw, BLOCKS)
    b = tl.arange(0, BLOCKS)
    part = n.to(tl.int64) * blocks + b
    if (flags & 16) == 0:
        where = tl.load(block_whole + part * 3 + raw, mask=b < blocks, other=vocab)
        best = tl.max(largest, 0)
        tl.store(tokens + n, tl.min(tl.where((largest == best) & (b < blocks), where, vocab), 0).to(tl.int64))
        return
    seed, place = tl.load(whole + owner * 6 + 1), (tl.load(position + token) + 1).to(tl.int64)
    block_sum = tl.load(block_weight + part, mask=b < blocks, other=0)
    everything = tl.sum(block_sum, 0)
    if (flags & 32) == 0:
        target = target_of(seed, place, everything)
        up_to = tl.cumsum(block_sum, 0)
        chosen = tl.sum((up_to <= target).to(tl.int32), 0)
        before = tl.sum(tl.where(b < chosen, block_sum, 0), 0)
        at = chosen * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(adjusted + line + at, mask=at < vocab, other=-float("inf"))
        weight = _weights(x, tl.max(largest, 0).to(tl.float64), tl.load(real + owner * 6))
        up_to = before + tl.cumsum(tl.where(at < vocab, weight, 0), 0)
        tl.store(tokens + n, chosen * BLOCK + tl.sum((up_to <= target).to(tl.int32), 0).to(tl.int64))
        return
    top_k, top_p, min_p = tl.load(whole + owner * 6 + 2), tl.load(real + owner * 6 + 1), tl.load(real + owner * 6 + 2)
    likely = tl.load(block_whole + part * 3 + 2, mask=b < blocks, other=0)
    at = tl.arange(0, BLOCKS * SEGMENT)
    segment = at // SEGMENT
    listed = tl.load(block_whole + (n.to(tl.int64) * blocks + segment) * 3 + 2, mask=segment < blocks, other=0)
    there = at % SEGMENT < listed
    place_of = likely_token + n.to(tl.int64) * blocks * SEGMENT
    id = tl.load(place_of + at, mask=there, other=0)
    key = ordered(tl.load(adjusted + line + id, mask=there, other=0.0)).to(tl.int64) + (1 << 31)
    key = tl.where(there, key, -1)
    weight = tl.where(there, tl.load(weights + line + id, mask=there, other=0), 0)
    kept = there & (weight.to(tl.float64) >= min_p * ONE)
    count = tl.sum(kept.to(tl.int64), 0)
    # Whether every token that min_p and top_k leave is listed; else whether top_p, alone, ends among those listed.
    settled = ((top_k > 0) & (count >= top_k)) | (min_p * ONE >= LIKELY)
    by_top_p = (top_k == 0) & (min_p == 0) & (tl.sum(weight, 0).to(tl.float64) >= top_p * everything.to(tl.float64))
    if (tl.max(likely, 0) > SEGMENT) | ((settled | by_top_p) == 0):
        tl.store(unsettled + n, 1)
        return
    if (top_k > 0) & (count > top_k):
        edge = count - count
        for step in range(32):
            tried = edge | ((count - count + 1) << (31 - step))
            edge = tl.where(tl.sum((kept & (key >= tried)).to(tl.int64), 0) >= top_k, tried, edge)
        above = kept & (key > edge)
        equal = kept & (key == edge)
        left = top_k - tl.sum(above.to(tl.int64), 0)
        kept = above | (equal & (tl.cumsum(equal.to(tl.int64), 0) <= left))
    if top_p < 1:
        total = tl.where(settled, tl.sum(tl.where(kept, weight, 0), 0), everything)
        enough = top_p * total.to(tl.float64)
        edge = count - count
        for step in range(32):
            tried = edge | ((count - count + 1) << (31 - step))
            mass = tl.sum(tl.where(kept & (key >= tried), weight, 0), 0)
            edge = tl.where(mass.to(tl.float64) >= enough, tried, edge)
        above = kept & (key > edge)
        equal = kept & (key == edge)
        ahead = tl.sum(tl.where(above, weight, 0), 0) + (tl.cumsum(equal.to(tl.int64), 0) - 1) * weight
        kept = above | (equal & (ahead.to(tl.float64) < enough))
    weight = tl.where(kept, weight, 0)
    target = target_of(seed, place, tl.sum(weight, 0))
    chosen = tl.sum((tl.cumsum(weight, 0) <= target).to(tl.int32), 0)
    tl.store(tokens + n, tl.load(place_of + chosen).to(tl.int64))


@jit(do_not_specialize=SIZES)
def _report_kernel(  # type: ignore[no-untyped-def]
    logits, sampled, cu_samples, sampled_end, sequence, row, whole, block_real, block_whole, tokens, logprobs,
    top_tokens, top_logprobs, vocab, blocks, max_logprobs, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next(PDL)
    n = tl.program_id(0)
    owner, _, flags = owner_of(n, sampled, cu_samples, sampled_end, sequence, row, whole)
    wait(PDL)
    if (owner < 0) | ((flags & 8) == 0):
        return
    b = tl.arange(0, BLOCKS)
    part, line = n.to(tl.int64) * blocks + b, n.to(tl.int64) * vocab
    best = tl.load(block_real + part * 3 + 1, mask=b < blocks, other=-float("inf"))
    sums = tl.load(block_real + part * 3 + 2, mask=b < blocks, other=0.0)
    where = tl.load(block_whole + part * 3 + 1, mask=b < blocks, other=vocab)
    largest = tl.max(best, 0)
    norm = largest + tl.log(tl.sum(tl.where(sums > 0, sums * tl.exp(best - largest), 0.0), 0))
    tl.store(logprobs + n, tl.load(logits + line + tl.load(tokens + n)).to(tl.float32) - norm)
    number, i = tl.load(whole + owner * 6 + 5).to(tl.int32), 0
    while i < number:
        value = tl.max(best, 0)
        id = tl.min(tl.where(best == value, where, vocab), 0)
        tl.store(top_tokens + n.to(tl.int64) * max_logprobs + i, id.to(tl.int64))
        tl.store(top_logprobs + n.to(tl.int64) * max_logprobs + i, value - norm)
        of = id // BLOCK  # that block's next: smaller, or equal and further on
        at = of * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + line + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
        left = (at < vocab) & ((x < value) | ((x == value) & (at > id)))
        next_value = tl.max(tl.where(left, x, -float("inf")), 0)
        next_id = tl.min(tl.where(left & (x == next_value), at, vocab), 0)
        best = tl.where(b == of, next_value, best)
        where = tl.where(b == of, next_id, where)
        i += 1


def launch(
    logits: Tensor,
    sampled: Tensor,
    cu_samples: Tensor,
    sequence: Tensor,
    position: Tensor,
    row: Tensor,
    history: Tensor,
    requests: Requests,
    work: Scratch,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num, vocab = logits.shape
    blocks, end = work.block_weight.shape[1], len(cu_samples) - 1
    pdl = dependent_launch(logits)
    wide, chained = power_of_two(blocks), {"PDL": pdl, "launch_pdl": pdl}
    exact = {"enable_fp_fusion": False} | chained
    assert logits.is_contiguous() and history.is_contiguous() and num <= len(work.tokens)
    given = sampled, cu_samples, end, sequence
    sharing = (min(num * blocks, PROGRAMS),)
    first_pass.launch(logits, sampled, cu_samples, sequence, position, row, history, requests, work, pdl)
    _adjust_kernel[sharing](
        logits, *given, position, row, requests.whole, requests.real, requests.edits, requests.allowed, work.counts,
        work.adjusted, work.block_real, work.block_whole, vocab, num, blocks, requests.edits.shape[2], BLOCK,
        **SHARED, **chained,
    )  # fmt: skip
    _weigh_kernel[sharing](
        logits, *given, row, requests.whole, requests.real, work.adjusted, work.weights, work.block_real,
        work.block_whole, work.block_weight, work.likely_token, vocab, num, blocks, BLOCK, wide, SEGMENT, **SHARED,
        **chained,
    )  # fmt: skip
    _pick_kernel[(num,)](
        *given, position, row, requests.whole, requests.real, work.adjusted, work.weights, work.block_real,
        work.block_whole, work.block_weight, work.likely_token, work.unsettled, work.tokens, vocab, blocks, BLOCK, wide,
        SEGMENT, num_warps=16, **exact,
    )  # fmt: skip
    pick_from_all.launch(sampled, cu_samples, sequence, position, row, requests, work, num, vocab, pdl)
    _report_kernel[(num,)](
        logits, *given, row, requests.whole, work.block_real, work.block_whole, work.tokens, work.logprobs,
        work.top_tokens, work.top_logprobs, vocab, blocks, work.top_tokens.shape[1], BLOCK, wide, num_warps=8,
        **chained,
    )  # fmt: skip
    return work.tokens[:num], work.logprobs[:num], work.top_tokens[:num], work.top_logprobs[:num]


def ahead_of_time() -> list[Build]:
    ints = dict.fromkeys(("sampled", "cu_samples", "sequence", "position", "row", "history", "counts", "edits"), "*i32")
    ints |= dict.fromkeys(("block_whole", "likely_token", "unsettled"), "*i32")
    types = ints | dict.fromkeys([*SIZES, "vocab"], "i32") | {"allowed": "*u8", "real": "*fp64"}
    types |= dict.fromkeys(("whole", "weights", "block_weight", "tokens", "top_tokens", "meeting"), "*i64")
    types |= dict.fromkeys(("adjusted", "block_real", "logprobs", "top_logprobs"), "*fp32")
    sizes = {"BLOCK": BLOCK, "BLOCKS": 64, "SEGMENT": SEGMENT, "PDL": False}
    sizes |= first_pass.CONSTANTS | pick_from_all.CONSTANTS
    exact = {"enable_fp_fusion": False}
    kernels = [
        (first_pass.KERNEL, first_pass.OPTIONS),
        (_adjust_kernel, SHARED), (_weigh_kernel, SHARED),
        (_pick_kernel, {"num_warps": 16, **exact}), (pick_from_all.KERNEL, pick_from_all.OPTIONS),
        (_report_kernel, {"num_warps": 8}),
    ]  # fmt: skip
    return [
        Build(
            kernel,
            types | {"logits": logits},
            {name: value for name, value in sizes.items() if name in kernel.arg_names},
            options,
        )
        for logits in ("*bf16", "*fp32")
        for kernel, options in kernels
    ]
