"""The chunked rule on its own, against the recurrent one: lengths, first state, whose rows it writes."""

import torch
import torch.nn.functional as F

from deltagram.kernels.gated_delta_chunk import CHUNK, gated_delta_chunk
from deltagram.kernels.gated_delta_recurrent import gated_delta_recurrent

H, HV, K, V = 1, 2, 4, 6


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_chunks_are_the_recurrence() -> None:
    torch.manual_seed(0)
    lengths, starts = [1, 63, 64, 65, 129, 200], [0, 64, 0, 128, 64, 0]  # after one decode token, before padding
    total = 1 + sum(lengths)
    q, k = (F.normalize(torch.randn(total + 2, H, K, dtype=torch.float64), dim=-1) for _ in range(2))
    v = torch.randn(total + 2, HV, V, dtype=torch.float64)
    g, beta = -torch.rand(total + 2, HV, dtype=torch.float64) / 4, torch.rand(total + 2, HV, dtype=torch.float64)
    k[-2:] = v[-2:] = float("nan")
    kind, slot = ints([0, *[2] * 6, 3]), ints([6, 5, 4, 3, 2, 1, 0, 7])
    cu_tokens = ints([0, 1, *(1 + torch.tensor(lengths).cumsum(0)).tolist(), total])
    chunks = [(n, i) for n, length in enumerate(lengths, 1) for i in range(-(-length // CHUNK))] + [(-1, -1)] * 3
    pool = torch.randn(8, HV, V, K, dtype=torch.float64)
    for n, start in enumerate(starts, 1):
        if start == 0:
            pool[slot[n]] = float("nan")  # whatever a slot held, a request that begins starts from zero
    expected_pool, before = pool.clone(), pool.clone()
    expected = torch.full((total + 2, HV, V), 7.0, dtype=torch.float64)
    out = expected.clone()
    arguments = torch.tensor(chunks, dtype=torch.int32), kind, cu_tokens, ints([9, *starts, 0]), slot
    gated_delta_chunk(q, k, v, g, beta, pool, *arguments, out)
    for n, start in enumerate(starts, 1):
        line = slot[n : n + 1]
        if start == 0:
            expected_pool[line] = 0
        for t in range(int(cu_tokens[n]), int(cu_tokens[n + 1])):
            row = [x[t : t + 1] for x in (q, k, v, g, beta)]
            where = ints([0]), ints([0, 1]), ints([0]), ints([0]), ints([1]), line
            gated_delta_recurrent(*row, expected_pool, *where, expected[t : t + 1])
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(pool, expected_pool)
    assert torch.equal(pool[[6, 7]], before[[6, 7]])


def test_repeated_tokens_stay_accurate() -> None:
    """Equal keys, beta near 1 and no decay: the triangular system at its hardest."""
    k = F.normalize(torch.ones(64, 1, 8), dim=-1)
    v, g, beta = torch.randn(64, 1, 8), torch.zeros(64, 1), torch.full((64, 1), 0.999)
    results = []
    for dtype in (torch.float32, torch.float64):
        x = [tensor.to(dtype) for tensor in (k, k, v, g, beta)]
        pool, out = torch.zeros(1, 1, 8, 8, dtype=dtype), torch.empty(64, 1, 8, dtype=dtype)
        gated_delta_chunk(*x, pool, ints([0, 0]).view(1, 2), ints([2]), ints([0, 64]), ints([0]), ints([0]), out)
        results.append(out.double())
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
