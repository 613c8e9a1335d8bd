"""A conformance kit for n-gram memory: golden vectors, and fuzzers for any engine's own hash and lookup.
docs/conformance.md.

Everything here is Python's integers and NumPy's float64, straight from the families' rules; none of it shares code with
the kernels it checks. The golden vectors were written by tests/ngram/write_golden.py from implementations by others.
"""

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from deltagram.ngram.formats import RowFormat
from deltagram.ngram.spec import HashSpec
from deltagram.ngram.verify import ids_by_the_rules

GOLDEN = Path(__file__).parent / "ngram_golden.json"

Ids = Sequence[Sequence[Sequence[int]]]
HashFunction = Callable[[list[int], list[bool]], Ids]
LookupFunction = Callable[[bytes, list[int]], Any]


class Disagreement(AssertionError):
    """An implementation and the rules differ; the message has the input and the first place."""


class StatefulHash(Protocol):
    """An engine that keeps what it needs of each request's past."""

    def extend(self, request: int, tokens: list[int], dead: list[bool]) -> Ids:
        """Ids [layers][T][columns] of `tokens`, which follow those that `request` has."""
        ...

    def truncate(self, request: int, length: int) -> None:
        """Keep the first `length` tokens of `request`: drafts were rejected, or it was preempted (0)."""
        ...


def golden() -> dict[str, Any]:
    """The golden vectors; docs/conformance.md describes each field."""
    vectors: dict[str, Any] = json.loads(GOLDEN.read_text())
    return vectors


def random_text(specs: Sequence[HashSpec], length: int, chooser: random.Random) -> tuple[list[int], list[bool]]:
    """Tokens and their dead marks, with ends of sequence, runs of one token, ignored tokens and dead spans among
    them."""
    spec = specs[0]
    if spec.token_map is not None:
        vocabulary = len(spec.token_map)
    elif spec.polynomial:
        vocabulary = spec.multipliers[1]
    else:  # the tokens whose products stay in int64
        vocabulary = (2**63 - 1) // max(multiplier for each in specs for multiplier in each.multipliers)
    special = [0, vocabulary - 1, *([spec.end_of_sequence] if spec.end_of_sequence >= 0 else [])]
    if spec.token_map is not None:
        special += [token for token, mapped in enumerate(spec.token_map) if mapped < 0][:3]
    tokens: list[int] = []
    dead: list[bool] = []
    while len(tokens) < length:
        span = chooser.randint(1, 6)
        kind = chooser.random()
        if kind < 0.25:
            tokens += [chooser.choice(special)] * chooser.randint(1, 2)
        elif kind < 0.4:
            tokens += [chooser.randrange(vocabulary)] * span
        else:
            tokens += [chooser.randrange(vocabulary) for _ in range(span)]
        dead += [kind > 0.9] * (len(tokens) - len(dead))
    return tokens[:length], dead[:length]


def fuzz_hash(specs: Sequence[HashSpec], hash_text: HashFunction, cases: int = 100, seed: int = 0) -> None:
    """Compare `hash_text(tokens, dead)` -> ids [layers][T][columns] with the rules on random texts. Raises
    Disagreement."""
    chooser = random.Random(seed)
    for case in range(cases):
        tokens, dead = random_text(specs, case % 9 + 1 if case < 18 else chooser.randint(1, 200), chooser)
        _compare(specs, tokens, dead, 0, hash_text(tokens, dead))


def fuzz_stateful_hash(specs: Sequence[HashSpec], engine: StatefulHash, steps: int = 300, seed: int = 0) -> None:
    """Drive an engine through interleaved requests, chunks, rejected drafts and preemptions. Raises Disagreement."""
    chooser = random.Random(seed)
    texts: dict[int, tuple[list[int], list[bool]]] = {request: ([], []) for request in range(4)}
    for _ in range(steps):
        request = chooser.randrange(len(texts))
        tokens, dead = texts[request]
        if tokens and chooser.random() < 0.3:
            keep = 0 if chooser.random() < 0.2 else len(tokens) - chooser.randint(1, min(5, len(tokens)))
            del tokens[keep:], dead[keep:]
            engine.truncate(request, keep)
        new, new_dead = random_text(specs, chooser.choice((1, 1, 2, 5, 64)), chooser)
        begin = len(tokens)
        tokens += new
        dead += new_dead
        _compare(specs, tokens, dead, begin, engine.extend(request, new, new_dead))


