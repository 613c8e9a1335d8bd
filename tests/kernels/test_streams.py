"""Two calls of a step: one after the other, and side by side in a graph."""

import pytest
import torch

from deltagram.kernels._streams import side_by_side


def test_without_a_graph_both_run_in_turn() -> None:
    order: list[str] = []
    side_by_side(lambda: order.append("chain"), lambda: order.append("kernel"), torch.device("cpu"))
    assert order == ["chain", "kernel"]


@pytest.mark.gpu
def test_in_a_graph_what_comes_after_waits_for_both() -> None:
    device = torch.device("cuda")
    x = torch.ones(1 << 24, device=device)
    left, right = torch.zeros_like(x), torch.zeros_like(x)

    def chain() -> None:
        y = x
        for _ in range(20):
            y = y * 2  # tensors of the second stream's own
        left.copy_(y)

    def step() -> torch.Tensor:
        total = x
        for _ in range(3):
            side_by_side(chain, lambda: right.copy_(x.sqrt()).add_(1), device)
            total = total + left + right
        return total

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for value in (1.0, 4.0):
        x.fill_(value)
        graph.replay()
        assert torch.equal(found, expected if value == 1 else torch.full_like(x, 4 + 3 * (4 * 2.0**20 + 3)))
