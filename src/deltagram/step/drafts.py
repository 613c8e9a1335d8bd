"""What a draft head runs on: the places of its own cache, beside those of the step it drafts after.

A draft head pairs the hidden state at position p with the token at p + 1. The pair's keys and values lie at place p of
the request's pages, in the head's own layer of them, so that a request of L known tokens has L - 1 pairs. Its first
pass takes the step's tokens, each with the one that follows it; the last of them gives the first draft. Each pass after
that takes one more pair a sequence, of the hidden state and the draft that came before it.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from deltagram.kernels.derive_drafts import derive_drafts
from deltagram.step.history import TokenHistory
from deltagram.step.plan import Bucket
from deltagram.step.sequences import SequenceTable


@dataclass(frozen=True, slots=True)
class Drafting:
    """Sequences are taken in `order`, int64 [N]: those that want most drafts first, so that those of any pass are the
    first ones, and the others its padding.

    follower: int32 [T], the token after each of the step's; 0 for padding. After a rejected draft it is what the
    history holds there: the pair's place is written again by the step that computes that position, before anything
    reads it.
    first: int64 [N], the step's token that each sequence's first draft comes from, in `order`; 0 if it wants none.
    tables: of each pass from the second on. Attention needs no more than what they say; tokens, chunks, samples and
    slots are still the step's.
    """

    follower: Tensor
    order: Tensor
    first: Tensor
    tables: tuple[SequenceTable, ...]


def prepare_drafts(table: SequenceTable, history: TokenHistory, wanted: Tensor, max_draft: int) -> Drafting:
    """Derive, on the device, what the passes after a step run on, once the history has taken the step's tokens.

    wanted: int32 [N], the drafts each sequence wants, at most `max_draft`; 0 for padding and for a sequence that was
    not sampled. The request's pages must reach position L + wanted - 3, L being its known tokens, which must be one
    that the engine admits.
    """
    follower, order, first, *fields = derive_drafts(
        wanted,
        table.row,
        table.cu_tokens,
        table.start,
        table.sequence,
        table.position,
        history.tokens,
        history.lengths,
        table.page_table,
        table.page_size,
        max_draft,
    )
    names = ("counts", "kind", "row", "cu_tokens", "sequence", "position", "length", "cache_index")
    bucket = Bucket(table.bucket.sequences, table.bucket.sequences, mixed=False)
    tables = []
    for values in zip(*(field.unbind() for field in fields), strict=True):
        one = dict(zip(names, values, strict=True))
        tables.append(replace(table, bucket=bucket, start=one["position"], **one))
    return Drafting(follower, order, first, tuple(tables))
