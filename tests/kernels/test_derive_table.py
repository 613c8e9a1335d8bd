"""The derived sequence table: all bodies agree on any step; what it means is tests/step/test_sequences.py's."""

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
    granted = draw.sample(range((ROWS - 1) * PAGES), 4)
    packed = [
        counts,
        torch.tensor(kinds + [3] * spare, dtype=torch.int32),
        torch.tensor(rows + [ROWS - 1] * spare, dtype=torch.int32),
        torch.tensor([sum(new[:n]) for n in range(len(new) + 1)] + [sum(new)] * spare, dtype=torch.int32),
        torch.tensor(starts + [-1] * spare, dtype=torch.int32),
        torch.tensor([[*divmod(entry, PAGES), draw.randrange(99)] for entry in granted], dtype=torch.int32),
        torch.tensor([[draw.randrange(1000) for _ in range(CONTEXT)] for _ in range(ROWS)], dtype=torch.int32),
        lengths,
        torch.tensor([draw.randint(0, 7) for _ in range(ROWS)], dtype=torch.int32),
        torch.tensor([[draw.randrange(50) for _ in range(PAGES)] for _ in range(ROWS)], dtype=torch.int32),
    ]
    return packed, sum(new) + (draw.randint(1, 5) if padded else 0)


@pytest.mark.parametrize("padded", [False, True])
def test_both_bodies_agree(padded: bool) -> None:
    for seed in range(100):
        packed, num_rows = step(seed, padded)
        written = [[tensor.clone() for tensor in packed[-2:]] for _ in range(2)]
        compiled, reference = (
            derive_table(*packed[:-2], *mine, PAGE, 1 + seed % 5, seed % 3, num_rows, impl)  # type: ignore[misc, arg-type]
            for mine, impl in zip(written, ("compiled", "reference"), strict=True)
        )
        assert all(torch.equal(*pair) for pair in zip(*written, strict=True))
        for ours, expected in zip(compiled, reference, strict=True):
            assert ours.dtype == expected.dtype and torch.equal(ours, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("padded", [False, True])
def test_the_gpu_agrees(padded: bool) -> None:
    """Also where many tokens and sequences take several programs, and a token's page is granted in the same step."""
    for seed in range(40):
        packed, num_rows = step(seed, padded)
        arguments, every = [each.cuda() for each in packed], (1 + seed % 5, seed % 3)
        ours = derive_table(*arguments, PAGE, *every, num_rows)  # type: ignore[arg-type, misc]
        expected = derive_table(*packed, PAGE, *every, num_rows, "reference")  # type: ignore[arg-type, misc]
        assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(arguments[-2:], packed[-2:], strict=True))
        for mine, theirs in zip(ours, expected, strict=True):
            assert mine.dtype == theirs.dtype and torch.equal(mine.cpu(), theirs)


def many(tokens: int, sequences: int, granted: int) -> list[Tensor]:
    """Prefill of `sequences` chunks of `tokens` each, with their first pages granted."""
    starts = torch.arange(sequences, dtype=torch.int32) * 3
    rows = torch.randperm(sequences, dtype=torch.int32)
    pages = -(-(tokens + 3 * sequences) // PAGE)
    grants = torch.full((sequences, 3), 7, dtype=torch.int32)
    grants[:, 0], grants[:, 1] = rows, starts // PAGE
    return [
        torch.tensor([tokens * sequences, sequences, 0, granted], dtype=torch.int32),
        torch.full((sequences,), 2, dtype=torch.int32),
        rows,
        torch.arange(sequences + 1, dtype=torch.int32) * tokens,
        starts,
        grants,
        torch.randint(0, 999, (sequences + 1, tokens + 3 * sequences), dtype=torch.int32),
        torch.ones(sequences + 1, dtype=torch.int32),
        torch.full((sequences + 1,), 3, dtype=torch.int32),
        torch.randint(9, 99, (sequences + 1, pages), dtype=torch.int32),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "sequences", "granted"), [(1, 300, 300), (17, 150, 77), (700, 3, 0)])
def test_the_gpu_agrees_on_large_steps(tokens: int, sequences: int, granted: int) -> None:
    torch.manual_seed(0)
    packed = many(tokens, sequences, granted)
    arguments = [each.cuda() for each in packed]
    ours = derive_table(*arguments, PAGE, 4, 2, tokens * sequences + 5)  # type: ignore[arg-type, misc]
    expected = derive_table(*packed, PAGE, 4, 2, tokens * sequences + 5, "reference")  # type: ignore[arg-type, misc]
    assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(arguments[-2:], packed[-2:], strict=True))
    assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(ours, expected, strict=True))


@pytest.mark.gpu
def test_a_replayed_graph_takes_the_step_of_its_replay() -> None:
    """One bucket, other sequences, tokens and grants in every replay."""
    packed, num_rows = step(0, True)
    bucket = len(packed[1]) + 5, num_rows + 700  # sequences and tokens

    def padded(packed: list[Tensor]) -> list[Tensor]:
        counts, kind, row, cu_tokens, start, *rest = packed
        pad = bucket[0] - len(kind)
        return [
            counts,
            torch.cat([kind, kind.new_full((pad,), 3)]),
            torch.cat([row, row.new_full((pad,), ROWS - 1)]),
            torch.cat([cu_tokens, cu_tokens[-1:].expand(pad)]),
            torch.cat([start, start.new_full((pad,), -1)]),
            *rest,
        ]

    buffers = [each.cuda() for each in padded(packed)]
    derive_table(*buffers, PAGE, 4, 2, bucket[1])  # type: ignore[arg-type, misc]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = derive_table(*buffers, PAGE, 4, 2, bucket[1])  # type: ignore[arg-type, misc]
    for seed in range(20):
        packed, num_rows = step(seed, True)
        if len(packed[1]) > bucket[0] or num_rows > bucket[1]:
            continue
        packed = padded(packed)
        for buffer, value in zip(buffers, packed, strict=True):
            buffer.copy_(value)
        graph.replay()
        expected = derive_table(*packed, PAGE, 4, 2, bucket[1], "reference")  # type: ignore[arg-type, misc]
        assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(buffers[-2:], packed[-2:], strict=True))
        assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(captured, expected, strict=True))
