"""A sample of a table, read in every way there is: the op against the rules, each placement against the files."""

import random
from collections.abc import Sequence

import torch

from deltagram.ngram.checkpoint import TableSource, read_scale
from deltagram.ngram.disk import DiskStore
from deltagram.ngram.placement import Placement, make_store, table_of
from deltagram.ngram.spec import HashConstants, HashSpec

_CPU = torch.device("cpu")
_PLACEMENTS = ("device", "host", "shared", "cached:1MiB:host", "cached:1MiB:disk")


def ids_by_the_rules(spec: HashSpec, tokens: Sequence[int], dead: Sequence[bool] | None = None) -> list[list[int]]:
    """Row ids of a text [T][columns], one token at a time, in Python's unbounded integers: slow, and plainly the
    rules."""
    heads = spec.num_columns // (spec.max_order - 1)
    rows = []
    for t in range(len(tokens)):
        lookback: list[int] = []
        stopped = False
        for s in range(spec.max_order):
            stopped = stopped or t < s or (dead is not None and dead[t - s])
            stopped = stopped or (s > 0 and tokens[t - s] == spec.end_of_sequence)
            mapped = -1
            if not stopped:
                mapped = tokens[t - s] if spec.token_map is None else spec.token_map[tokens[t - s]]
                stopped = mapped < 0
            lookback.append(spec.fill if stopped else mapped)
        row = []
        for column, (modulus, offset) in enumerate(zip(spec.moduli, spec.offsets, strict=True)):
            mixed = 0
            for token, multiplier in zip(lookback[: 2 + column // heads], spec.multipliers, strict=False):
                mixed = mixed + token * multiplier if spec.polynomial else mixed ^ (token * multiplier)
            row.append(mixed % modulus + offset)
        rows.append(row)
    return rows


def _vocabulary(spec: HashSpec) -> int:
    """Tokens that the hash is made for: those whose products stay in int64."""
    if spec.token_map is not None:
        return len(spec.token_map)
    return spec.multipliers[1] if spec.polynomial else (2**63 - 1) // max(spec.multipliers)


def verify_table(table: TableSource, num_tokens: int, seed: int, max_bytes: int) -> list[tuple[str, str]]:
    """Read a random sample of `num_tokens` tokens' rows in every way; what was found, as (what, result).

    Placements that hold the table are made if it has at most `max_bytes`. Raises ValueError for the first disagreement.
    """
    spec = table.spec
    chooser = random.Random(seed)
    text = [chooser.randrange(_vocabulary(spec)) for _ in range(num_tokens)]
    if spec.end_of_sequence >= 0:
        for t in range(5, num_tokens, 17):
            text[t] = spec.end_of_sequence
    zeros = torch.zeros(num_tokens, dtype=torch.int32)
    history = torch.tensor([text], dtype=torch.int32)
    position = torch.arange(num_tokens, dtype=torch.int32)
    ids = HashConstants.of([spec], _CPU).ids(history, zeros, zeros[:1], position)[0]
    if ids.tolist() != ids_by_the_rules(spec, text):
        raise ValueError(f"{table.title}: hashes differ from the rules")
    scale = read_scale(table)
    disk = DiskStore(spec.num_rows, table.format, table.segments, _CPU, scale)
    want = disk.lookup(ids, None)
    numbers = disk.lookup(ids, torch.float32)
    rows = [
        ("hashes", f"{ids.numel()} ids equal the rules"),
        ("rows", f"{disk.rows_read} read; {int((~numbers.isfinite()).any(-1).sum())} hold a number that is not finite"),
    ]
    if table.nbytes > max_bytes:
        disk.close()
        return [*rows, ("placements", f"not compared: the table has {table.nbytes / 2**30:.2f} GiB")]
    for name in _PLACEMENTS:
        store = make_store(Placement.parse(name), spec.num_rows, table.format, _CPU, table.segments, scale)
        if (held := table_of(store)) is not None:
            held.table.copy_(disk.lookup(torch.arange(spec.num_rows), None))
            if held.scale is not None and scale is not None:
                held.scale.copy_(scale)
        for _ in range(2):  # a cache answers differently the second time
            found, values = store.lookup(ids, None), store.lookup(ids, torch.float32)
            if not torch.equal(found, want) or not torch.equal(values.nan_to_num(), numbers.nan_to_num()):
                raise ValueError(f"{table.title}: {name} gives other rows than the files")
    disk.close()
    return [*rows, ("placements", f"{', '.join(_PLACEMENTS)} equal the files")]
