"""The small ops around attention on a GPU: error against float64, choices by rule, padding left alone."""

import pytest
import torch
from torch import Tensor

from deltagram.kernels.cache_write import cache_write
from deltagram.kernels.norm_rope import norm_rope
from deltagram.kernels.pool_blocks import pool_blocks
from deltagram.kernels.qkv_write import qkv_write
from deltagram.kernels.select_blocks import select_blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float32]


def rotary(positions: int, dim: int) -> tuple[Tensor, Tensor]:
    angles = torch.rand(positions, dim // 2, device=CUDA) * 7
    cos, sin = (torch.cat((part, part), 1) for part in (angles.cos(), angles.sin()))
    return cos, sin


def within_twice(ours: Tensor, plain: Tensor, exact: Tensor) -> None:
    """Of the whole and of the worst row; fp32 has a floor of its own."""
    floor = 1e-7 if ours.dtype == torch.float32 else 0
    error, allowed = ours.double() - exact, plain.double() - exact
    assert error.norm() <= 2 * allowed.norm() + 4 * floor * exact.norm()
    worst, mean = error.norm(dim=-1).max(), exact.norm(dim=-1).mean()
    assert worst <= 2 * allowed.norm(dim=-1).max() + 40 * floor * mean


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "key_heads", "size", "dim"), [(16, 4, 256, 64), (6, 3, 80, 20), (5, 1, 64, 64)])
def test_qkv_write(dtype: torch.dtype, heads: int, key_heads: int, size: int, dim: int) -> None:
    torch.manual_seed(0)
    rows, real = 70, 65
    cos, sin = rotary(500, dim)
    projected = torch.randn(rows, (2 * heads + 2 * key_heads) * size, device=CUDA).to(dtype)
    projected[real:] = float("nan")
    q = projected[:, : 2 * heads * size].unflatten(1, (heads, 2 * size))[..., :size]
    k, v = projected[:, 2 * heads * size :].unflatten(1, (2 * key_heads, size)).chunk(2, 1)
    weights = torch.randn(2, size, device=CUDA)
    position = torch.randint(500, (rows,), dtype=torch.int32, device=CUDA)
    index = torch.randperm(4 * 64, device=CUDA)[:rows]
    index[real:] = -1
    cu_tokens = torch.tensor([0, 1, real, real], dtype=torch.int32, device=CUDA)
    pool = torch.randn(2, 4, 64, key_heads, size, device=CUDA).to(dtype)
    results = []
    for impl, kind in ((None, dtype), ("reference", dtype), ("reference", torch.float64)):
        pools = pool.to(kind)
        q_, k_, v_ = (x.to(kind) for x in (q, k, v)) if kind != dtype else (q, k, v)
        out = qkv_write(q_, k_, v_, weights[0], weights[1], cos, sin, position, index, cu_tokens, *pools, 1e-6, impl)
        results.append((out[:real], pools[0], pools[1]))
    for ours, plain, exact in zip(*results, strict=True):
        within_twice(ours, plain, exact)
    assert torch.equal(results[0][2], results[1][2])  # values are copied
    turned = norm_rope(q, weights[0], cos, sin, position, 1e-6)
    within_twice(turned[:real], results[1][0], results[2][0])
    assert torch.equal(norm_rope(q[3:9].clone(), weights[0], cos, sin, position[3:9], 1e-6), turned[3:9])
    written = [pool[0].clone() for _ in range(2)]
    for one, impl in zip(written, (None, "reference"), strict=True):
        cache_write(one, v, index, cu_tokens, impl)  # type: ignore[arg-type]
    assert torch.equal(*written)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "dim", "block"), [(128, 64, 16), (80, 20, 12)])
