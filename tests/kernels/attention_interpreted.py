"""Run in a process of its own by test_interpreted.py: attention's kernels under Triton's interpreter.

It checks masks and indices: everything that is not read is NaN, and sizes are odd.
"""

import torch

from deltagram.kernels._triton import Impl
from deltagram.kernels.cache_write import cache_write
from deltagram.kernels.norm_rope import norm_rope
from deltagram.kernels.paged_attention import gather, split
from deltagram.kernels.pool_blocks import pool_blocks
from deltagram.kernels.qkv_write import qkv_write
from deltagram.kernels.select_blocks import select_blocks
from deltagram.step.plan import Kind
from deltagram.testing.attention_steps import AttentionStep, Part, Text
from deltagram.testing.interpreter import take_one_element_as_index

take_one_element_as_index()
torch.utils.deterministic.fill_uninitialized_memory = True
torch.use_deterministic_algorithms(True)  # scratch and outputs start as NaN
split.LEAST, split.MOST, split.SINGLE, gather.SIZE = 5, 4, 6, 32
CPU, NAN = torch.device("cpu"), float("nan")
IMPLS: tuple[Impl, Impl] = ("triton", "reference")


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=2e-5)


def attention(heads: int, key_heads: int, size: int) -> None:
    texts = [Text.random(210, heads, key_heads, size, seed, torch.float32, CPU) for seed in range(6)]
    parts = [
        Part(texts[0], Kind.DECODE, 0, 1),
        Part(texts[1], Kind.DECODE, 200, 1),
        Part(texts[2], Kind.DECODE, 64, 1),
        Part(texts[3], Kind.VERIFY, 126, 6),
        Part(texts[4], Kind.VERIFY, 61, 6),
        Part(texts[4], Kind.PREFILL, 0, 45),
        Part(texts[5], Kind.PREFILL, 64, 37),
    ]
    step = AttentionStep(parts, pad_tokens=3, pad_sequences=2, seed=1)
    close(step.run("triton"), step.run("reference"))
    close(step.run("triton", gated=False), step.run("reference", gated=False))
    decode = AttentionStep(parts[:5], pad_tokens=1, width=9)
    close(decode.run("triton"), decode.run("reference"))
    for listed, block_size in ((5, 8), (3, 12)):
        selected = step.some_blocks(listed, block_size)
        close(step.run("triton", selected, block_size), step.run("reference", selected, block_size))


def between(size: int, dim: int) -> None:
    torch.manual_seed(0)
    angles = torch.rand(40, dim // 2) * 7
    cos, sin = (torch.cat((part, part), 1) for part in (angles.cos(), angles.sin()))
    projected = torch.randn(7, 5 * 2 * size + 6 * size)
    projected[5:] = NAN
    gates = projected[:, : 10 * size].unflatten(1, (5, 2 * size))
    q, k, v = gates[..., :size], projected[:, 10 * size : 13 * size], projected[:, 13 * size :]
    k, v = k.unflatten(1, (3, size)), v.unflatten(1, (3, size))
    weights, position = torch.randn(2, size), torch.tensor([3, 0, 31, 32, 39, 0, 0], dtype=torch.int32)
    cu_tokens, index = torch.tensor([0, 2, 5, 5], dtype=torch.int32), torch.tensor([31, 0, 5, 8, 14, -1, 1 << 40])
    ours, expected = (norm_rope(q, weights[0], cos, sin, position, 1e-6, impl) for impl in IMPLS)
    close(ours[:5], expected[:5])
    first = torch.randn(2, 4, 8, 3, size)
    pools = first, first.clone()
    outs = [
        qkv_write(
            q, k, v, weights[0], weights[1], cos, sin, position, index, cu_tokens, caches[0], caches[1], 1e-6, impl
        )
        for caches, impl in zip(pools, IMPLS, strict=True)
    ]
    close(outs[0][:5], outs[1][:5])
    for ours, expected in zip(*pools, strict=True):
        close(ours, expected)
        cache_write(ours, v, index, cu_tokens, "triton")
        cache_write(expected, v, index, cu_tokens, "reference")
        assert torch.equal(ours, expected)


def blocks(size: int, heads: int, block_size: int, top_k: int) -> None:
    torch.manual_seed(1)
    page, dim = 4 * block_size, 6
    keys = torch.randn(12, page, size)
    angles = torch.rand(200, dim // 2) * 7
    cos, sin = (torch.cat((part, part), 1) for part in (angles.cos(), angles.sin()))
    lengths, new = [5 * page - 3, 3, page + block_size, 2 * page + 1], [30, 3, 1, 1]
    table = torch.randperm(12)[:11].int()
    table = torch.stack([torch.cat((row, table[:1]))[:6] for row in (table[:5], table[5:10], table[3:8], table[6:11])])
    cu_tokens = torch.tensor([0, *new, 0]).cumsum(0).int()
    positions = [p for end, n in zip(lengths, new, strict=True) for p in range(end - n, end)]
    position = torch.tensor([*positions, 0, 7]).int()
    sequence = [n for n, count in enumerate(new) for _ in range(count)]
    places = [int(table[n, p // page]) * page + p % page for n, p in zip(sequence, positions, strict=True)]
    index = torch.tensor([*places, -1, -1])
    pooled = [torch.full((12, 4, size), 7.0) for _ in range(2)]
    for pool, impl in zip(pooled, IMPLS, strict=True):
        pool_blocks(keys, pool, torch.ones(size), cos, sin, position, index, cu_tokens, block_size, 1e-6, impl)
    close(*pooled)
    pool = torch.randn(12, 4, size)
    pool[:, 1::2] = 0  # equal scores
    q = torch.randn(len(position), heads, size)
    tables = table, torch.tensor([0, 1, 2, 3, 0]).int(), cu_tokens, torch.tensor([*lengths, 0]).int(), position
    ours, expected = (select_blocks(q, pool, *tables, block_size, top_k, impl).sort(1).values for impl in IMPLS)
    assert torch.equal(ours, expected)


attention(6, 2, 20)
attention(2, 2, 7)
between(20, 6)
between(32, 32)
blocks(20, 3, 4, 5)
blocks(16, 4, 6, 3)
blocks(16, 4, 4, 30)
