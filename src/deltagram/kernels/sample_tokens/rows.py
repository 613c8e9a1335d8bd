"""What the kernels of sample_tokens share: whose a row of the logits is, the order of tokens, random numbers.

Arithmetic is that of reference.py step by step.
"""

from __future__ import annotations

from typing import Any

from deltagram.kernels._triton import jit, tl

BLOCK = 4096  # tokens of the vocabulary
# Not the vocabulary: where it is known to be a multiple of 16, loads are of 16 bytes.
SIZES = ["sampled_end", "num", "context", "blocks", "max_edits", "max_logprobs"]


def _constant(value: Any) -> Any:
    return value if tl is None else tl.constexpr(value)


ONE = _constant(2.0**42)  # see reference.py
LIKELY = _constant(2.0**29)  # 2^-13 of it
ROUND = _constant(2.0**52)  # a number below it, plus and minus it, is rounded to an integer, ties to even
_SEED = _constant(0xDA942042E4DD58B5 - 2**64)
_POSITION = _constant(0x9E3779B97F4A7C15 - 2**64)
_MIX_1 = _constant(0xBF58476D1CE4E5B9 - 2**64)
_MIX_2 = _constant(0x94D049BB133111EB - 2**64)


@jit
def let_next(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel start: until `wait` it may look at what no kernel of this op writes. See _triton.py."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@jit
def wait(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for the kernel before: from here on what it has written may be read. Every program waits."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@jit
def owner_of(n, sampled, cu_samples, sampled_end, sequence, row, whole):  # type: ignore[no-untyped-def]
    """The request row, token and flags of row n of the logits; row -1 past the real ones."""
    real = n < tl.load(cu_samples + sampled_end)
    token = tl.load(sampled + n)
    owner = tl.load(row + tl.load(sequence + token), mask=real, other=-1).to(tl.int64)
    return owner, token, tl.load(whole + owner * 6, mask=real, other=0)


@jit
def asked_for(flags: tl.constexpr, row, whole, sequences):  # type: ignore[no-untyped-def]
    """Whether a sequence of the step may ask for one of `flags`: two looks, at what no kernel of this op writes."""
    found = sequences - sequences
    for first in range(0, sequences, 128):
        n = first + tl.arange(0, 128)
        owner = tl.load(row + n, mask=n < sequences, other=0).to(tl.int64)
        asked = tl.load(whole + owner * 6, mask=n < sequences, other=0)
        found |= tl.max((asked & flags).to(tl.int32), 0)
    return found != 0


@jit
def uniform(seed, position):  # type: ignore[no-untyped-def]
    state = seed * _SEED + position * _POSITION
    state = (state ^ ((state >> 30) & ((1 << 34) - 1))) * _MIX_1
    state = (state ^ ((state >> 27) & ((1 << 37) - 1))) * _MIX_2
    state = state ^ ((state >> 31) & ((1 << 33) - 1))
    return tl.maximum((state >> 11) & ((1 << 53) - 1), 1).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@jit
def ordered(x):  # type: ignore[no-untyped-def]
    """fp32 as int32 in the same order; the two zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@jit
def target_of(seed, position, total):  # type: ignore[no-untyped-def]
    return tl.minimum((uniform(seed, position) * total.to(tl.float64)).to(tl.int64), total - 1)
