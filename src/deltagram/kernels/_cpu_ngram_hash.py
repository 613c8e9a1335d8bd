"""Compiled body of ngram_hash.py: eight columns at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._longs import EIGHT, MODULI, longs, plus, put_longs, remainder, spread_long, times, xor
from deltagram.kernels._threads import spread, threaded
from deltagram.kernels._vectors import get_byte, get_int, get_long, put_long


@threaded
def _kernel(
    first: int, last: int, scratch: int, history: int, stride: int, sequence: int, row: int, position: int,
    multipliers: int, moduli: int, inverses: int, offsets: int, layers: int, order: int, columns: int, fill: int,
    end_of_sequence: int, polynomial: int, token_map: int, dead: int, rows: int, out: int,
) -> None:  # fmt: skip
    for t in range(first, last):
        seq, p = get_int(sequence, t), get_int(position, t)
        if seq < 0:
            for layer in range(layers):
                for c in range(columns):
                    put_long(out, (layer * rows + t) * columns + c, -1)
            continue
        here = get_int(row, seq) * stride + p
        missing = False
        for lag in range(order):
            token = fill
            missing = missing or p < lag
            if not missing:
                token = get_int(history, here - lag)
                missing = (lag > 0 and token == end_of_sequence) or (dead != 0 and get_byte(dead, here - lag) != 0)
                if token_map != 0 and not missing:
                    token = get_int(token_map, token)
                    missing = token < 0
                if missing:
                    token = fill
            put_long(scratch, lag, token)
        for layer in range(layers):
            ids, constants, weights = out + 8 * (layer * rows + t) * columns, 8 * layer * columns, order * columns
            for c in range(0, columns, EIGHT):
                mixed = spread_long(0)
                for lag in range(order):
                    weight = longs(multipliers + 8 * (layer * weights + lag * columns), c, columns)
                    term = times(spread_long(get_long(scratch, lag)), weight)
                    mixed = plus(mixed, term) if polynomial else xor(mixed, term)
                modulus = longs(moduli + constants, c, columns)
                if inverses != 0:
                    rest = remainder(mixed, modulus, longs(inverses + constants, c, columns))
                    put_longs(ids, c, columns, plus(rest, longs(offsets + constants, c, columns)))
                else:
                    put_longs(ids, c, columns, mixed)
            if inverses == 0:
                for c in range(columns):
                    at = layer * columns + c
                    put_long(ids, c, get_long(ids, c) % get_long(moduli, at) + get_long(offsets, at))


def ngram_hash(
    history: Tensor, sequence: Tensor, row: Tensor, position: Tensor, multipliers: Tensor, moduli: Tensor, offsets:
    Tensor, fill: int, end_of_sequence: int = -1, polynomial: bool = False, token_map: Tensor | None = None, dead:
    Tensor | None = None,
) -> Tensor:  # fmt: skip
    layers, order, columns = multipliers.shape
    rows = len(position)
    assert history.stride(1) == 1 and (dead is None or dead.stride() == history.stride())
    assert multipliers.is_contiguous() and moduli.is_contiguous() and offsets.is_contiguous()
    out = torch.empty(layers, rows, columns, dtype=torch.int64)
    least, most = torch.aminmax(moduli)
    inverses = moduli.double().reciprocal_() if MODULI[0] <= int(least) and int(most) < MODULI[1] else None
    spread(
        _kernel, rows, 1024, 2 * order, history.data_ptr(), history.stride(0), sequence.data_ptr(), row.data_ptr(),
        position.data_ptr(), multipliers.data_ptr(), moduli.data_ptr(), 0 if inverses is None else inverses.data_ptr(),
        offsets.data_ptr(), layers, order, columns, fill, end_of_sequence, polynomial, 0 if token_map is None else
        token_map.data_ptr(), 0 if dead is None else dead.data_ptr(), rows, out.data_ptr(),
    )  # fmt: skip
    return out
