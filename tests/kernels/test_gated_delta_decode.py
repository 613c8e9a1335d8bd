"""The one launch for decode and verify sequences: its formulas against the ops it stands for, in float64. The kernel:
tests/gdn, under the interpreter and on a GPU."""

import pytest
import torch

from deltagram.gdn.state import recent_rings, ring_length
from deltagram.kernels.causal_conv1d import causal_conv1d
from deltagram.kernels.gated_delta_decode import gated_delta_decode
from deltagram.kernels.gated_delta_prep import gated_delta_prep
from deltagram.kernels.gated_delta_recurrent import gated_delta_recurrent

H, HV, K, V, WIDTH, SLOTS = 2, 4, 6, 5, 4, 5
CHANNELS = 2 * H * K + HV * V
Pools = list[torch.Tensor]


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def pools(max_draft: int, every: int = 1) -> Pools:
    """Ring and state, random as if there had been tokens before, and rings of recent tokens, if any."""
    exact = torch.float64
    made = [torch.randn(SLOTS + 1, ring_length(WIDTH - 1, max_draft), CHANNELS, dtype=exact)]
    made.append(torch.randn(SLOTS + 1, HV, V, K, dtype=exact))
    if max_draft or every > 1:
        made += recent_rings(SLOTS, every, max_draft, H, HV, V, K, exact, torch.device("cpu"), poison=True)
    return made


@pytest.mark.parametrize(("max_draft", "every"), [(0, 1), (2, 1), (0, 3), (2, 3)])
def test_it_is_the_three_ops_in_turn(max_draft: int, every: int) -> None:
    torch.manual_seed(0)
    ours = pools(max_draft, every)
    both = ours, [pool.clone() for pool in ours]
    weight = torch.randn(CHANNELS, WIDTH, dtype=torch.float64)
    A_log, dt_bias = torch.randn(2, HV, dtype=torch.float64)
    slots = [3, 0, 2, 5, 5]  # three sequences, one of them with no past to speak of, and padding
    start, pending = [9, 1, 30, 0, 0], [0, 0, 0, 0, 0]
    for lengths in ([1, 1, 1], [3, 1, 2], [2, 3, 1], [1, 2, 3]) if max_draft else ([1, 1, 1],) * 4:
        ends = torch.tensor(lengths).cumsum(0).tolist()
        cu_tokens, tokens = ints([0, *ends, ends[-1], ends[-1]]), ends[-1] + 2
        kind = ints([int(length > 1) for length in lengths] + [3, 3])
        rows = torch.randn(tokens, CHANNELS + 2 * HV + 3, dtype=torch.float64)
        qkv, a, b = rows[:, :CHANNELS], rows[:, CHANNELS : CHANNELS + HV], rows[:, CHANNELS + HV : CHANNELS + 2 * HV]
        sequence = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
        position = torch.cat([torch.arange(begin, begin + n) for begin, n in zip(start, lengths, strict=False)])
        sequence, position = ints([*sequence.tolist(), -1, -1]), ints([*position.tolist(), 0, 0])
        stores = [int(count + 1 >= every) for count in pending]
        where = cu_tokens, ints(start), ints(pending), ints(stores), ints(slots)
        outs = [torch.full((tokens, HV, V), 7.0, dtype=torch.float64) for _ in both]

        ring, state, *recent = both[0]
        given = (qkv, a, b, weight, A_log, dt_bias, ring, state, kind, *where, outs[0], H)
        gated_delta_decode(*given, tuple(recent) or None, max_draft)  # type: ignore[arg-type]

        ring, state, *recent = both[1]
        x = causal_conv1d(qkv, weight, ring, cu_tokens, sequence, position, where[1], where[4])
        parts = gated_delta_prep(x, a, b, A_log, dt_bias, H, K)
        gated_delta_recurrent(*parts, state, kind, *where, outs[1], tuple(recent) or None)  # type: ignore[arg-type]

        torch.testing.assert_close(outs[0], outs[1])
        for pool, expected in zip(*both, strict=True):
            torch.testing.assert_close(pool, expected, equal_nan=True)
        accepted = [max(0, length - 2) for length in lengths]  # the last draft was wrong
        start = [begin + 1 + n for begin, n in zip(start, accepted, strict=False)] + [0, 0]
        left = [0 if stored else count + 1 for stored, count in zip(stores, pending, strict=True)]
        pending = [count + more for count, more in zip(left, [*accepted, 0, 0], strict=True)]


def test_short_rings_are_refused() -> None:
    ring, state = pools(0)
    rows = torch.zeros(1, CHANNELS, dtype=torch.float64)
    gates = torch.zeros(1, HV, dtype=torch.float64)
    args = (rows, gates, gates, rows.new_zeros(CHANNELS, WIDTH), gates[0], gates[0], ring[:, 1:], state)
    one = ints([0])
    with pytest.raises(ValueError, match="a ring of 3 entries is too short"):
        gated_delta_decode(*args, one, ints([0, 1]), one, one, one, one, gates.new_zeros(1, HV, V), H)
    with pytest.raises(ValueError, match="rings of 4 recent tokens are too short for 2 drafts: 5"):
        recent = recent_rings(1, 4, 0, H, HV, V, K, torch.float64, torch.device("cpu"), poison=True)
        long = torch.cat([ring, ring], 1)
        gated_delta_decode(*args[:6], long, state, one, ints([0, 1]), one, one, one, one, gates, H, recent, 2)
