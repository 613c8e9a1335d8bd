"""What the gated delta rule reads, from the convolved projections of a step's tokens.

    q <- q / sqrt(sum q^2 + 1e-6) / sqrt(K),  k <- k / sqrt(sum k^2 + 1e-6)   per key head
    g = -exp(A_log) * softplus(a + dt_bias),  beta = sigmoid(b)               per value head, in fp32

Shapes: qkv [T, 2 * H * K + HV * V] (channels q | k | v), a and b [T, HV] (rows may be strided), A_log and dt_bias [HV]
fp32.
Returns q, k [T, H, K] in qkv's dtype, v [T, HV, V] (a view of qkv), g and beta [T, HV] fp32 (float64 for float64
inputs).
Source: Gated Delta Networks, https://arxiv.org/abs/2412.06464, as parametrised by Qwen3-Next.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deltagram.kernels._triton import Build, Impl, choose, jit, on_cpu, power_of_two, tl


def gated_delta_prep(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    num_key_heads: int,
    key_dim: int,
    impl: Impl = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See the file's docstring. `key_dim` is K, the size of one key head."""
    body = choose(impl, qkv, _reference, _launch, _compiled if a.dtype == b.dtype == torch.float32 else None)
    return body(qkv, a, b, A_log, dt_bias, num_key_heads, key_dim)


def _reference(
    qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, num_key_heads: int, key_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype = torch.float64 if qkv.dtype == torch.float64 else torch.float32
    num_tokens, keys = qkv.shape[0], num_key_heads * key_dim
    qk = qkv[:, : 2 * keys].reshape(num_tokens, 2, num_key_heads, key_dim).to(dtype)
    norm = torch.linalg.vector_norm(qk, 2, -1, True)
    qk = (qk * norm.square_().add_(1e-6).rsqrt_()).to(qkv.dtype)
    q, k = qk[:, 0] * key_dim**-0.5, qk[:, 1]
    v = qkv[:, 2 * keys :].unflatten(1, (a.shape[1], -1))
    g = F.softplus(a.to(dtype) + dt_bias.to(dtype)).mul_(A_log.to(dtype).exp().neg_())
    return q, k, v, g, b.to(dtype).sigmoid()


_compiled = on_cpu("gated_delta_prep")


@jit(do_not_specialize=["num_tokens"])
def _kernel(  # type: ignore[no-untyped-def]
    qkv,
    a,
    b,
    A_log,
    dt_bias,
    qk,  # q, then k, [2, T, H, K]
    gates,  # g, then beta, [2, T, HV]
    num_tokens,
    qkv_stride,
    a_stride,
    b_stride,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    BHV: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    head = tl.program_id(1)  # of 2 H heads of q and k, and one more program for the gates
    real = token < num_tokens
    if head < 2 * H:
        column = tl.arange(0, BK)[None, :]
        inside = real & (column < K)
        x = tl.load(qkv + token * qkv_stride + head * K + column, mask=inside, other=0).to(tl.float32)
        y = x * (1 / tl.sqrt(tl.sum(x * x, 1) + 1e-6))[:, None]
        y = tl.where(head < H, y * scale, y)
        part = qk + (head // H) * num_tokens.to(tl.int64) * (H * K)
        tl.store(part + token * (H * K) + (head % H) * K + column, y.to(qk.dtype.element_ty), mask=inside)
    else:
        value_head = tl.arange(0, BHV)[None, :]
        known = value_head < HV
        live = real & known
        step = tl.load(a + token * a_stride + value_head, mask=live, other=0).to(tl.float32)
        step += tl.load(dt_bias + value_head, mask=known, other=0).to(tl.float32)
        rate = tl.exp(tl.load(A_log + value_head, mask=known, other=0).to(tl.float32))
        softplus = tl.maximum(step, 0) + tl.log(1 + tl.exp(-tl.abs(step)))
        tl.store(gates + token * HV + value_head, -rate * softplus, mask=live)
        gate = tl.load(b + token * b_stride + value_head, mask=live, other=0).to(tl.float32)
        tl.store(gates + (num_tokens + token) * HV + value_head, 1 / (1 + tl.exp(-gate)), mask=live)


def _launch(
    qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, num_key_heads: int, key_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_tokens, value_heads = a.shape
    assert qkv.stride(1) == 1 and a.stride(1) == 1 and b.stride(1) == 1
    qk = qkv.new_empty(2, num_tokens, num_key_heads, key_dim)
    gates = qkv.new_empty(2, num_tokens, value_heads, dtype=torch.float32)
    sizes = _sizes(num_key_heads, value_heads, key_dim)
    grid = (-(-num_tokens // sizes["ROWS"]), 2 * num_key_heads + 1)
    _kernel[grid](
        qkv, a, b, A_log, dt_bias, qk, gates, num_tokens, qkv.stride(0), a.stride(0), b.stride(0), key_dim**-0.5,
        **sizes, num_warps=4,
    )  # fmt: skip
    v = qkv[:, 2 * num_key_heads * key_dim :].unflatten(1, (value_heads, -1))
    return qk[0], qk[1], v, gates[0], gates[1]


def _sizes(heads: int, value_heads: int, key_dim: int) -> dict[str, int]:
    tile = {"ROWS": 8, "BK": power_of_two(key_dim), "BHV": power_of_two(value_heads)}
    return {"H": heads, "HV": value_heads, "K": key_dim} | tile


def ahead_of_time() -> list[Build]:
    builds = []
    for dtype in ("*bf16", "*fp32"):
        types = dict.fromkeys(("qkv", "a", "b", "qk"), dtype) | dict.fromkeys(("A_log", "dt_bias", "gates"), "*fp32")
        types |= dict.fromkeys(("num_tokens", "qkv_stride", "a_stride", "b_stride"), "i32") | {"scale": "fp32"}
        builds.append(Build(_kernel, types, dict(_sizes(16, 32, 128))))
    return builds
