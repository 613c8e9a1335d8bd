"""Attention over pages: against a loop over tokens in float64, whoever shares the step, with poison where nobody may
look."""

import pytest
import torch
from torch import Tensor

from deltagram.kernels.paged_attention import paged_attention
from deltagram.testing.compiled import assert_close, exact

PAGE, BLOCK = 16, 4


class Step:
    """Sequences of (computed before, new) tokens, then `pad` tokens of padding."""

    def __init__(self, sequences: list[tuple[int, int]], heads: int, key_heads: int, size: int, pad: int = 0) -> None:
        generator = torch.Generator().manual_seed(0)
        ends = [start + new for start, new in sequences]
        pages = sum(-(-end // PAGE) for end in ends)
        order = torch.randperm(pages + 1, generator=generator).tolist()
        unused = order[0]
        self.table = torch.full((len(sequences) + 2, max(ends) // PAGE + 1), unused, dtype=torch.int32)
        self.k, self.v = torch.full((2, pages + 1, PAGE, key_heads, size), float("nan"))
        for n, end in enumerate(ends):
            for index in range(-(-end // PAGE)):
                page = order.pop()
                self.table[n + 1, index] = page
                real = min(PAGE, end - index * PAGE)
                self.k[page, :real], self.v[page, :real] = torch.randn(2, real, key_heads, size, generator=generator)
        total = sum(new for _, new in sequences)
        self.q, self.gate = torch.full((2, total + pad, heads, size), float("nan"))
        self.q[:total], self.gate[:total] = torch.randn(2, total, heads, size, generator=generator)
        self.row = torch.tensor([*range(1, len(sequences) + 1), *[0] * pad], dtype=torch.int32)
        sizes = torch.tensor([0, *(new for _, new in sequences), *[0] * pad])
        self.cu_tokens = sizes.cumsum(0).int()
        self.length = torch.tensor(ends + [0] * pad, dtype=torch.int32)
        self.position = torch.tensor(
            [p for s, new in sequences for p in range(s, s + new)] + [0] * pad, dtype=torch.int32
        )
        real = [n for n, (_, new) in enumerate(sequences) for _ in range(new)]
        self.sequence = torch.tensor(real + [-1] * pad, dtype=torch.int32)
        self.kind = torch.tensor([2] * len(sequences) + [3] * pad, dtype=torch.int32)
        self.scale, self.total = size**-0.5, total
        self.sequences = sequences

    def run(self, impl: str, selected: Tensor | None, gate: bool = True) -> Tensor:
        tables = self.table, self.row, self.kind, self.cu_tokens, self.length, self.sequence, self.position
        floats = (self.q, self.k, self.v, self.gate)
        q, k, v, gates = exact(floats) if impl == "float64" else floats
        chosen = None if impl == "float64" else impl
        return paged_attention(q, k, v, *tables, self.scale, True, 0, selected, BLOCK, gates if gate else None, chosen)  # type: ignore[arg-type]

    def loop(self, selected: Tensor | None, gate: bool = True) -> Tensor:
        out, t = torch.zeros(self.q.shape, dtype=torch.float64), 0
        group = self.q.shape[1] // self.k.shape[2]
        for n, (start, new) in enumerate(self.sequences):
            for p in range(start, start + new):
                seen = [
                    i for i in range(p + 1)
                    if selected is None or i // BLOCK in selected[t].tolist() or i >= (p + 1) // BLOCK * BLOCK
                ]  # fmt: skip
                at = [(int(self.table[n + 1, i // PAGE]), i % PAGE) for i in seen]
                for h in range(self.q.shape[1]):
                    k, v = (torch.stack([pool[a, b, h // group] for a, b in at]).double() for pool in (self.k, self.v))
                    out[t, h] = (k @ self.q[t, h].double() * self.scale).softmax(0) @ v
                out[t] *= self.gate[t].double().sigmoid() if gate else 1
                t += 1
        return out


@pytest.mark.parametrize(("heads", "key_heads", "size"), [(4, 2, 32), (3, 3, 20), (2, 1, 7)])
@pytest.mark.parametrize("sparse", [False, True])
def test_mixed_steps(heads: int, key_heads: int, size: int, sparse: bool) -> None:
    sequences = [(5, 1), (40, 1), (0, 1), (0, 37), (16, 20), (15, 1)]
    step = Step(sequences, heads, key_heads, size, pad=3)
    selected = None
    if sparse:  # some complete blocks, in any order, and -1
        selected = torch.full((len(step.q), 4), -1, dtype=torch.int32)
        generator = torch.Generator().manual_seed(1)
        for t in range(step.total):
            complete = (int(step.position[t]) + 1) // BLOCK
            some = torch.randperm(complete, generator=generator)[:3]
            selected[t, 1 : 1 + len(some)] = some.int()
    expected = step.loop(selected)
    ours = step.run("compiled", selected)
    assert_close(ours, expected)
    torch.testing.assert_close(step.run("float64", selected), expected)
    assert not ours[step.total :].any()
    assert_close(step.run("compiled", selected, gate=False), step.loop(selected, gate=False))


def test_lengths_alone_and_in_company() -> None:
    sequences = [(0, length) for length in range(1, 131, 9)] + [(length, 1) for length in range(0, 131, 13)]
    step = Step(sequences, 2, 1, 16)
    together = step.run("compiled", None)
    assert_close(together, step.loop(None))
    whole, row, cu_tokens = (step.q, step.gate, step.position, step.length), step.row, step.cu_tokens
    for n in range(len(sequences)):
        mine = slice(int(cu_tokens[n]), int(cu_tokens[n + 1]))
        step.q, step.gate, step.position = (x[mine] for x in whole[:3])
        step.length, step.row = whole[3][n : n + 1], row[n : n + 1]
        step.cu_tokens = torch.tensor([0, len(step.q)], dtype=torch.int32)
        assert torch.equal(step.run("compiled", None), together[mine])
