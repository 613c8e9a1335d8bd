"""Samples a token after each of a step's last tokens, whatever their requests ask for, with what lies on the device.

    logits + logit_bias, end tokens masked before min_tokens, tokens that are not allowed masked
        -> repetition, presence, frequency penalties -> / temperature -> min_p -> top_k -> top_p -> draw

Every request has a row of `Requests`, written when it is admitted, so that a step brings nothing along. The rules are
those of reference.py, whose bits these are: integer weights, the inverse of their cumulative sum in vocabulary order,
random numbers that are a function of (seed, position), the lowest id first among equals.

Six launches of fixed grids: find the largest, and count the history, for penalties; adjust, and find the largest again;
weigh, and sum up for log-probabilities; pick; pick from the whole vocabulary, where few likely tokens do not settle it;
log-probabilities. The programs of a launch that no sequence of the step asks for know it from the step's table, while
the launch ahead still runs, and end: a greedy step is one pass over its logits. A filter keeps a prefix of the tokens
in falling order: where it ends is found, bit by bit, among the tokens that are at least 2^-13 as likely as the
likeliest, of which each 4096 tokens may hold 128; where those do not suffice, among all of them, in 23 looks at most
(pick_from_all.py).

Shapes: logits [L, V], fp32 or bf16; sampled [L], cu_samples [N + 1], sequence and position [T], row [N]: int32, as in
the sequence table; history int32 [rows, context]; `work` is Scratch.of(L, V, K, device). What is returned lies in it:
tokens int64 [L], logprobs fp32 [L], top_tokens int64 and top_logprobs fp32 [L, K], the latter three where the request
asks for them. What lies past cu_samples[-1], and past the alternatives asked for, may be anything.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deltagram.kernels._triton import Impl, choose
from deltagram.kernels.sample_tokens.pick_from_all import MEETING
from deltagram.kernels.sample_tokens.reference import reference as _reference
from deltagram.kernels.sample_tokens.rows import BLOCK
from deltagram.kernels.sample_tokens.triton import SEGMENT
from deltagram.kernels.sample_tokens.triton import ahead_of_time as ahead_of_time
from deltagram.kernels.sample_tokens.triton import launch as _launch

SPECIAL, PENALIZED, CONSTRAINED, REPORTED, DRAWN, FILTERED = (1 << bit for bit in range(6))


class Requests(NamedTuple):
    """What requests ask for, by row.

    whole: int64 [rows, 6], flags (the sum of the names above), seed, top_k, prompt length, number of edits, number of
    alternatives to report; real: float64 [rows, 6], temperature, top_p, min_p, repetition, presence and frequency
    penalty; edits: int32 [rows, 3, E], token, value (the bits of a float32), and how many output tokens end it;
    allowed: uint8 [rows, ceil(V / 8)], a bit a token, the lowest first, read where the row is CONSTRAINED.
    """

    whole: Tensor
    real: Tensor
    edits: Tensor
    allowed: Tensor

    @staticmethod
    def empty(num_rows: int, vocab_size: int, max_edits: int, device: torch.device) -> Requests:
        """Rows that ask for nothing: greedy."""
        return Requests(
            torch.zeros(num_rows, 6, dtype=torch.int64, device=device),
            torch.zeros(num_rows, 6, dtype=torch.float64, device=device),
            torch.zeros(num_rows, 3, max_edits, dtype=torch.int32, device=device),
            torch.zeros(num_rows, -(-vocab_size // 8), dtype=torch.uint8, device=device),
        )


class Scratch(NamedTuple):
    """Memory of the op: see triton.py for what each holds on the way, and the file's docstring for what is returned."""

    tokens: Tensor
    logprobs: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor
    counts: Tensor  # int32 [L, V], zero before and after
    adjusted: Tensor  # fp32 [L, V]
    weights: Tensor  # int64 [L, V]
    block_real: Tensor  # fp32 [L, blocks, 3]: largest adjusted logit; largest logit; sum of exp(logit - largest)
    block_whole: Tensor  # int32 [L, blocks, 3]: where the first two are; likely tokens
    block_weight: Tensor  # int64 [L, blocks]
    likely_token: Tensor  # int32 [L, blocks, SEGMENT]
    unsettled: Tensor  # int32 [L]
    meeting: Tensor  # int64 [L, MEETING]; its sums and counts are zero before and after

    @staticmethod
    def of(num_samples: int, vocab_size: int, max_logprobs: int, device: torch.device) -> Scratch:
        """For up to `num_samples` rows of logits: rows [:L] of each tensor serve L of them."""
        blocks = -(-vocab_size // BLOCK)

        def made(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_samples, *shape, dtype=dtype, device=device)

        return Scratch(
            made(dtype=torch.int64),
            made(dtype=torch.float32),
            made(max_logprobs, dtype=torch.int64),
            made(max_logprobs, dtype=torch.float32),
            made(vocab_size, dtype=torch.int32),
            made(vocab_size, dtype=torch.float32),
            made(vocab_size, dtype=torch.int64),
            made(blocks, 3, dtype=torch.float32),
            made(blocks, 3, dtype=torch.int32),
            made(blocks, dtype=torch.int64),
            made(blocks, SEGMENT, dtype=torch.int32),
            made(dtype=torch.int32),
            made(MEETING, dtype=torch.int64),
        )


def sample_tokens(
    logits: Tensor,
    sampled: Tensor,
    cu_samples: Tensor,
    sequence: Tensor,
    position: Tensor,
    row: Tensor,
    history: Tensor,
    requests: Requests,
    work: Scratch,
    impl: Impl = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See the file's docstring."""
    body = choose(impl, logits, _reference, _launch)
    return body(logits, sampled, cu_samples, sequence, position, row, history, requests, work)
