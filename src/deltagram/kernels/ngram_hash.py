"""Row ids of the n-grams that end at each token, from the token history alone.

For a token at position t of its request, with `lookback s` the token s places earlier and `fill` in its stead from the first
one on that lies before the request's start, or is an end-of-sequence token (which closes the text before it):

    id[t, column] = (xor over s < order of lookback_s * multiplier[s]) mod modulus[column] + offset[column]

Columns are in (order, head) order, orders 2..max. Stateless: the same ids whatever chunks, preemptions or rejected drafts came
before. Multipliers are chosen by the family so that no product leaves int64.

Shapes: history [rows, context] int32; row [T] int32 (history row of each token, -1 for padding), position [T] int32;
multipliers [L, max_order], moduli and offsets [L, columns] int64, L memory layers. Returns int64 [L, T, columns]; padding
hashes to -1.
"""

import torch
from torch import Tensor


def ngram_hash(
    history: Tensor,
    row: Tensor,
    position: Tensor,
    multipliers: Tensor,
    moduli: Tensor,
    offsets: Tensor,
    fill: int,
    end_of_sequence: int,
) -> Tensor:
    """See the file's docstring. `fill` is the token that stands for a missing one; `end_of_sequence` -1 for none."""
    return _reference(history, row, position, multipliers, moduli, offsets, fill, end_of_sequence)


def _reference(
    history: Tensor,
    row: Tensor,
    position: Tensor,
    multipliers: Tensor,
    moduli: Tensor,
    offsets: Tensor,
    fill: int,
    end_of_sequence: int,
) -> Tensor:
    max_order = multipliers.shape[1]
    lags = torch.arange(max_order, device=history.device)
    source = position[:, None].long() - lags  # [T, max_order]
    tokens = history[row.clamp(min=0).long()[:, None], source.clamp(min=0)].long()
    missing = source < 0
    missing |= (tokens == end_of_sequence) & (lags > 0)
    tokens.masked_fill_(missing.cummax(1).values, fill)
    mixed = (tokens * multipliers[:, None]).unbind(2)  # max_order of [L, T]
    heads = moduli.shape[1] // (max_order - 1)
    running, columns = mixed[0], []
    for order in range(1, max_order):
        running = running ^ mixed[order]
        columns.append(running[..., None].remainder(moduli[:, None, (order - 1) * heads : order * heads]))
    ids = torch.cat(columns, -1) + offsets[:, None]
    return ids.masked_fill_((row < 0)[:, None], -1)
