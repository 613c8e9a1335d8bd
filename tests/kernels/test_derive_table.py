"""The derived sequence table: compiled and reference agree on any step; what it means is
tests/step/test_sequences.py's."""

import random

import pytest
import torch
from torch import Tensor

from deltagram.kernels.derive_table import derive_table

ROWS, PAGES, PAGE, CONTEXT = 6, 9, 16, 140  # the last row is the pad row


def step(seed: int, padded: bool) -> tuple[list[Tensor], int]:
    """Random sequences of every kind, in a bucket with or without room to spare."""
    draw = random.Random(seed)
    rows = draw.sample(range(ROWS - 1), draw.randint(0 if padded else 1, ROWS - 1))
    kinds = sorted(draw.randint(0, 2) for _ in rows)
    new = [1 if kind == 0 else draw.randint(2, 4) if kind == 1 else draw.choice([1, 64, 70]) for kind in kinds]
    spare = draw.randint(1, 3) if padded else 0
    lengths = torch.tensor([draw.randint(1, 60) for _ in range(ROWS)], dtype=torch.int32)
    counts = torch.tensor([sum(new), len(rows), 0, draw.randint(0, 3)], dtype=torch.int32)
    starts = [draw.randint(0, 60) if kind == 2 else -1 for kind in kinds]
    packed = [
        counts,
        torch.tensor(kinds + [3] * spare, dtype=torch.int32),
        torch.tensor(rows + [ROWS - 1] * spare, dtype=torch.int32),
        torch.tensor([sum(new[:n]) for n in range(len(new) + 1)] + [sum(new)] * spare, dtype=torch.int32),
        torch.tensor(starts + [-1] * spare, dtype=torch.int32),
        torch.tensor([[draw.randrange(ROWS), draw.randrange(PAGES), draw.randrange(99)] for _ in range(4)]).int(),
        torch.tensor([[draw.randrange(1000) for _ in range(CONTEXT)] for _ in range(ROWS)], dtype=torch.int32),
        lengths,
        torch.tensor([draw.randint(0, 4) for _ in range(ROWS)], dtype=torch.int32),
        torch.tensor([[draw.randrange(50) for _ in range(PAGES)] for _ in range(ROWS)], dtype=torch.int32),
    ]
    return packed, sum(new) + (draw.randint(1, 5) if padded else 0)


@pytest.mark.parametrize("padded", [False, True])
def test_both_bodies_agree(padded: bool) -> None:
    for seed in range(100):
        packed, num_rows = step(seed, padded)
        pages = [packed[-1].clone() for _ in range(2)]
        compiled, reference = (
            derive_table(*packed[:-1], table, PAGE, num_rows, impl)  # type: ignore[misc, arg-type]
            for table, impl in zip(pages, ("compiled", "reference"), strict=True)
        )
        assert torch.equal(*pages)
        for ours, expected in zip(compiled, reference, strict=True):
            assert ours.dtype == expected.dtype and torch.equal(ours, expected)
