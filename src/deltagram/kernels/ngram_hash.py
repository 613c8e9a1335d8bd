"""Row ids of the n-grams that end at each token, from the token history alone; every memory layer in one launch.

For a token at position t of its request, lookback s is the token s places earlier, mapped by `token_map` where there
is one. From the first lookback on that is missing, it and all older ones are `fill` instead: one before the request's
start, one that is dead (marked in `dead`, or mapped to a negative id), and for s > 0 an end-of-sequence token, which
closes the text before it.

    mixed[t, column] = xor or sum over s < max_order of lookback_s * multiplier[s, column]
    id[t, column]    = mixed mod modulus[column] + offset[column]

A column of order n has multiplier 0 for s >= n, which changes neither mix. xor: one multiplier a lookback, the same
for every column that uses it (DeepSeek's Engram, Qwen4-Exp). sum, `polynomial`: the vocabulary's powers modulo each
column's (LongCat). Stateless: the same ids whatever chunks, preemptions or rejected drafts came before. Families
choose multipliers so that no product, and no sum, leaves int64.

Shapes: history [rows, context] int32; sequence [T] int32, -1 for padding; row [N] int32, the history row of each
sequence; position [T] int32; multipliers [L, max_order, columns], moduli and offsets [L, columns] int64, columns in
(order, head) order; token_map [vocab] int32; dead [rows, context] bool. Returns int64 [L, T, columns]; padding hashes
to -1 and reads nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._triton import Build, Impl, choose, jit, on_cpu, power_of_two, tl

_TOKENS, _WARPS = 8, 2  # a program's


def ngram_hash(
    history: Tensor,
    sequence: Tensor,
    row: Tensor,
    position: Tensor,
    multipliers: Tensor,
    moduli: Tensor,
    offsets: Tensor,
    fill: int,
    end_of_sequence: int = -1,
    polynomial: bool = False,
    token_map: Tensor | None = None,
    dead: Tensor | None = None,
    impl: Impl = None,
) -> Tensor:
    """See the file's docstring. `fill` is a mapped id; `end_of_sequence` an unmapped one, -1 for none."""
    body = choose(impl, history, _reference, _launch, _compiled)
    return body(
        history,
        sequence,
        row,
        position,
        multipliers,
        moduli,
        offsets,
        fill,
        end_of_sequence,
        polynomial,
        token_map,
        dead,
    )


def _reference(
    history: Tensor,
    sequence: Tensor,
    row: Tensor,
    position: Tensor,
    multipliers: Tensor,
    moduli: Tensor,
    offsets: Tensor,
    fill: int,
    end_of_sequence: int = -1,
    polynomial: bool = False,
    token_map: Tensor | None = None,
    dead: Tensor | None = None,
) -> Tensor:
    padded = sequence < 0
    line, pos = row[sequence.clamp(min=0).long()].long(), torch.where(padded, 0, position).long()
    missing, mixed = padded, torch.zeros((), dtype=torch.int64, device=history.device)
    for lag in range(multipliers.shape[1]):
        missing = missing | (pos < lag)
        place = (pos - lag).clamp(min=0)
        token = history[line, place].long()
        if lag:
            missing = missing | (token == end_of_sequence)
        if dead is not None:
            missing = missing | dead[line, place]
        if token_map is not None:
            token = token_map[torch.where(missing, 0, token)].long()
            missing = missing | (token < 0)
        terms = torch.where(missing, fill, token)[:, None] * multipliers[:, lag, None]  # [L, T, columns]
        mixed = mixed + terms if polynomial else mixed ^ terms
    ids = mixed % moduli[:, None] + offsets[:, None]
    return torch.where(padded[:, None], -1, ids)


_compiled = on_cpu("ngram_hash")


