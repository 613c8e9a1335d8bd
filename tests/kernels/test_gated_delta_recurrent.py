"""The recurrent rule on its own: which rows it writes, and replay from the rings. Whole steps: tests/gdn."""

import torch
import torch.nn.functional as F

from deltagram.kernels.gated_delta_recurrent import gated_delta_recurrent

H, HV, K, V = 2, 4, 6, 5


def tokens(count: int) -> tuple[torch.Tensor, ...]:
    q, k = (F.normalize(torch.randn(count, H, K, dtype=torch.float64), dim=-1) for _ in range(2))
    v = torch.randn(count, HV, V, dtype=torch.float64)
    return q, k, v, -torch.rand(count, HV, dtype=torch.float64), torch.rand(count, HV, dtype=torch.float64)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_one_token_is_the_formula() -> None:
    torch.manual_seed(0)
    q, k, v, g, beta = tokens(3)
    pool = torch.randn(4, HV, V, K, dtype=torch.float64)
    before, out = pool.clone(), torch.full((3, HV, V), 7.0, dtype=torch.float64)
    kinds, slots = ints(0, 0, 3), ints(2, 0, 3)
    gated_delta_recurrent(
        q, k, v, g, beta, pool, kinds, ints(0, 1, 2, 2), ints(9, 9, 0), ints(0, 0, 0), ints(1, 1, 0), slots, out
    )
    for n, slot in enumerate((2, 0)):
        for h in range(HV):
            key, query = k[n, h // 2], q[n, h // 2]
            state = before[slot, h] * g[n, h].exp()
            state = state + torch.outer(beta[n, h] * (v[n, h] - state @ key), key)
            torch.testing.assert_close(pool[slot, h], state)
            torch.testing.assert_close(out[n, h], state @ query)
    assert torch.equal(pool[[1, 3]], before[[1, 3]]) and bool((out[2] == 7).all())


def test_drafts_are_kept_and_replayed() -> None:
    """Two drafts of three accepted: the next step takes them from the rings, before its own token."""
    torch.manual_seed(0)
    rows = tokens(6)
    start = 40
    plain = torch.randn(1, HV, V, K, dtype=torch.float64)
    pool = plain.clone()
    decoded = torch.empty(6, HV, V, dtype=torch.float64)
    for t in range(6):
        row = [x[t : t + 1] for x in rows]
        where = ints(0), ints(0, 1), ints(start + t), ints(0), ints(1), ints(0)
        gated_delta_recurrent(*row, plain, *where, decoded[t : t + 1])
    nan = float("nan")
    rings = [torch.full((1, 7, *size), nan, dtype=torch.float64) for size in ((H, K), (HV, V), (2, HV))]
    drafted = [torch.cat([x[:3], torch.randn_like(x[3:4])]) for x in rows]
    out = torch.empty(4, HV, V, dtype=torch.float64)
    gated_delta_recurrent(
        *drafted, pool, ints(1), ints(0, 4), ints(start), ints(0), ints(1), ints(0), out, tuple(rings)
    )
    torch.testing.assert_close(out[:3], decoded[:3])
    rest = [x[3:] for x in rows]
    out = torch.empty(3, HV, V, dtype=torch.float64)
    gated_delta_recurrent(
        *rest, pool, ints(1), ints(0, 3), ints(start + 3), ints(2), ints(1), ints(0), out, tuple(rings)
    )
    torch.testing.assert_close(out, decoded[3:])
