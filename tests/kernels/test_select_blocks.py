"""select_blocks against a transcription of its rule, one query at a time."""

import torch
from torch import Tensor

from deltagram.kernels.select_blocks import select_blocks

PAGE, BLOCK, DIM = 16, 4, 8


def paged(contexts: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
    """Block keys of each request in scattered pages; everything else is NaN."""
    a_page = PAGE // BLOCK
    pages_each = [-(-len(keys) // a_page) for keys in contexts]
    pool = torch.full((sum(pages_each) + 2, a_page, DIM), float("nan"))
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(1)).tolist()
    table = torch.zeros(len(contexts) + 1, max(pages_each, default=0) + 1, dtype=torch.int32)
    for row, keys in enumerate(contexts):
        for index in range(pages_each[row]):
            table[row, index] = order.pop()
        for block, key in enumerate(keys):
            pool[table[row, block // a_page], block % a_page] = key
    return pool, table


def naive(q: Tensor, keys: list[Tensor], position: int, top_k: int) -> set[int]:
    complete = min((position + 1) // BLOCK, len(keys))
    scores = [float((q.double() @ keys[b].double()).relu().sum()) for b in range(complete)]
    return set(sorted(range(complete), key=lambda b: (-scores[b], b))[:top_k])


def run(lengths: list[int], new: list[int], top_k: int, ties: bool = False) -> None:
    random = torch.Generator().manual_seed(sum(lengths))
    contexts = [[torch.randn(DIM, generator=random) for _ in range(length // BLOCK)] for length in lengths]
    if ties:
        contexts = [[torch.zeros(DIM) if b % 3 else key for b, key in enumerate(keys)] for keys in contexts]
    pool, table = paged(contexts)
    cu = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
    positions = [length - n + i for length, n in zip(lengths, new, strict=True) for i in range(n)]
    padding = 3
    q = torch.randn(len(positions) + padding, 4, DIM, generator=random)
    chosen = select_blocks(
        q,
        pool,
        table,
        torch.arange(len(lengths), dtype=torch.int32),
        cu,
        torch.tensor(lengths, dtype=torch.int32),
        torch.tensor(positions + [0] * padding, dtype=torch.int32),
        BLOCK,
        top_k,
    )
    assert chosen.shape == (len(q), top_k) and chosen.dtype == torch.int32
    owner = [n for n, size in enumerate(new) for _ in range(size)]
    for t, position in enumerate(positions):
        got = chosen[t][chosen[t] >= 0].tolist()
        assert len(got) == len(set(got))
        assert set(got) == naive(q[t], contexts[owner[t]], position, top_k)
    assert (chosen[len(positions) :] == -1).all()


def test_decode_and_prefill_of_several_requests() -> None:
    run([37, 64, 3, 20], [1, 30, 3, 1], top_k=5)


def test_fewer_blocks_than_asked_for() -> None:
    run([9, 4, 1], [9, 1, 1], top_k=6)


def test_equal_scores_go_to_the_lower_block() -> None:
    run([60, 48], [7, 1], top_k=6, ties=True)


def test_a_step_without_tokens() -> None:
    run([12, 8], [0, 0], top_k=2)