def test_pool_blocks(dtype: torch.dtype, size: int, dim: int, block: int) -> None:
    torch.manual_seed(0)
    page = 64 * block // 4
    cos, sin = rotary(9 * page, dim)
    keys = torch.randn(9, page, size, device=CUDA).to(dtype)
    keys[4] = float("nan")  # nobody's
    pages = torch.tensor([7, 2, 0, 5], device=CUDA)
    position = torch.arange(page // 2 + 3, 4 * page - 5, dtype=torch.int32, device=CUDA)
    index = pages[position.long() // page] * page + position % page
    cu_tokens = torch.tensor([0, len(position) - 9, len(position) - 9], dtype=torch.int32, device=CUDA)
    weight = torch.randn(size, device=CUDA)
    held = torch.randn(9, page // block, size, device=CUDA).to(dtype)
    results = []
    for impl, kind in ((None, dtype), ("reference", dtype), ("reference", torch.float64)):
        blocks = held.to(kind)
        pool_blocks(keys.to(kind), blocks, weight, cos, sin, position, index, cu_tokens, block, 1e-6, impl)
        results.append(blocks)
    within_twice(*(blocks.flatten(0, 1) for blocks in results))
    assert torch.equal((results[0] == held).all(-1), (results[1] == held).all(-1))


class Choice:
    """Sequences of (context, new) tokens over scattered pages of block keys, NaN where none is complete."""

    def __init__(
        self, sequences: list[tuple[int, int]], block: int, heads: int, size: int, dtype: torch.dtype, whole: bool
    ):
        generator = torch.Generator(CUDA).manual_seed(0)
        a_page, self.block = 4, block
        pages_each = [-(-length // (a_page * block)) for length, _ in sequences]
        order = torch.randperm(sum(pages_each) + 1, device=CUDA)
        self.pool = torch.full((len(order), a_page, size), float("nan"), dtype=dtype, device=CUDA)
        self.table = torch.full(
            (len(sequences) + 1, max(pages_each) + 3), int(order[-1]), dtype=torch.int32, device=CUDA
        )

        def random(*shape: int) -> Tensor:
            if whole:  # scores are whole numbers, exact in any order, and many are equal
                return torch.randint(-2, 3, shape, generator=generator, device=CUDA).to(dtype)
            return torch.randn(shape, generator=generator, device=CUDA).to(dtype)

        taken, self.keys, self.q = 0, [], []
        for n, (length, new) in enumerate(sequences):
            pages = order[taken : taken + pages_each[n]]
            taken += pages_each[n]
            self.table[n, : len(pages)] = pages.int()
            self.keys.append(random(length // block, size))
            at = (pages[:, None] * a_page + torch.arange(a_page, device=CUDA)).flatten()[: length // block]
            self.pool.flatten(0, 1)[at] = self.keys[n]
            self.q.append(random(new, heads, size))
        self.sequences = sequences

    def run(self, which: list[int], top_k: int, impl: str | None = None, pad: int = 0) -> list[Tensor]:
        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=CUDA)

        some = [self.sequences[n] for n in which]
        q = torch.cat([*(self.q[n] for n in which), torch.full_like(self.q[0][:1], float("nan")).expand(pad, -1, -1)])
        ends = torch.tensor([0, *(new for _, new in some), *[0] * pad]).cumsum(0).tolist()
        position = ints([p for length, new in some for p in range(length - new, length)] + [0] * pad)
        out = select_blocks(
            q, self.pool, self.table, ints(which + [len(self.sequences)] * pad), ints(ends),
            ints([length for length, _ in some] + [0] * pad), position, self.block, top_k, impl,  # type: ignore[arg-type]
        )  # fmt: skip
        assert (out[len(out) - pad :] == -1).all()
        return list(out[: len(out) - pad].split([new for _, new in some]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "size", "top_k"), [(4, 128, 32), (3, 80, 5), (1, 64, 128), (16, 64, 32)])
def test_select_blocks_by_rule(dtype: torch.dtype, heads: int, size: int, top_k: int) -> None:
    case = Choice([(2000, 1), (9, 5), (700, 200), (4100, 6), (64, 1)], 16, heads, size, dtype, whole=True)
    every = list(range(5))
    ours, expected = (case.run(every, top_k, impl, pad=3) for impl in (None, "reference"))
    for one, other in zip(ours, expected, strict=True):
        assert torch.equal(one.sort(1).values, other.sort(1).values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_select_blocks_best_and_alone(dtype: torch.dtype) -> None:
    case = Choice([(131_072, 1), (131_000, 3), (3000, 500)], 16, 4, 128, dtype, whole=False)
    top_k = 128
    together = case.run([0, 1, 2], top_k, pad=2)
    for n, chosen in enumerate(together):
        assert torch.equal(case.run([n], top_k)[0], chosen)
        length, new = case.sequences[n]
        score = torch.einsum("thd,bd->thb", case.q[n].double(), case.keys[n].double()).relu().sum(1)
        for t in (0, new - 1):
            complete = (length - new + t + 1) // case.block
            ours, known = chosen[t].long(), score[t, :complete]
            assert ours.unique().numel() == top_k and 0 <= int(ours.min()) and int(ours.max()) < complete
            left = torch.ones(complete, dtype=torch.bool, device=CUDA)
            left[ours] = False
            assert known[ours].min() >= known[left].max() * (1 - 1e-5)
