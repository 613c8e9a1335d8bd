"""The sequence table: what the kernels of a step read about its sequences, in fixed int32 buffers.

The host packs what it knows into one array (`pack`), which one copy brings to the device; `prepare`, the first node
of the step, derives the rest there from the token history, so that a step can be planned before the one ahead of it
has ended.
"""

import math
import struct
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltagram.kernels.derive_table import derive_table
from deltagram.kernels.place_drafts import place_drafts
from deltagram.step.history import TokenHistory
from deltagram.step.plan import CHUNK, Bucket, Entry, Kind, StepPlan

Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SequenceTable:
    """One step's sequences, padded to the bucket's T tokens, N sequences, NT chunks and L samples. int32 unless said.

    Packed by the host:
      counts      [4]       tokens, sequences, chunks and page grants that are real
      kind        [N]       Kind; PAD past the real ones
      row         [N]       row of the token history and page table; `pad_row` past the real ones
      slot        [N]       slot of the state pools; `pad_slot` past the real ones
      cu_tokens   [N + 1]   where each sequence's tokens begin; the tail repeats the total
      prefill_start [N]     tokens computed before this step, prefill sequences only; -1 otherwise
      num_draft   [N]       drafted tokens at the sequence's end
      wanted      [N]       drafts that a draft head makes of the sequence for its next step
      given       [N], drafts [N, k]  drafts that the host brings, which go to the token history first of all
      cu_samples  [N + 1]   where each sequence's tokens that are sampled after begin in `sampled`; the tail repeats
      sampled     [L]       the tokens that are sampled after, in order; 0 past the real ones
      chunks      [NT, 2]   (sequence, index) of each chunk of 64 prefill tokens; sequence -1 past the real ones
      grants      [G, 3]    (row, index, page) page table updates
    Derived on the device:
      start       [N]       tokens of the sequence's request computed before this step
      length      [N]       start + new tokens; 0 for padding
      pending     [N]       tokens before start that the request's recurrent state has yet to take, from rings
      stores      [N]       whether the step stores the state, past the first of its tokens
      sequence    [T]       sequence of each token; -1 for padding
      position    [T]       absolute position of each token in its request; 0 for padding
      token       [T]       token ids; 0 for padding
      cache_index [T]       int64, where the token's keys and values go: page * page size + offset; -1 for padding
      page_table  [rows, pages]  the request's pages, shared by all steps
    `every`: recurrent states are stored after every so many tokens, or before.
    """

    bucket: Bucket
    page_size: int
    every: int
    counts: Tensor
    kind: Tensor
    row: Tensor
    slot: Tensor
    cu_tokens: Tensor
    prefill_start: Tensor
    num_draft: Tensor
    wanted: Tensor
    cu_samples: Tensor
    sampled: Tensor
    chunks: Tensor
    start: Tensor
    length: Tensor
    pending: Tensor
    stores: Tensor
    sequence: Tensor
    position: Tensor
    token: Tensor
    cache_index: Tensor
    page_table: Tensor


def each_alone(table: SequenceTable, rows: Tensor) -> SequenceTable:
    """The tokens `rows` (int64 [n]) as n sequences of one, for ops that read what the step has written to the pages."""
    owner, position = table.sequence[rows].long(), table.position[rows]
    ends = torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device)
    return replace(
        table,
        kind=table.kind[owner],
        row=table.row[owner],
        cu_tokens=ends,
        length=position + 1,
        sequence=ends[:-1],
        position=position,
    )


def _shapes(bucket: Bucket, num_grants: int) -> dict[str, tuple[int, ...]]:
    n = bucket.sequences
    return {
        "counts": (4,),
        "kind": (n,),
        "row": (n,),
        "slot": (n,),
        "cu_tokens": (n + 1,),
        "prefill_start": (n,),
        "num_draft": (n,),
        "wanted": (n,),
        "given": (n,),
        "drafts": (n, bucket.max_draft),
        "cu_samples": (n + 1,),
        "sampled": (bucket.num_samples,),
        "chunks": (bucket.chunks, 2),
        "grants": (num_grants, 3),
    }


@lru_cache(1024)
def _places(bucket: Bucket, page_size: int) -> tuple[int, dict[str, slice]]:
    """Length of `pack`'s array, and where in it each of the fields lies."""
    places, first = {}, 0
    for name, shape in _shapes(bucket, max_grants(bucket, page_size)).items():
        places[name] = slice(first, first + math.prod(shape))
        first += math.prod(shape)
    return first, places


