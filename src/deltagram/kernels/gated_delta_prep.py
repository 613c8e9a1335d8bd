"""What the gated delta rule reads, from the convolved projections of a step's tokens.

    q <- q / sqrt(sum q^2 + 1e-6) / sqrt(K),  k <- k / sqrt(sum k^2 + 1e-6)   per key head
    g = -exp(A_log) * softplus(a + dt_bias),  beta = sigmoid(b)               per value head, in fp32

Shapes: qkv [T, 2 * H * K + HV * V] (channels q | k | v), a and b [T, HV], A_log and dt_bias [HV] fp32. Returns q, k
[T, H, K] in qkv's dtype, v [T, HV, V] (a view of qkv), g and beta [T, HV] fp32 (float64 for float64 inputs).
Source: Gated Delta Networks, https://arxiv.org/abs/2412.06464, as parametrised by Qwen3-Next.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_delta_prep(
    qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, num_key_heads: int, key_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See the file's docstring. `key_dim` is K, the size of one key head."""
    return _reference(qkv, a, b, A_log, dt_bias, num_key_heads, key_dim)


def _reference(
    qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, num_key_heads: int, key_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype = torch.float64 if qkv.dtype == torch.float64 else torch.float32
    num_tokens, keys = qkv.shape[0], num_key_heads * key_dim
    qk = qkv[:, : 2 * keys].reshape(num_tokens, 2, num_key_heads, key_dim).to(dtype)
    qk = qk * torch.rsqrt((qk * qk).sum(-1, keepdim=True) + 1e-6)
    q, k = (qk[:, 0] * key_dim**-0.5).to(qkv.dtype), qk[:, 1].to(qkv.dtype)
    v = qkv[:, 2 * keys :].unflatten(1, (a.shape[1], -1))
    g = F.softplus(a.to(dtype) + dt_bias.to(dtype)).mul_(A_log.to(dtype).exp().neg_())
    return q, k, v, g, b.to(dtype).sigmoid()
