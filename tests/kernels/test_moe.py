"""Experts with packed weights: against a loop over tokens in float64, ties, and a row's bits in company."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deltagram.kernels._packed import Packed
from deltagram.kernels.moe import moe
from deltagram.testing.compiled import LENGTHS, among_nan, assert_close, exact, weight


def weights(size: int, experts: int, inner: int, shared: int) -> tuple[Packed, ...]:
    return (
        weight(experts + 1, size),
        weight(experts, 2 * inner, size),
        weight(experts, size, inner, bf16=False),
        weight(2 * shared, size),
        weight(size, shared),
    )


def by_token(x: Tensor, packed: tuple[Packed, ...], top_k: int, renormalise: bool) -> Tensor:
    router, ups, downs, shared_up, shared_down = (each.unpack().double() for each in packed)

    def mlp(row: Tensor, up: Tensor, down: Tensor) -> Tensor:
        gate, value = (up @ row).chunk(2)
        return down @ (F.silu(gate) * value)

    out = []
    for row in x.double():
        scores = router @ row
        likely = scores[:-1].softmax(0)
        chosen = sorted(range(len(likely)), key=lambda e: (-float(scores[e]), e))[:top_k]
        whole = sum(likely[e] for e in chosen) if renormalise else 1
        y = scores[-1].sigmoid() * mlp(row, shared_up, shared_down)
        out.append(y + sum(likely[e] / whole * mlp(row, ups[e], downs[e]) for e in chosen))
    return torch.stack(out)


@pytest.mark.parametrize(
    ("size", "experts", "inner", "shared", "top_k"), [(32, 8, 16, 32, 2), (21, 17, 5, 3, 3), (8, 1, 4, 9, 1)]
)
@pytest.mark.parametrize("renormalise", [True, False])
def test_any_number_of_rows(size: int, experts: int, inner: int, shared: int, top_k: int, renormalise: bool) -> None:
    torch.manual_seed(0)
    packed, x = weights(size, experts, inner, shared), torch.randn(300, size)
    every = moe(x, *packed, top_k, renormalise, impl="compiled")
    expected = by_token(x, packed, top_k, renormalise)
    assert_close(every, expected)
    torch.testing.assert_close(moe(*exact((x, *packed)), top_k, renormalise), expected)
    for rows in LENGTHS:
        assert torch.equal(moe(among_nan(x[-rows:]), *packed, top_k, renormalise, impl="compiled"), every[-rows:]), rows


def test_the_lower_of_equal_experts_wins() -> None:
    torch.manual_seed(0)
    _, *others = weights(8, 4, 4, 4)
    router = Packed.of(torch.zeros(5, 8))
    x = torch.randn(3, 8)
    assert_close(moe(x, router, *others, 2, True), by_token(x, (router, *others), 2, True))


@pytest.mark.parametrize("impl", ["compiled", "reference"])
def test_a_residual_is_added(impl: str) -> None:
    torch.manual_seed(0)
    packed, x = weights(8, 4, 4, 4), torch.randn(9, 8)
    residual = among_nan(torch.randn(9, 8))
    plain = moe(x, *packed, 2, True, impl=impl)  # type: ignore[arg-type]
    assert torch.equal(moe(x, *packed, 2, True, residual, impl), residual + plain)  # type: ignore[arg-type]


def test_a_broken_row_breaks_no_other() -> None:
    torch.manual_seed(0)
    packed, x = weights(8, 4, 4, 4), torch.randn(9, 8)
    expected = moe(x, *packed, 2, True)
    x[4] = float("nan")
    broken = moe(x, *packed, 2, True)
    assert broken[4].isnan().all() and torch.equal(broken[:4], expected[:4]) and torch.equal(broken[5:], expected[5:])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_are_all_broken_stay_within_their_memory(value: float) -> None:
    """Each chooses distinct experts still: were one chosen twice, its tokens would not fit where they are gathered, and
    the process would end at an allocation soon after."""
    torch.manual_seed(0)
    packed = weights(64, 4, 32, 32)
    for rows in (1, 3):
        for _ in range(200):
            assert moe(torch.full((rows, 64), value), *packed, 3, True, impl="compiled").isnan().all()
