"""Plain rules of sampling: see the package's docstring for the op, engine/sampler.py for the rules themselves.

A row's probabilities are integers: in units of 2^-42 of the likeliest token's. Each filter keeps a prefix of the tokens
in falling order; a token is drawn by inverting the cumulative sum in vocabulary order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from deltagram.kernels.sample_tokens import Requests, Scratch

ONE = 2**42  # the weight of the likeliest token; 2^20 of them add up to less than 2^63


def reference(
    logits: Tensor,
    sampled: Tensor,
    cu_samples: Tensor,
    sequence: Tensor,
    position: Tensor,
    row: Tensor,
    history: Tensor,
    requests: Requests,
    work: Scratch,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num = len(logits)
    tokens, logprobs, top_tokens, top_logprobs = (part[:num] for part in work[:4])
    at = sampled[: int(cu_samples[-1])].long()
    owner, place = row[sequence[at].long()].long(), position[at].long() + 1
    whole, real = requests.whole[owner], requests.real[owner]
    flags, (seed, top_k, prompt) = whole[:, 0], whole[:, 1:4].unbind(1)
    names = "temperature", "top_p", "min_p", "repetition", "presence", "frequency"
    columns = dict(zip(names, real.unbind(1), strict=True)) | {"top_k": top_k}

    def asks(bit: int) -> Tensor:
        return (flags & bit != 0).nonzero().squeeze(1)

    raw = logits[: len(at)].float()
    x, masked = raw.clone(), asks(4)
    bits = requests.allowed[owner[masked]][..., None] >> torch.arange(8, dtype=torch.uint8, device=x.device) & 1
    x[masked] = x[masked].masked_fill(bits.flatten(1)[:, : x.shape[1]] == 0, -torch.inf)
    edited = asks(1)
    edits = requests.edits[owner[edited]]  # [X, 3, E]
    number = torch.arange(edits.shape[2], device=x.device)
    holds = (number < whole[edited, 4:5]) & ((place - prompt)[edited, None] < edits[:, 2])
    index = edited[:, None].expand_as(holds)[holds]
    x.index_put_((index, edits[:, 0][holds].long()), edits[:, 1].view(torch.float32)[holds], accumulate=True)
    mine = asks(2)
    said = {name: column[mine] for name, column in columns.items()}
    x[mine] = penalize(x[mine], history[owner[mine]], place[mine], prompt[mine], said)
    chosen = x.argmax(-1)
    drawn = asks(16)
    weights = weigh(x[drawn], columns["temperature"][drawn])
    filtered = (flags[drawn] & 32 != 0).nonzero().squeeze(1)
    limits = {name: column[drawn][filtered] for name, column in columns.items()}
    weights[filtered] *= kept(x[drawn][filtered], weights[filtered], 0, limits)
    chosen[drawn] = draw(weights, uniform(seed[drawn], place[drawn]))
    tokens.zero_()[: len(at)] = chosen
    told = asks(8)
    known = raw[told].log_softmax(-1)
    logprobs[told] = known.gather(1, chosen[told, None]).squeeze(1)
    best = top(raw[told], top_tokens.shape[1])
    top_tokens[told, : best.shape[1]], top_logprobs[told, : best.shape[1]] = best, known.gather(1, best)
    return tokens, logprobs, top_tokens, top_logprobs


def penalize(
    logits: Tensor, history: Tensor, positions: Tensor, prompt_lengths: Tensor, columns: Mapping[str, Tensor]
) -> Tensor:
    """logits float32 [P, V], history int32 [P, C] -> float32 [P, V]."""
    column = torch.arange(history.shape[1], device=history.device)
    known = column < positions[:, None]
    token = torch.where(known, history, 0).long()  # what lies beyond may be anything
    zeros = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
    occurrences = zeros.scatter_add(1, token, known.int())
    outputs = zeros.scatter_add(1, token, (known & (column >= prompt_lengths[:, None])).int())
    repetition, presence, frequency = (
        columns[name].float()[:, None] for name in ("repetition", "presence", "frequency")
    )
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    return torch.where(occurrences > 0, repeated, logits) - outputs * frequency - (outputs > 0) * presence


def weigh(logits: Tensor, temperature: Tensor) -> Tensor:
    """float32 [D, V], float64 [D] -> int64 [D, V]: probabilities in units of 2^-42 of the likeliest token's."""
    below = logits.double().sub_(logits.amax(-1, keepdim=True)).div_(temperature[:, None])
    below.nan_to_num_(nan=0.0)  # a broken model must show in its text and logprobs, not as a fault of the device
    return below.exp_().mul_(ONE).round_().long()


