"""What a draft head runs on: all bodies agree on any step; what it means is tests/models/test_mtp.py's."""

import random

import pytest
import torch
from torch import Tensor

from deltagram.kernels.derive_drafts import derive_drafts

PAGES, PAGE, CONTEXT = 9, 16, 140


def step(seed: int, sequences: int, max_draft: int) -> list[Tensor]:
    """Sequences of any length that want any number of drafts, and padding; the last row is the pad row."""
    draw = random.Random(seed)
    spare = draw.randint(0, 3)
    rows = sequences + 2
    new = [draw.choice([1, 1, 3, 70]) for _ in range(sequences)]
    known = [draw.randint(count + 1, CONTEXT - max_draft) for count in new]
    owners = draw.sample(range(rows - 1), sequences)
    lengths = torch.full((rows,), 2, dtype=torch.int32)
    starts = []
    for owner, count, length in zip(owners, new, known, strict=True):
        lengths[owner] = length
        starts.append(length - 1 - count + draw.randint(0, count - 1))
    ends = [sum(new[: n + 1]) for n in range(sequences)]
    padding = draw.randint(0, 4)
    of = [n for n, count in enumerate(new) for _ in range(count)]
    at = [starts[n] + i for n, count in enumerate(new) for i in range(count)]
    fields = [
        [draw.randint(0, max_draft) for _ in new] + [0] * spare,
        owners + [rows - 1] * spare,
        [0, *ends] + [sum(new)] * spare,
        starts + [0] * spare,
        of + [-1] * padding,
        at + [0] * padding,
    ]
    tokens = torch.randint(0, 999, (rows, CONTEXT), generator=torch.Generator().manual_seed(seed)).int()
    pages = torch.randint(0, 50, (rows, PAGES), generator=torch.Generator().manual_seed(seed)).int()
    return [*(torch.tensor(field, dtype=torch.int32) for field in fields), tokens, lengths, pages]


def agree(ours: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(
        mine.dtype == theirs.dtype and torch.equal(mine.cpu(), theirs)
        for mine, theirs in zip(ours, expected, strict=True)
    )


@pytest.mark.parametrize("max_draft", [1, 2, 5])
def test_both_bodies_agree(max_draft: int) -> None:
    for seed in range(100):
        arguments = step(seed, seed % 7 + 1, max_draft)
        compiled = derive_drafts(*arguments, PAGE, max_draft, "compiled")  # type: ignore[arg-type, misc]
        assert agree(compiled, derive_drafts(*arguments, PAGE, max_draft, "reference")), seed  # type: ignore[arg-type, misc]


def test_a_step_by_hand() -> None:
    """Request 1 has 7 tokens and ran position 5, request 0 has 20 and ran 17 and 18; its second draft was rejected."""

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    tokens = torch.arange(3 * 32, dtype=torch.int32).view(3, 32)
    pages = torch.tensor([[3, 4], [5, 6], [0, 0]], dtype=torch.int32)
    for impl in ("compiled", "reference"):
        follower, order, first, counts, kind, row, cu_tokens, sequence, position, length, place = derive_drafts(
            ints(1, 3), ints(0, 1), ints(0, 3, 4), ints(17, 5), ints(0, 0, 0, 1, -1), ints(17, 18, 19, 5, 0),
            tokens, ints(20, 7, 2), pages, 16, 3, impl,  # type: ignore[arg-type]
        )  # fmt: skip
        assert follower.tolist() == [18, 19, 20, 32 + 6, 0]
        assert order.tolist() == [1, 0] and first.tolist() == [3, 1]
        assert counts.tolist() == [[1, 1, 0, 0]] * 2 and kind.tolist() == [[0, 3]] * 2
        assert row.tolist() == [[1, 2]] * 2 and cu_tokens.tolist() == [[0, 1, 1]] * 2
        assert sequence.tolist() == [[0, -1]] * 2 and position.tolist() == [[6, 0], [7, 0]]
        assert length.tolist() == [[7, 0], [8, 0]] and place.tolist() == [[5 * 16 + 6, -1], [5 * 16 + 7, -1]]


@pytest.mark.gpu
@pytest.mark.parametrize("max_draft", [1, 2, 5])
def test_the_gpu_agrees(max_draft: int) -> None:
    for seed, sequences in [*((seed, seed % 7 + 1) for seed in range(30)), (0, 60), (1, 300)]:
        arguments = step(seed, sequences, max_draft)
        ours = derive_drafts(*(each.cuda() for each in arguments), PAGE, max_draft)  # type: ignore[arg-type, misc]
        assert agree(ours, derive_drafts(*arguments, PAGE, max_draft, "reference")), seed  # type: ignore[arg-type, misc]
