"""Run in a process of its own by test_interpreted.py: the kernels of memory under Triton's interpreter, on the CPU.

It checks masks and indices on tiny shapes in fp32: everything that must not be read is out of range or NaN.
"""

import random

import numpy as np
import torch

from deltagram.kernels._layouts import BITS, PIECE, new_slots, new_state
from deltagram.kernels.cache_keep import cache_keep
from deltagram.kernels.cache_probe import cache_probe
from deltagram.kernels.engram_fuse import engram_fuse
from deltagram.kernels.flag_wait import flag_wait
from deltagram.kernels.host_ask import host_ask
from deltagram.kernels.ngram_hash import ngram_hash
from deltagram.kernels.row_decode import row_decode
from deltagram.kernels.row_lookup import row_lookup
from deltagram.ngram.formats import RowFormat
from deltagram.ngram.spec import HashConstants, HashSpec, qwen4_exp_spec
from deltagram.testing.ngram import FORMATS, SCALE, random_table, same_bits
from deltagram.testing.ngram_checkpoints import engram_hashes, longcat_hash
from deltagram.testing.ngram_conformance import random_text

np.seterr(all="ignore")
CPU = torch.device("cpu")


def check_hash(specs: list[HashSpec]) -> None:
    constants = HashConstants.of(specs, CPU)
    tokens, dead = random_text(specs, 90, random.Random(0))
    history = torch.full((5, 30), 2**31 - 1, dtype=torch.int32)
    marks = torch.zeros(5, 30, dtype=torch.bool)
    for row in range(3):
        history[row + 1, :25] = torch.tensor(tokens[row * 25 : row * 25 + 25])
        marks[row + 1, :25] = torch.tensor(dead[row * 25 : row * 25 + 25])
    sequence = torch.tensor([0] * 7 + [1] * 5 + [2] * 4 + [-1] * 3, dtype=torch.int32)
    position = torch.tensor([*range(7), *range(10, 15), *range(4), 2**31 - 1, -5, 0], dtype=torch.int32)
    row = torch.tensor([3, 1, 2], dtype=torch.int32)
    places = constants.multipliers, constants.moduli, constants.offsets, constants.fill, constants.end_of_sequence
    for each in (None, marks):
        given = history, sequence, row, position, *places, constants.polynomial, constants.token_map, each
        assert torch.equal(ngram_hash(*given), ngram_hash(*given, impl="triton"))


def check_rows(name: str) -> None:
    form = FORMATS[name]
    table = random_table(form, 40)
    scale = torch.tensor([SCALE]) if form.table_scale else None
    for ids_type in (torch.int32, torch.int64):
        ids = torch.randint(-1, 40, (11, 3), dtype=ids_type)
        held = torch.full((11, 3, form.row_bytes), 7, dtype=torch.uint8)
        assert torch.equal(row_lookup(table, ids), row_lookup(table, ids, impl="triton"))
        kept = row_lookup(table, ids, held.clone(), keep=True, impl="triton")
        assert torch.equal(row_lookup(table, ids, held.clone(), keep=True), kept)
        given = table, ids, form.values, form.dim, torch.float32, form.group, scale
        assert form.values == torch.bfloat16 or same_bits(row_decode(*given), row_decode(*given, impl="triton"))


def check_fuse() -> None:
    x, kv, weight = torch.randn(5, 4, 24), torch.randn(5, 5 * 24), torch.randn(4, 24)
    key, value = kv[:, :96].unflatten(1, (4, 24)), kv[:, 96:]
    x[1] = 0
    for live in (None, torch.tensor([True, False, True, True, False])):
        want = engram_fuse(x, key, value, weight, 1e-6, live)
        torch.testing.assert_close(engram_fuse(x, key, value, weight, 1e-6, live, impl="triton"), want)


def check_wait() -> None:
    for flags, outcome in (([4], 1), ([5], 0), ([6, 5, 9], 0), ([6, 4, 9], 1)):
        flag, epoch, failed = torch.tensor([*flags, 0]), torch.tensor([5]), torch.tensor([0])
        flag_wait(flag[:-1], epoch, failed, 3, impl="triton")
        assert int(failed) == outcome


def check_ask() -> None:
    host_ids, asked, counters = torch.full((2048,), -7), torch.zeros(1, dtype=torch.int64), torch.tensor([0, 0])
    for lookup, count in enumerate((1100, 5, PIECE, 1024), 1):
        ids, pieces = torch.randint(-1, 1000, (count,)), -(-count // PIECE)
        there = host_ids.clone()
        host_ask(ids, host_ids, asked, counters, impl="triton")
        assert torch.equal(host_ids[:count], ids) and (host_ids[count : pieces * PIECE] == -1).all()
        assert torch.equal(host_ids[pieces * PIECE :], there[pieces * PIECE :])
        assert int(asked) == (lookup << BITS) + pieces and counters.tolist() == [lookup, 0]


def check_cache(form: RowFormat) -> None:
    table, sets = random_table(form, 40), []
    for impl in ("reference", "triton"):
        generator = torch.Generator().manual_seed(1)
        rows = torch.zeros(7, form.row_bytes, dtype=torch.uint8)
        slots, state = new_slots(7, CPU), new_state(CPU)
        for step in range(12):
            ids = torch.randint(-1, 40 if step % 3 else 9, (1 + 3 * step,), generator=generator)
            missing = cache_probe(ids, slots, state, impl=impl)
            packed = row_lookup(table, missing)
            cache_keep(ids, missing, packed, rows, slots, state, impl=impl)
            assert torch.equal(packed, row_lookup(table, ids))
        sets.append((rows, slots, state))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*sets, strict=True))


torch.manual_seed(0)
sizes = {"vocab_size": 50, "max_order": 3, "heads": 2, "base": 31, "divisor": 8, "seed": 1234, "end_of_sequence": 3}
check_hash([qwen4_exp_spec(**sizes, layer=layer) for layer in range(2)])
check_hash(engram_hashes())
check_hash([longcat_hash()])
for each in FORMATS:
    check_rows(each)
    check_cache(FORMATS[each])
check_fuse()
check_wait()
check_ask()