def kept(logits: Tensor, weights: Tensor, max_top_k: int, columns: Mapping[str, Tensor]) -> Tensor:
    """Which tokens min_p, then top_k, then top_p keep: bool [F, V].

    Each filter keeps a prefix of the tokens in falling order, so a row's filter is one number: the prefix length.
    """
    vocab_size = logits.shape[1]
    top_k, top_p, min_p = (columns[name][:, None] for name in ("top_k", "top_p", "min_p"))
    if 0 < max_top_k < vocab_size:
        values, order = logits.topk(max_top_k)
    else:
        values, order = logits.sort(descending=True)
    ranked = weights.gather(1, order)
    rank = torch.arange(ranked.shape[1], device=logits.device)
    keeps = (ranked >= min_p * ONE) & ((rank < top_k) | (top_k == 0))
    ranked = ranked * keeps
    before = ranked.cumsum(1) - ranked
    keeps &= (before < top_p * ranked.sum(1, keepdim=True)) | (top_p == 1)

    count = keeps.sum(1, keepdim=True)
    last = values.gather(1, count - 1)
    above, equal = logits > last, logits == last
    return above | (equal & (equal.cumsum(1) <= count - above.sum(1, keepdim=True)))


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Inverts the cumulative sum: int64 [D, V] of at least 0, float64 [D] in (0, 1) -> int64 [D].

    The sum of a row must be above 0 and below 2^63. A token of weight 0 is never drawn.
    """
    cumulative = weights.cumsum(1)
    total = cumulative[:, -1]
    target = torch.minimum((uniforms * total).long(), total - 1)
    return torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)


def uniform(seed: Tensor, position: Tensor, stream: int = 0) -> Tensor:
    """A random number in the open interval (0, 1) with 53 bits: a function of its arguments alone.

    seed, position: int64, broadcast together -> float64. Streams are for further draws at the same position.
    The generator is splitmix64 (Steele, Lea and Flood, 2014) at step `position` from a start given by seed and stream.
    """
    state = seed * _SEED_STEP + position * _POSITION_STEP + _wrap(stream * _STREAM_STEP)
    state = (state ^ _shift_right(state, 30)) * _MIX_1
    state = (state ^ _shift_right(state, 27)) * _MIX_2
    state = state ^ _shift_right(state, 31)
    return _shift_right(state, 11).clamp_min(1).double() * 2.0**-53


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Shifts int64 as if unsigned."""
    return (value >> bits) & (2 ** (64 - bits) - 1)


def _wrap(value: int) -> int:
    """The int64 with the low 64 bits of `value`."""
    return (value + 2**63) % 2**64 - 2**63


_POSITION_STEP = _wrap(0x9E3779B97F4A7C15)
_SEED_STEP = _wrap(0xDA942042E4DD58B5)
_STREAM_STEP = _wrap(0xD1342543DE82EF95)
_MIX_1 = _wrap(0xBF58476D1CE4E5B9)
_MIX_2 = _wrap(0x94D049BB133111EB)


def top(values: Tensor, count: int) -> Tensor:
    """Indices [L, count] of the largest of float32 [L, V], the lowest index first among equals (topk promises none)."""
    bits = (values + 0.0).view(torch.int32).long()  # + 0.0: one zero, not two
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # as integers in the order of the floats
    index = torch.arange(values.shape[1], device=values.device)
    return (ordered * 2**32 - index).topk(min(count, values.shape[1])).indices
