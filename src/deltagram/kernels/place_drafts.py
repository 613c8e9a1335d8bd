"""Drafts into the token history, past what is known of each request.

    tokens[row[n], lengths[row[n]] + i] = drafts[n, i]   for i < count[n]

Whoever drafts writes them before anything of the step that verifies them reads the history, and leaves lengths alone:
what follows a request's length is nobody's text.

Shapes: drafts [N, D], int32 or int64; count, row [N] int32; tokens [rows, context] int32, updated in place; lengths
[rows] int32. Rows with drafts are distinct, and their drafts lie within the context.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._triton import Build, Impl, choose, jit, power_of_two, tl


def place_drafts(
    drafts: Tensor, count: Tensor, row: Tensor, tokens: Tensor, lengths: Tensor, impl: Impl = None
) -> None:
    """See the file's docstring."""
    choose(impl, tokens, _reference, _launch)(drafts, count, row, tokens, lengths)


def _reference(drafts: Tensor, count: Tensor, row: Tensor, tokens: Tensor, lengths: Tensor) -> None:
    n, i = (torch.arange(drafts.shape[1], device=tokens.device) < count[:, None]).nonzero(as_tuple=True)
    owner = row[n].long()
    tokens[owner, lengths[owner].long() + i] = drafts[n, i].int()


# The parts of the packed array lie where the bucket puts them.
@jit(do_not_specialize=["context", "stride"], do_not_specialize_on_alignment=["drafts", "count", "row"])
def _kernel(drafts, count, row, tokens, lengths, context, stride, D: tl.constexpr):  # type: ignore[no-untyped-def]
    n = tl.program_id(0)
    drafted = tl.load(count + n)
    if drafted == 0:
        return
    owner = tl.load(row + n).to(tl.int64)
    i = tl.arange(0, D)
    mine = tl.load(drafts + n.to(tl.int64) * stride + i, mask=i < drafted, other=0).to(tl.int32)
    tl.store(tokens + owner * context + tl.load(lengths + owner) + i, mine, mask=i < drafted)


def _launch(drafts: Tensor, count: Tensor, row: Tensor, tokens: Tensor, lengths: Tensor) -> None:
    assert tokens.is_contiguous() and drafts.stride(1) == 1
    width = power_of_two(drafts.shape[1])
    _kernel[(max(len(row), 1),)](
        drafts, count, row, tokens, lengths, tokens.shape[1], drafts.stride(0), D=width, num_warps=1
    )


def ahead_of_time() -> list[Build]:
    types = dict.fromkeys(("count", "row", "tokens", "lengths"), "*i32") | {"context": "i32", "stride": "i32"}
    return [Build(_kernel, types | {"drafts": kind}, {"D": 8}, {"num_warps": 1}) for kind in ("*i32", "*i64")]
