"""Compiled body of commit_tokens.py."""

from __future__ import annotations

from torch import Tensor

from deltagram.kernels._compiled import compiled
from deltagram.kernels._vectors import get_int, get_long, put_int


@compiled
def _kernel(
    sampled: int, cu_samples: int, row: int, length: int, num_draft: int, tokens: int, context: int, lengths: int,
    untaken: int, out: int, sequences: int, width: int,
) -> None:  # fmt: skip
    for n in range(sequences):
        first = get_int(cu_samples, n)
        put_int(out, n * width, 0)
        if first < get_int(cu_samples, n + 1):
            owner, drafts = get_int(row, n), get_int(num_draft, n)
            begin, accepted = get_int(length, n) - drafts, 0
            while (
                accepted < drafts
                and get_int(tokens, owner * context + begin + accepted) == get_long(sampled, first + accepted)
            ):  # fmt: skip
                put_int(out, n * width + 1 + accepted, get_long(sampled, first + accepted))
                accepted += 1
            token = get_long(sampled, first + accepted)
            put_int(out, n * width, accepted + 1)
            put_int(out, n * width + 1 + accepted, token)
            put_int(tokens, owner * context + begin + accepted, token)
            put_int(lengths, owner, begin + accepted + 1)
            put_int(untaken, owner, get_int(untaken, owner) + accepted)


def commit_tokens(
    sampled: Tensor, cu_samples: Tensor, row: Tensor, length: Tensor, num_draft: Tensor, tokens: Tensor,
    lengths: Tensor, untaken: Tensor, steps: Tensor, out: Tensor,
) -> None:  # fmt: skip
    assert tokens.is_contiguous() and out.is_contiguous()
    steps += 1
    _kernel(
        sampled.data_ptr(), cu_samples.data_ptr(), row.data_ptr(), length.data_ptr(), num_draft.data_ptr(),
        tokens.data_ptr(), tokens.shape[1], lengths.data_ptr(), untaken.data_ptr(), out.data_ptr(), len(row),
        out.shape[1],
    )  # fmt: skip
