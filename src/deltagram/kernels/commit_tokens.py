"""What a step sampled, into the token history: the accepted drafts stay, the token after them is added.

Sequence n was sampled after its last 1 + num_draft tokens. Its drafts, which the history holds past its length, are
accepted up to the first that was not sampled; then the token that was sampled in its place (or after the last) is the
history's next one. With a accepted drafts and begin = length - num_draft, the position of the first sampled token:
    tokens[row, begin + a] = sampled[first + a];  lengths[row] = begin + a + 1;  untaken[row] += a
That the sampled tokens are those of a run without drafts makes the outcome that of a run without drafts, whatever the
temperature: a token is a function of (seed, position).

`synthetic`, for benchmarks alone, is the mean number of tokens that a sequence with drafts is to add, whatever was
sampled: a = min(num_draft, floor(synthetic - 1 + u)) with u in [0, 1) a hash of (row, begin). 0 compares.

Shapes: sampled int64 [L]; cu_samples [N + 1], row, length, num_draft [N] int32, as in the sequence table; tokens [rows,
context], lengths, untaken [rows] int32, updated in place; steps int64 [1], one more; out int32 [N, 2 + max_draft],
the number of tokens of each sequence (0 for one that was not sampled, and padding), then the tokens; the rest of a row
is as it was. On a GPU the table is read before the launch ahead has ended (_triton.py: dependent_launch).
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._triton import Build, Impl, choose, dependent_launch, jit, on_cpu, tl


def commit_tokens(
    sampled: Tensor,
    cu_samples: Tensor,
    row: Tensor,
    length: Tensor,
    num_draft: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    untaken: Tensor,
    steps: Tensor,
    out: Tensor,
    synthetic: float = 0.0,
    impl: Impl = None,
) -> None:
    """See the file's docstring."""
    body = choose(impl, tokens, _reference, _launch, None if synthetic else _compare)
    body(sampled, cu_samples, row, length, num_draft, tokens, lengths, untaken, steps, out, synthetic)


def _reference(
    sampled: Tensor,
    cu_samples: Tensor,
    row: Tensor,
    length: Tensor,
    num_draft: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    untaken: Tensor,
    steps: Tensor,
    out: Tensor,
    synthetic: float = 0.0,
) -> None:
    steps += 1
    out[:, 0] = 0
    (live,) = cu_samples.diff().nonzero(as_tuple=True)
    if len(live) == 0:
        return
    first, owner, drafts = cu_samples[live].long(), row[live].long(), num_draft[live].long()
    begin = length[live].long() - drafts
    offset = torch.arange(out.shape[1] - 1, device=out.device)
    drafted = offset < drafts[:, None]
    mine = sampled[torch.where(drafted, first[:, None] + offset, 0)].int()
    agree = drafted & (tokens[owner[:, None], torch.where(drafted, begin[:, None] + offset, 0)] == mine)
    accepted = agree.cumprod(1).sum(1)
    if synthetic:
        whole, part = _parts(synthetic)
        accepted = torch.minimum(drafts, whole + (_mixed(owner, begin) < part))
        kept = offset < accepted[:, None]
        tokens[owner[:, None].expand_as(kept)[kept], (begin[:, None] + offset)[kept]] = mine[kept]
    token = sampled[first + accepted].int()
    tokens[owner, begin + accepted] = token
    lengths[owner] = (begin + accepted + 1).int()
    untaken[owner] += accepted.int()
    out[live, 0] = (accepted + 1).int()
    report = torch.where(offset < accepted[:, None], mine, out[live, 1:])
    out[live, 1:] = report.scatter(1, accepted[:, None], token[:, None])


_compiled = on_cpu("commit_tokens")
_U32 = 0xFFFFFFFF


def _compare(*arguments: Tensor | float) -> None:
    _compiled(*arguments[:-1])


def _parts(synthetic: float) -> tuple[int, int]:
    """Accepted drafts a step, and of 2^32 steps those with one more."""
    whole = int(synthetic - 1)
    return whole, int((synthetic - 1 - whole) * 2**32)


