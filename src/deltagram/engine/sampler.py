"""Sampling: from a step's logits to its tokens, for rows that each follow their own SamplingParams.

Order, for a row that asks for it:

    logits + logit_bias, end tokens masked before min_tokens -> repetition, presence, frequency penalties
           -> / temperature -> min_p -> top_k -> top_p -> draw

Rules that make a token depend on its own row alone, bit for bit:

- Random numbers are a function of (seed, position): see `uniform`. Nothing is advanced, so a preempted, replayed or
  rolled-back sequence draws the same numbers again.
- Probabilities relative to the likeliest token are rounded to multiples of 2^-42 and added as integers. Integer sums do
  not depend on the order of addition, hence not on the device's reduction, the batch or the bucket. What is rounded
  off is below the error of float32 logits.
- A token is drawn by inverting the cumulative sum in vocabulary order. Among equal logits, greedy choice and every
  filter prefer the lowest id.
- Penalties are counted from the token history, so there is nothing to keep, undo or recompute.

All branches and shapes depend on `Sizes`, which the host knows: a captured graph belongs to one `Sizes` and serves
every batch that needs no more. Rows that are plain greedy cost one argmax.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deltagram.engine.params import SamplingParams
from deltagram.kernels.sample_tokens.reference import draw, kept, penalize, top, uniform, weigh

MAX_VOCAB_SIZE = 2**20
_ALWAYS = 2**62  # "until this many output tokens": no limit


class SampleRow(NamedTuple):
    """A row of logits to sample from: its request's parameters, row in the token history, and sequence seed."""

    params: SamplingParams
    request_row: int
    seed: int


class Sizes(NamedTuple):
    """How much work a batch needs: numbers of rows, unless said otherwise. All zero: one argmax."""

    special: int = 0  # not plain greedy
    drawn: int = 0  # temperature > 0
    filtered: int = 0  # drawn, with min_p, top_k or top_p
    penalized: int = 0
    edits: int = 0  # entries of logit bias and of end-token masks
    reported: int = 0  # logprobs asked for
    max_top_k: int = 0  # bound on top_k of the filtered rows; 0: some have none
    max_logprobs: int = 0


# Every field is one 8-byte column of the packed buffer, in this order: category, type, what surplus entries hold.
_COLUMNS: dict[str, tuple[str, type, float]] = {
    "row": ("special", int, -1),  # of the logits; -1: none
    "seed": ("special", int, 0),
    "temperature": ("special", float, 0.0),
    "top_k": ("filtered", int, 0),
    "top_p": ("filtered", float, 1.0),
    "min_p": ("filtered", float, 0.0),
    "penalized": ("penalized", int, 0),  # index into the special rows
    "history_row": ("penalized", int, 0),
    "repetition": ("penalized", float, 1.0),
    "presence": ("penalized", float, 0.0),
    "frequency": ("penalized", float, 0.0),
    "edited": ("edits", int, 0),  # index into the special rows
    "edit_token": ("edits", int, 0),
    "edit_value": ("edits", float, 0.0),
    "edit_until": ("edits", int, 0),  # holds while fewer output tokens than this exist
    "reported": ("reported", int, -1),  # row of the logits; -1: none
}


@dataclass(frozen=True)
class SamplingTensors:
    """The sampling parameters of a batch as columns: views of one int64 buffer, so that one copy refreshes them."""

    sizes: Sizes
    packed: Tensor  # int64
    columns: dict[str, Tensor]  # int64 or float64, [the column's category in sizes]

    @staticmethod
    def view(packed: Tensor, sizes: Sizes) -> "SamplingTensors":
        """The columns of `packed`, an int64 tensor of exactly the length that `pack` gives for these sizes."""
        columns, start = {}, 0
        for name, (category, kind, _) in _COLUMNS.items():
            end = start + getattr(sizes, category)
            column = packed[start:end]
            columns[name] = column if kind is int else column.view(torch.float64)
            start = end
        assert start == packed.numel()
        return SamplingTensors(sizes, packed, columns)

    @staticmethod
    def build(
        rows: Sequence[SampleRow],
        *,
        eos_token_ids: Sequence[int] = (),
        sizes: Sizes | None = None,
        device: torch.device | str = "cpu",
    ) -> "SamplingTensors":
        """`pack` and copy. Rows of the logits beyond `rows` are padding: they get their argmax and touch nothing."""
        if sizes is None and all(row.params.is_plain_greedy and row.params.logprobs is None for row in rows):
            return SamplingTensors(Sizes(), torch.empty(0, dtype=torch.int64, device=device), {})
        packed, sizes = pack(rows, eos_token_ids=eos_token_ids, sizes=sizes)
        return SamplingTensors.view(torch.from_numpy(packed).to(device, non_blocking=True), sizes)


