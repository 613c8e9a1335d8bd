"""Norms and gates against their formulas."""

import math

import torch

from deltagram.kernels.gated_delta_prep import gated_delta_prep


def test_formulas() -> None:
    torch.manual_seed(0)
    heads, value_heads, key_dim, value_dim, tokens = 2, 4, 6, 5, 7
    channels = 2 * heads * key_dim + value_heads * value_dim
    rows = torch.randn(tokens, channels + 2 * value_heads + 3, dtype=torch.float64)
    qkv, a, b, _ = rows.split([channels, value_heads, value_heads, 3], 1)
    A_log, dt_bias = torch.randn(2, value_heads, dtype=torch.float64)
    q, k, v, g, beta = gated_delta_prep(qkv, a, b, A_log, dt_bias, heads, key_dim)
    for t in range(tokens):
        for h in range(heads):
            raw_q, raw_k = (qkv[t, i : i + key_dim] for i in (h * key_dim, (heads + h) * key_dim))
            torch.testing.assert_close(q[t, h], raw_q / (raw_q.square().sum() + 1e-6).sqrt() / math.sqrt(key_dim))
            torch.testing.assert_close(k[t, h], raw_k / (raw_k.square().sum() + 1e-6).sqrt())
        for h in range(value_heads):
            begin = 2 * heads * key_dim + h * value_dim
            assert torch.equal(v[t, h], qkv[t, begin : begin + value_dim])
            rate = math.exp(A_log[h]) * math.log1p(math.exp(a[t, h] + dt_bias[h]))
            assert math.isclose(g[t, h], -rate, rel_tol=1e-12)
            assert math.isclose(beta[t, h], 1 / (1 + math.exp(-b[t, h])), rel_tol=1e-12)


def test_gates_stay_in_fp32_for_bf16_inputs() -> None:
    qkv, ab = torch.randn(3, 24).bfloat16(), torch.randn(3, 2).bfloat16()
    q, k, v, g, beta = gated_delta_prep(qkv, ab, ab, torch.zeros(2), torch.zeros(2), 1, 4)
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16
    assert g.dtype == beta.dtype == torch.float32
    assert torch.equal(beta, ab.float().sigmoid())


def test_extreme_gates_are_finite() -> None:
    a = torch.tensor([[-200.0, 200.0]])
    _, _, _, g, beta = gated_delta_prep(torch.zeros(1, 24), a, a, torch.zeros(2), torch.zeros(2), 1, 4)
    assert torch.equal(g, torch.tensor([[-0.0, -200.0]])) and beta.isfinite().all()