def _mixed(owner: Tensor, begin: Tensor) -> Tensor:
    """32 bits that depend on both, as int64; so does `_draw`."""
    x = (begin * 2654435761 + owner * 40503 + 12345) & _U32
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & _U32
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & _U32
    return x ^ (x >> 16)


@jit
def _draw(owner, begin):  # type: ignore[no-untyped-def]
    x = (begin.to(tl.int64) * 2654435761 + owner * 40503 + 12345) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return x ^ (x >> 16)


@jit(do_not_specialize=["context", "width", "sequences", "whole", "part"])
def _kernel(  # type: ignore[no-untyped-def]
    sampled,
    cu_samples,
    row,
    length,
    num_draft,
    tokens,
    lengths,
    untaken,
    steps,
    out,
    context,
    width,
    sequences,
    whole,
    part,
    SYNTHETIC: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0)
    there = n < sequences  # not in a step without any
    first, last = tl.load(cu_samples + n, mask=there, other=0), tl.load(cu_samples + n + 1, mask=there, other=0)
    owner, drafts = tl.load(row + n, mask=there, other=0).to(tl.int64), tl.load(num_draft + n, mask=there, other=0)
    begin = tl.load(length + n, mask=there, other=0) - drafts
    if PDL:
        tl.extra.cuda.gdc_wait()
    if n == 0:
        tl.store(steps, tl.load(steps) + 1)
    if n == sequences:
        return
    mine = out + n.to(tl.int64) * width
    if first == last:
        tl.store(mine, 0)
        return
    history = tokens + owner * context + begin
    accepted = 0
    token = tl.load(sampled + first).to(tl.int32)
    if SYNTHETIC:
        kept = tl.minimum(drafts, (whole + (_draw(owner, begin) < part)).to(tl.int32))
        while accepted < kept:
            tl.store(mine + 1 + accepted, token)
            tl.store(history + accepted, token)
            accepted += 1
            token = tl.load(sampled + first + accepted).to(tl.int32)
    else:
        agree = (drafts > 0) and (tl.load(history, mask=drafts > 0, other=-1) == token)
        while agree:
            tl.store(mine + 1 + accepted, token)
            accepted += 1
            token = tl.load(sampled + first + accepted).to(tl.int32)
            more = accepted < drafts
            agree = more and (tl.load(history + accepted, mask=more, other=-1) == token)
    tl.store(mine + 1 + accepted, token)
    tl.store(mine, accepted + 1)
    tl.store(history + accepted, token)
    tl.store(lengths + owner, begin + accepted + 1)
    if accepted > 0:
        tl.store(untaken + owner, tl.load(untaken + owner) + accepted)


def _launch(
    sampled: Tensor,
    cu_samples: Tensor,
    row: Tensor,
    length: Tensor,
    num_draft: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    untaken: Tensor,
    steps: Tensor,
    out: Tensor,
    synthetic: float = 0.0,
) -> None:
    assert tokens.is_contiguous() and out.is_contiguous()
    arguments = (sampled, cu_samples, row, length, num_draft, tokens, lengths, untaken, steps, out)
    parts = _parts(synthetic) if synthetic else (0, 0)
    sizes = tokens.shape[1], out.shape[1], len(row)
    pdl = dependent_launch(tokens)
    _kernel[(max(len(row), 1),)](
        *arguments, *sizes, *parts, SYNTHETIC=synthetic > 0, PDL=pdl, num_warps=1, launch_pdl=pdl
    )


def ahead_of_time() -> list[Build]:
    names = ("cu_samples", "row", "length", "num_draft", "tokens", "lengths", "untaken", "out")
    types = (
        {"sampled": "*i64", "steps": "*i64"}
        | dict.fromkeys(names, "*i32")
        | dict.fromkeys(("context", "width", "sequences"), "i32")
    )
    types |= {"whole": "i32", "part": "i64"}
    return [Build(_kernel, types, {"SYNTHETIC": synthetic}, {"num_warps": 1}) for synthetic in (False, True)]
