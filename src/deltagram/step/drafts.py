"""What a draft head runs on: the places of its own cache, beside those of the step it drafts after.

A draft head pairs the hidden state at position p with the token at p + 1. The pair's keys and values lie at place p of
the request's pages, in the head's own layer of them, so that a request of L known tokens has L - 1 pairs. Its first
pass takes the step's tokens, each with the one that follows it; the last of them gives the first draft. Each pass after
that takes one more pair a sequence, of the hidden state and the draft that came before it.

Everything is derived on the device from the step's table and the history, after the step's tokens were committed. The
sequences that draft most come first, so that those of any pass are the first ones, and the others are its padding.
"""

from dataclasses import replace

import torch
from torch import Tensor

from deltagram.step.history import TokenHistory
from deltagram.step.plan import Bucket, Kind
from deltagram.step.sequences import SequenceTable


def followers(table: SequenceTable, history: TokenHistory) -> Tensor:
    """The token after each of the step's, int32 [T]; 0 for padding.

    After a rejected draft it is what the history holds there: the pair's place is written again by the step that
    computes that position, before anything reads it.
    """
    row = table.row[table.sequence.clamp(min=0).long()].long()
    after = (table.position.long() + 1).clamp(max=history.tokens.shape[1] - 1)
    return torch.where(table.sequence >= 0, history.tokens[row, after], 0)


def draft_order(wanted: Tensor) -> Tensor:
    """The order that passes take sequences in, int64 [N]: those that want most drafts first. `wanted`: [N]."""
    return wanted.argsort(descending=True, stable=True)


def first_rows(table: SequenceTable, history: TokenHistory, order: Tensor) -> Tensor:
    """The step's token that each sequence's first draft comes from, int64 [N], in `order`: the last one it ran whose
    follower is known. Means nothing for a sequence that does not draft."""
    last = history.lengths[table.row[order].long()] - 2
    return (table.cu_tokens[order] + last - table.start[order]).clamp(0, table.bucket.tokens - 1).long()


def draft_table(
    table: SequenceTable, history: TokenHistory, order: Tensor, wanted: Tensor, nth: int, token: Tensor
) -> SequenceTable:
    """The table of the pass that yields the `nth` draft, from 2 on: one token for each sequence, in `order`, that wants
    as many.

    wanted: [N] in the step's order, 0 for padding and for a sequence that was not sampled; token: int [N], the drafts
    before this one, in `order`. The request's pages must reach position L + nth - 3, L being its known tokens, which is
    one the engine admits. Attention needs no more than what is set here: the fields of recurrent state, chunks and
    sampling are the step's own.
    """
    assert nth > 1, "the first draft comes from the step's own tokens"
    size, device = table.bucket.sequences, order.device
    ticks = torch.arange(size + 1, dtype=torch.int32, device=device)
    count = (wanted >= nth).sum(dtype=torch.int32)
    real = ticks[:-1] < count
    row = torch.where(real, table.row[order], table.page_table.shape[0] - 1)
    position = torch.where(real, history.lengths[row.long()] + (nth - 3), 0)
    page = table.page_table[row.long(), (position // table.page_size).long()].long()
    return replace(
        table,
        bucket=Bucket(size, size, mixed=False),
        counts=torch.stack((count, count, torch.zeros_like(count), torch.zeros_like(count))),
        kind=torch.where(real, int(Kind.DECODE), int(Kind.PAD)).int(),
        row=row,
        cu_tokens=torch.minimum(ticks, count),
        start=position,
        length=torch.where(real, position + 1, 0),
        sequence=torch.where(real, ticks[:-1], -1),
        position=position,
        token=torch.where(real, token, 0).int(),
        cache_index=torch.where(real, page * table.page_size + position % table.page_size, -1),
    )