def packed_size(bucket: Bucket, page_size: int) -> int:
    """Length of `pack`'s array."""
    return _places(bucket, page_size)[0]


def max_grants(bucket: Bucket, page_size: int) -> int:
    """The most pages a plan of `bucket` can be granted: the tokens' own and the next drafts', and one begun page a
    sequence."""
    return -(-(bucket.tokens + bucket.sequences * bucket.max_draft) // page_size) + bucket.sequences


def pack(plan: StepPlan, page_size: int, pad_row: int, pad_slot: int) -> Array:
    """The host's part of the table as one flat int32 array, in the order of the fields above."""
    bucket, count = plan.bucket, len(plan.entries)
    size, places = _places(bucket, page_size)
    packed = np.zeros(size, np.int32)
    # By columns: a loop over dozens of entries takes longer than all that follows.
    columns = zip(*plan.entries, strict=True) if count else ((),) * len(Entry._fields)
    row, _, slot, kind, num_new, start, num_draft, is_last, _, drafts, wanted = columns
    known = count - kind.count(Kind.PREFILL)  # the sequences before the prompts: each of their tokens is sampled after
    ends = [*accumulate(num_new)]
    tokens = ends[-1] if count else 0
    sampled, sample_ends = [*range(sum(num_new[:known]))], ends[:known]
    chunks: list[int] = []
    for n in range(known, count):
        if is_last[n]:
            sampled.append(ends[n] - 1)
        sample_ends.append(len(sampled))
        for index in range(-(-num_new[n] // CHUNK)):
            chunks += (n, index)
    grants = [number for grant in plan.grants for number in (grant.row, grant.index, grant.page)]
    spare = bucket.sequences - count
    zeros = [0] * spare
    fields = {
        "counts": [tokens, count, len(chunks) // 2, len(plan.grants)],
        "kind": [*kind, *[Kind.PAD] * spare],
        "row": [*row, *[pad_row] * spare],
        "slot": [*slot, *[pad_slot] * spare],
        "cu_tokens": [0, *ends, *[tokens] * spare],
        "prefill_start": [*[-1] * known, *start[known:], *[-1] * spare],
        "num_draft": [*num_draft, *zeros],
        "wanted": [*wanted, *zeros],
        "given": [*map(len, drafts), *zeros],
        "cu_samples": [0, *sample_ends, *[len(sampled)] * spare],
        "sampled": sampled,
        "chunks": chunks + [-1] * (2 * bucket.chunks - len(chunks)),
        "grants": grants,
    }
    for name, numbers in fields.items():
        struct.pack_into(f"{len(numbers)}i", packed.data, 4 * places[name].start, *numbers)
    for n, given in enumerate(drafts):
        if given:
            packed[places["drafts"]][n * bucket.max_draft :][: len(given)] = given
    return packed


def prepare(packed: Tensor, bucket: Bucket, history: TokenHistory, page_table: Tensor, page_size: int) -> SequenceTable:
    """Place the host's drafts, grant the step's pages and derive what the host did not know. The first work of every
    step, on its device.

    packed: int32, `pack`'s array on the device; page_table: int32 [rows, pages], updated in place.
    """
    shapes = _shapes(bucket, max_grants(bucket, page_size))
    parts = zip(shapes.values(), packed.split([math.prod(shape) for shape in shapes.values()]), strict=True)
    fields = [part if len(shape) == 1 else part.view(shape) for shape, part in parts]
    counts, kind, row, slot, cu_tokens, prefill_start, num_draft, wanted, given, drafts, *rest = fields
    cu_samples, sampled, chunks, grants = rest
    known = history.tokens, history.lengths, history.untaken
    storing = history.every, history.few
    if bucket.max_draft:
        place_drafts(drafts, given, row, history.tokens, history.lengths)
    start, length, pending, stores, sequence, position, token, cache_index = derive_table(
        counts, kind, row, cu_tokens, prefill_start, grants, *known, page_table, page_size, *storing, bucket.tokens
    )
    return SequenceTable(
        bucket=bucket,
        page_size=page_size,
        every=history.every,
        counts=counts,
        kind=kind,
        row=row,
        slot=slot,
        cu_tokens=cu_tokens,
        prefill_start=prefill_start,
        num_draft=num_draft,
        wanted=wanted,
        cu_samples=cu_samples,
        sampled=sampled,
        chunks=chunks,
        start=start,
        length=length,
        pending=pending,
        stores=stores,
        sequence=sequence,
        position=position,
        token=token,
        cache_index=cache_index,
        page_table=page_table,
    )