def pack(
    rows: Sequence[SampleRow], *, eos_token_ids: Sequence[int] = (), sizes: Sizes | None = None
) -> tuple[np.ndarray, Sizes]:
    """Packs the parameters of `rows` (row i is row i of the logits) into one int64 array and says its sizes.

    `sizes`, if given, takes the place of the smallest possible ones and must cover them; results stay the same.
    """
    special = [(i, row) for i, row in enumerate(rows) if not row.params.is_plain_greedy]
    # Filtered rows come first, then the other drawn ones: both categories are slices of the special rows.
    special.sort(key=lambda entry: (not entry[1].params.uses_filters, entry[1].params.temperature == 0))
    values: dict[str, list[float]] = {name: [] for name in _COLUMNS}

    def append(**entry: float) -> None:
        for name, value in entry.items():
            values[name].append(value)

    for j, (i, (params, history_row, seed)) in enumerate(special):
        append(row=i, seed=seed, temperature=params.temperature)
        if params.uses_filters:
            append(top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
        if params.uses_penalties:
            append(penalized=j, history_row=history_row, repetition=params.repetition_penalty)
            append(presence=params.presence_penalty, frequency=params.frequency_penalty)
        for token, bias in (params.logit_bias or {}).items():
            append(edited=j, edit_token=token, edit_value=bias, edit_until=_ALWAYS)
        if params.min_tokens:
            for token in dict.fromkeys(params.end_token_ids(eos_token_ids)):
                append(edited=j, edit_token=token, edit_value=-np.inf, edit_until=params.min_tokens)
    values["reported"] = [i for i, row in enumerate(rows) if row.params.logprobs is not None]

    needed = Sizes(
        special=len(special),
        drawn=sum(row.params.temperature > 0 for _, row in special),
        filtered=len(values["top_k"]),
        penalized=len(values["penalized"]),
        edits=len(values["edited"]),
        reported=len(values["reported"]),
        max_top_k=int(max(values["top_k"])) if values["top_k"] and all(values["top_k"]) else 0,
        max_logprobs=max((row.params.logprobs or 0 for row in rows), default=0),
    )
    sizes = sizes or needed
    assert sizes == needed or _covers(sizes, needed), f"{sizes} cannot serve {needed}"

    packed = np.empty(sum(getattr(sizes, category) for category, _, _ in _COLUMNS.values()), np.int64)
    start = 0
    for name, (category, kind, surplus) in _COLUMNS.items():
        column, end = values[name], start + getattr(sizes, category)
        if category == "penalized" and column:
            surplus = column[-1]  # these are written back: surplus entries write the same again
        part = packed[start:end] if kind is int else packed[start:end].view(np.float64)
        part[: len(column)] = column
        part[len(column) :] = surplus
        start = end
    return packed, sizes


def _covers(sizes: Sizes, needed: Sizes) -> bool:
    """Surplus filtered rows keep the whole vocabulary, so they rule out a bound on top_k."""
    enough = all(have >= need for have, need in zip(sizes, needed._replace(max_top_k=0), strict=True))
    return enough and sizes.filtered <= sizes.drawn <= sizes.special and sizes.max_top_k == 0


class SampleOutput(NamedTuple):
    """Log-probabilities are those of the model's own logits: before bias, penalties, temperature and filters."""

    tokens: Tensor  # int64 [N]
    logprobs: Tensor | None  # float32 [N], of the tokens; 0 in rows that did not ask; None if no row did
    top_tokens: Tensor | None  # int64 [N, max_logprobs], likeliest first, the lowest id first among equals
    top_logprobs: Tensor | None  # float32 [N, max_logprobs]


def sample(
    logits: Tensor,
    tensors: SamplingTensors,
    positions: Tensor,
    history_tokens: Tensor,
    prompt_lengths: Tensor,
    allowed: Tensor | None = None,
) -> SampleOutput:
    """Samples one token per row.

    logits: float32 or bfloat16 [N, V], V <= 2^20; not written to. Every row that is sampled must have a finite largest
        logit. (Filters keep the likeliest token, the bias is finite, and `SamplingParams.check` leaves a token
        outside the end-token mask: so no row can lose all its tokens here.)
    positions: int32 or int64 [N], the absolute position of the token to sample: row n knows the tokens before it.
    history_tokens: int32 [R, C], the token history, or a view of its first columns that holds all positions in use.
        Only read for penalties, at columns below the row's position.
    prompt_lengths: int32 or int64 [N]; row n has put out positions[n] - prompt_lengths[n] tokens so far.
    allowed: bool [N, V], at least one token a row: the others are as if their logits were -inf. Masked end tokens
        (min_tokens) must leave one of them.
    """
    sizes, columns = tensors.sizes, tensors.columns
    assert logits.shape[-1] <= MAX_VOCAB_SIZE
    raw = logits
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    tokens = logits.argmax(-1)  # the first of equals, on every device
    if sizes.special:
        row = columns["row"].clamp_min(0)
        chosen = _choose(
            logits[row].float(), tensors, positions[row].long(), history_tokens, prompt_lengths[row].long()
        )
        tokens = _put(tokens, columns["row"], chosen)
    if not sizes.reported:
        return SampleOutput(tokens, None, None, None)

    row = columns["reported"].clamp_min(0)
    raw = raw[row].float()
    logprobs, top_tokens = raw.log_softmax(-1), top(raw, sizes.max_logprobs)
    blank = logprobs.new_zeros(len(tokens), 1)
    blanks = blank.expand(-1, top_tokens.shape[1])
    return SampleOutput(
        tokens,
        _put(blank, columns["reported"], logprobs.gather(1, tokens[row, None])).squeeze(1),
        _put(blanks.long(), columns["reported"], top_tokens),
        _put(blanks, columns["reported"], logprobs.gather(1, top_tokens)),
    )


def _choose(
    logits: Tensor,
    tensors: SamplingTensors,
    positions: Tensor,
    history_tokens: Tensor,
    prompt_lengths: Tensor,
) -> Tensor:
    """The tokens [X] of the special rows, whose arguments these are; `logits` is written to."""
    sizes, columns = tensors.sizes, tensors.columns
    if sizes.edits:
        edited = columns["edited"]
        holds = (positions - prompt_lengths)[edited] < columns["edit_until"]
        value = torch.where(holds, columns["edit_value"], 0.0).float()
        logits.index_put_((edited, columns["edit_token"]), value, accumulate=True)
    if sizes.penalized:
        index = columns["penalized"]
        history = history_tokens[columns["history_row"]]
        logits[index] = penalize(logits[index], history, positions[index], prompt_lengths[index], columns)
    tokens = logits.argmax(-1)
    if not sizes.drawn:
        return tokens

    drawn = logits[: sizes.drawn]
    temperature = columns["temperature"][: sizes.drawn]
    greedy = temperature == 0
    weights = weigh(drawn, torch.where(greedy, 1.0, temperature))
    if sizes.filtered:
        part = slice(0, sizes.filtered)
        weights[part] *= kept(drawn[part], weights[part], sizes.max_top_k, columns)
    uniforms = uniform(columns["seed"][: sizes.drawn], positions[: sizes.drawn])
    tokens[: sizes.drawn] = torch.where(greedy, tokens[: sizes.drawn], draw(weights, uniforms))
    return tokens


def _put(target: Tensor, row: Tensor, values: Tensor) -> Tensor:
    """A copy of `target` with `values` at these rows; those for row -1 are dropped."""
    spare_first = torch.cat([target[:1], target])
    return spare_first.index_copy_(0, row + 1, values)[1:]
