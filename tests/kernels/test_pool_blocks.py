"""Block keys of the indexer: which blocks a step completes, and what they hold."""

import pytest
import torch

from deltagram.kernels.pool_blocks import pool_blocks

PAGE, BLOCK, SIZE, DIM = 8, 4, 20, 6


@pytest.mark.parametrize("impl", ["compiled", "reference"])
def test_blocks_that_end_in_the_step(impl: str) -> None:
    torch.manual_seed(0)
    keys = torch.full((5, PAGE, SIZE), float("nan"))
    held = {0: (3, 1, 4), 1: (2,)}  # pages of two sequences: 21 and 3 tokens
    lengths = (21, 3)
    for n, pages in held.items():
        for p in range(lengths[n]):
            keys[pages[p // PAGE], p % PAGE] = torch.randn(SIZE)
    new = [(0, p) for p in range(6, 21)] + [(1, p) for p in range(3)]  # tokens of the step, then two of padding
    position = torch.tensor([p for _, p in new] + [3, 7], dtype=torch.int32)
    index = torch.tensor([held[n][p // PAGE] * PAGE + p % PAGE for n, p in new] + [-1, -1])
    cu_tokens = torch.tensor([0, 15, 18, 18], dtype=torch.int32)
    weight, angles = torch.randn(SIZE), torch.rand(32, DIM // 2)
    cos, sin = (torch.cat((part, part), 1) for part in (angles.cos(), angles.sin()))
    blocks = torch.full((5, PAGE // BLOCK, SIZE), 7.0)
    expected = blocks.double()
    for first in (4, 8, 12, 16):  # of sequence 0; its block at 0 was complete before, sequence 1 completes none
        page = held[0][first // PAGE]
        mean = keys[page, first % PAGE : first % PAGE + BLOCK].double().mean(0)
        key = mean / (mean.square().mean() + 1e-6).sqrt() * weight
        low, high, c, s = key[:3].clone(), key[3:6].clone(), cos[first, :3], sin[first, :3]
        key[:3], key[3:6] = low * c - high * s, high * c + low * s
        expected[page, first % PAGE // BLOCK] = key
    pool_blocks(keys, blocks, weight, cos, sin, position, index, cu_tokens, BLOCK, 1e-6, impl)  # type: ignore[arg-type]
    torch.testing.assert_close(blocks.double(), expected, rtol=1e-5, atol=1e-6)