def fuzz_lookup(form: RowFormat, lookup: LookupFunction, cases: int = 20, seed: int = 0) -> None:
    """Compare `lookup(table bytes, ids)` -> fp32 [n, dim] with the definition of `form`, bit by bit but for which NaN a
    NaN is.

    Id -1 is a row of zeros. Tables have every byte; a format with one scale has SCALE. Raises Disagreement.
    """
    chooser = np.random.default_rng(seed)
    for case in range(cases):
        rows = int(chooser.integers(1, 60))
        table = chooser.integers(0, 256, (rows, form.row_bytes), dtype=np.uint8)
        ids = chooser.integers(-1, rows, int(chooser.integers(1, 90)))
        ids[chooser.random(len(ids)) < 0.2] = ids[0]
        want = rows_by_the_rules(form, table, ids, SCALE)
        got = np.asarray(lookup(table.tobytes(), ids.tolist()), dtype=np.float32)
        nan = np.isnan(want)
        same = got.shape == want.shape and np.array_equal(np.isnan(got), nan)
        if not same or not np.array_equal(np.where(nan, 0, got).view(np.int32), np.where(nan, 0, want).view(np.int32)):
            raise Disagreement(f"case {case}, seed {seed}: rows {ids.tolist()[:20]} of a table of {form} differ")


SCALE = np.float32(0.37)  # of a table with one scale


def rows_by_the_rules(form: RowFormat, table: np.ndarray, ids: np.ndarray, scale: np.float32) -> np.ndarray:
    """fp32 [n, dim]: the products exact in float64, then rounded once."""
    with np.errstate(over="ignore", invalid="ignore"):  # random bytes are infinities and signalling NaNs too
        rounded = _values(form, table, scale).astype(np.float32)
    return np.where((ids < 0)[:, None], np.float32(0), rounded[np.maximum(ids, 0)])


def _values(form: RowFormat, table: np.ndarray, scale: np.float32) -> np.ndarray:
    name = str(form.values).removeprefix("torch.")
    raw = np.ascontiguousarray(table[:, : form.value_bytes])
    if name == "float8_e4m3fn":
        values = np.array([_e4m3(byte) for byte in range(256)])[raw]
    elif name == "bfloat16":
        values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    else:
        values = raw.view(np.float16 if name == "float16" else np.float32).astype(np.float64)
    if form.group:
        powers = np.array([2.0 ** (byte - 127) for byte in range(255)] + [math.nan])
        values = values * np.repeat(powers[table[:, form.value_bytes :]], form.group, axis=1)
    if form.table_scale:
        values = values * np.float64(scale)
    return values


def _e4m3(byte: int) -> float:
    exponent, mantissa, sign = byte >> 3 & 15, byte & 7, -1.0 if byte & 128 else 1.0
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 512 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def _compare(specs: Sequence[HashSpec], tokens: list[int], dead: list[bool], begin: int, got: Ids) -> None:
    if len(got) != len(specs):
        raise Disagreement(f"{len(got)} layers of ids; expected {len(specs)}")
    for layer, spec in enumerate(specs):
        want = ids_by_the_rules(spec, tokens, dead)[begin:]
        found = [list(map(int, row)) for row in got[layer]]
        if found != want:
            wrong = next((t for t, row in enumerate(want) if t >= len(found) or found[t] != row), len(want))
            at = f"layer {layer}, position {begin + wrong} of {tokens[: begin + wrong + 1][-12:]} (the last tokens)"
            one = found[wrong] if wrong < len(found) else None
            raise Disagreement(
                f"{at}, dead {dead[: begin + wrong + 1][-12:]}: {one}; expected {want[wrong : wrong + 1]}"
            )
