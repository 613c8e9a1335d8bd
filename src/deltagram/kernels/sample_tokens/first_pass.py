"""The largest of each BLOCK logits as they are, which is all that a greedy row asks for; and, for rows with penalties,
how often their requests' tokens were said.

A program looks at nothing but its logits, and keeps few registers: the pass goes at the speed of memory only while many
loads are on their way. Where the logits are a library's product, whose end alone lets this launch begin, all that a
program does puts off the step's end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from deltagram.kernels._triton import jit, tl
from deltagram.kernels.sample_tokens.rows import BLOCK, SIZES, let_next, owner_of, wait

if TYPE_CHECKING:
    from deltagram.kernels.sample_tokens import Requests, Scratch

COUNTERS = 4  # programs that count a row's history
CHUNK = 2048


@jit(do_not_specialize=SIZES)
def _kernel(  # type: ignore[no-untyped-def]
    logits, sampled, cu_samples, sampled_end, sequence, position, row, whole, history, counts, block_real, block_whole,
    context, vocab, blocks, BLOCK: tl.constexpr, COUNTERS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next(PDL)
    b, n = tl.program_id(0), tl.program_id(1)
    if b >= blocks:
        owner, token, flags = owner_of(n, sampled, cu_samples, sampled_end, sequence, row, whole)
        wait(PDL)
        if (flags & 2) != 0:
            known, prompt = tl.load(position + token) + 1, tl.load(whole + owner * 6 + 3)
            mine = counts + n.to(tl.int64) * vocab
            first = (b - blocks) * CHUNK
            while first < known:
                at = first + tl.arange(0, CHUNK)
                there = at < known
                said = tl.load(history + owner * context + at, mask=there, other=0)
                tl.atomic_add(mine + said, 1, mask=there & (at >= prompt), sem="relaxed")  # outputs
                # Whether the prompt has it.
                tl.atomic_or(mine + said, 1 << 30, mask=there & (at < prompt), sem="relaxed")
                first += COUNTERS * CHUNK
    else:
        real = n < tl.load(cu_samples + sampled_end)
        wait(PDL)
        if real:
            at = b * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(logits + n.to(tl.int64) * vocab + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
            part = n.to(tl.int64) * blocks + b
            largest = tl.max(tl.where(x == x, x, float("inf")), 0)
            tl.store(block_real + part * 3 + 1, largest)
            tl.store(block_whole + part * 3 + 1, tl.min(tl.where(x < largest, vocab, at), 0))  # NaN is not below


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
    pdl: bool,
) -> None:
    """Fill what `work` says of blocks of the logits as they are, and its counts."""
    num, vocab = logits.shape
    blocks = work.block_weight.shape[1]
    KERNEL[(blocks + COUNTERS, num)](
        logits, sampled, cu_samples, len(cu_samples) - 1, sequence, position, row, requests.whole, history, work.counts,
        work.block_real, work.block_whole, history.shape[1], vocab, blocks, **CONSTANTS, PDL=pdl, launch_pdl=pdl,
        **OPTIONS,
    )  # fmt: skip


KERNEL = _kernel
CONSTANTS = {"BLOCK": BLOCK, "COUNTERS": COUNTERS, "CHUNK": CHUNK}
OPTIONS = {"num_warps": 4}