@jit(do_not_specialize=["num_tokens"])
def _kernel(  # type: ignore[no-untyped-def]
    history,
    history_stride,
    sequence,
    row,
    position,
    multipliers,
    moduli,
    offsets,
    token_map,
    dead,
    out,
    num_tokens,
    fill,
    end_of_sequence,
    COLUMNS: tl.constexpr,
    COLUMNS_PADDED: tl.constexpr,
    ORDER: tl.constexpr,
    POLYNOMIAL: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_DEAD: tl.constexpr,
    TOKENS: tl.constexpr,
):
    layer = tl.program_id(1)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    c = tl.arange(0, COLUMNS_PADDED)
    inside = c < COLUMNS
    seq = tl.load(sequence + t, mask=t < num_tokens, other=-1)
    real = seq >= 0
    base = tl.load(row + seq, mask=real, other=0).to(tl.int64) * history_stride
    pos = tl.load(position + t, mask=real, other=0)
    modulus = tl.load(moduli + layer * COLUMNS + c, mask=inside, other=1)
    # Exact division by multiplication: q below is the quotient or one less, as mixed < 2^63 and the error of
    # reciprocal is under 1. One division a column and program instead of one an id.
    reciprocal = 0xFFFFFFFFFFFFFFFF // modulus.to(tl.uint64)
    missing = pos < 0
    mixed = tl.zeros((TOKENS, COLUMNS_PADDED), tl.int64)
    for s in tl.static_range(ORDER):
        # Loads do not wait for what earlier lookbacks turn out to be: their latencies overlap.
        inside_text = real & (pos >= s)
        token = tl.load(history + base + pos - s, mask=inside_text, other=0)
        missing = missing | (pos < s)
        if s > 0:
            missing = missing | (token == end_of_sequence)
        if HAS_DEAD:
            missing = missing | (tl.load(dead + base + pos - s, mask=inside_text, other=0) != 0)
        if HAS_MAP:
            token = tl.load(token_map + token, mask=inside_text, other=0)
            missing = missing | (token < 0)
        term = tl.where(missing, fill, token).to(tl.int64)
        at_lag = multipliers + (layer * ORDER + s) * COLUMNS
        if POLYNOMIAL:
            mixed = mixed + term[:, None] * tl.load(at_lag + c, mask=inside, other=0)[None, :]
        else:
            product = term * tl.load(at_lag + COLUMNS - 1)  # the last column's, which uses every lookback
            mixed = mixed ^ tl.where((c >= (s - 1) * (COLUMNS // (ORDER - 1)))[None, :], product[:, None], 0)
    unsigned = mixed.to(tl.uint64)
    quotient = tl.umulhi(unsigned, tl.broadcast_to(reciprocal[None, :], (TOKENS, COLUMNS_PADDED)))
    rest = mixed - quotient.to(tl.int64) * modulus[None, :]
    rest = tl.where(rest >= modulus[None, :], rest - modulus[None, :], rest)
    offset = tl.load(offsets + layer * COLUMNS + c, mask=inside, other=0)
    ids = tl.where(real[:, None], rest + offset[None, :], -1)
    at = (layer.to(tl.int64) * num_tokens + t)[:, None] * COLUMNS + c[None, :]
    tl.store(out + at, ids, mask=(t < num_tokens)[:, None] & inside[None, :])


def _launch(
    history: Tensor,
    sequence: Tensor,
    row: Tensor,
    position: Tensor,
    multipliers: Tensor,
    moduli: Tensor,
    offsets: Tensor,
    fill: int,
    end_of_sequence: int = -1,
    polynomial: bool = False,
    token_map: Tensor | None = None,
    dead: Tensor | None = None,
) -> Tensor:
    layers, max_order, columns = multipliers.shape
    num_tokens = len(position)
    out = torch.empty(layers, num_tokens, columns, dtype=torch.int64, device=history.device)
    assert history.stride(1) == 1 and (dead is None or dead.stride() == history.stride())
    assert multipliers.is_contiguous() and moduli.is_contiguous() and offsets.is_contiguous()
    _kernel[(-(-num_tokens // _TOKENS), layers)](
        history,
        history.stride(0),
        sequence,
        row,
        position,
        multipliers,
        moduli,
        offsets,
        token_map,
        None if dead is None else dead.view(torch.uint8),
        out,
        num_tokens,
        fill,
        end_of_sequence,
        **_constants(columns, max_order, polynomial, token_map is not None, dead is not None),
        num_warps=_WARPS,
    )
    return out


def _constants(columns: int, max_order: int, polynomial: bool, has_map: bool, has_dead: bool) -> dict[str, int]:
    sizes: dict[str, int] = {
        "COLUMNS": columns,
        "COLUMNS_PADDED": power_of_two(columns),
        "ORDER": max_order,
        "TOKENS": _TOKENS,
    }
    return sizes | {"POLYNOMIAL": polynomial, "HAS_MAP": has_map, "HAS_DEAD": has_dead}


def ahead_of_time() -> list[Build]:
    integers = dict.fromkeys(("num_tokens", "fill", "end_of_sequence", "history_stride"), "i32")
    types = integers | dict.fromkeys(("history", "sequence", "row", "position", "token_map"), "*i32") | {"dead": "*u8"}
    types |= dict.fromkeys(("multipliers", "moduli", "offsets", "out"), "*i64")
    engram, ple = _constants(24, 4, False, True, True), _constants(16, 3, False, False, False)
    longcat = _constants(12, 4, True, True, False)
    return [
        Build(_kernel, types, {**engram}, {"num_warps": _WARPS}),
        Build(_kernel, types, {**ple, "token_map": None, "dead": None}, {"num_warps": _WARPS}),
        Build(_kernel, types, {**longcat, "dead": None}, {"num_warps": _WARPS}),
    ]
