"""Run in a process of its own by test_interpreted.py: the kernels of memory under Triton's interpreter, on the CPU.

It checks masks and indices on tiny shapes in fp32: everything that must not be read is out of range or NaN.
"""

import random

import numpy as np
import torch

from deltagram.kernels.engram_fuse import engram_fuse
from deltagram.kernels.flag_wait import flag_wait
from deltagram.kernels.ngram_hash import ngram_hash
from deltagram.kernels.row_decode import row_decode
from deltagram.kernels.row_lookup import row_lookup
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
    for value, outcome in ((4, 1), (5, 0), (6, 0)):
        flag, epoch, failed = torch.tensor([value]), torch.tensor([5]), torch.tensor([0])
        flag_wait(flag, epoch, failed, 3, impl="triton")
        assert int(failed) == outcome


torch.manual_seed(0)
sizes = {"vocab_size": 50, "max_order": 3, "heads": 2, "base": 31, "divisor": 8, "seed": 1234, "end_of_sequence": 3}
check_hash([qwen4_exp_spec(**sizes, layer=layer) for layer in range(2)])
check_hash(engram_hashes())
check_hash([longcat_hash()])
for each in FORMATS:
    check_rows(each)
check_fuse()
check_wait()
