"""RMS norm of each value head, then a gate: what follows the gated delta rule.

    y = weight * x / sqrt(mean(x^2) + eps) * act(z)

Shapes: x [T, HV, V]; z [T, HV, V], whose heads lie side by side in a row (rows may be strided); weight [V]; cu_tokens
[N + 1] int32, whose last entry counts the real tokens; act is silu or sigmoid. Returns [T, HV, V] in z's dtype, zero
for padding, whatever x and z hold there; arithmetic in fp32 (float64 for float64 inputs). The weight is plain here, not
1 + w as in these models' other norms.
Errors: ValueError for another activation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deltagram.kernels._triton import Build, Impl, choose, dependent_launch, jit, on_cpu, power_of_two, tl


def rms_norm_gated(
    x: Tensor, z: Tensor, weight: Tensor, cu_tokens: Tensor, eps: float, activation: str, impl: Impl = None
) -> Tensor:
    """See the file's docstring."""
    if activation not in ("silu", "sigmoid"):
        raise ValueError(f"the gate's activation must be 'silu' or 'sigmoid', got {activation!r}")
    compiled = _compiled if z.dtype == weight.dtype == torch.float32 else None
    return choose(impl, x, _reference, _launch, compiled)(x, z, weight, cu_tokens, eps, activation)


def _reference(x: Tensor, z: Tensor, weight: Tensor, cu_tokens: Tensor, eps: float, activation: str) -> Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    num_tokens, padded = int(cu_tokens[-1]), len(x)
    if num_tokens < padded:
        x, z = x[:num_tokens], z[:num_tokens]
    gate = z.to(dtype)
    gate = F.silu(gate) if activation == "silu" else gate.sigmoid()
    out = (F.rms_norm(x.to(dtype), x.shape[-1:], weight.to(dtype), eps) * gate).to(z.dtype)
    return F.pad(out, (0, 0, 0, 0, 0, padded - num_tokens)) if num_tokens < padded else out


_compiled = on_cpu("rms_norm_gated")


@jit(do_not_specialize=["rows"])
def _kernel(  # type: ignore[no-untyped-def]
    x,
    z,
    weight,
    num_tokens,
    out,
    rows,
    eps,
    z_stride,
    HEADS: tl.constexpr,
    V: tl.constexpr,
    SIGMOID: tl.constexpr,
    ROWS: tl.constexpr,
    BV: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # (token, head) pairs
    column = tl.arange(0, BV)[None, :]
    w = tl.load(weight + column, mask=column < V, other=0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    real = row < tl.load(num_tokens).to(tl.int64) * HEADS
    inside = real[:, None] & (column < V)
    at = row[:, None] * V + column
    value = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    gate = tl.load(
        z + (row // HEADS)[:, None] * z_stride + (row % HEADS)[:, None] * V + column, mask=inside, other=0
    ).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(value * value, 1) / V + eps)
    act = 1 / (1 + tl.exp(-gate))
    if not SIGMOID:
        act *= gate
    y = value * scale[:, None] * w * act
    tl.store(out + at, y.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < V))


def _tiles(value_dim: int) -> tuple[int, int]:
    """Rows and columns of a program's tile."""
    columns = power_of_two(value_dim)
    return max(1, 2048 // columns), columns


def _launch(x: Tensor, z: Tensor, weight: Tensor, cu_tokens: Tensor, eps: float, activation: str) -> Tensor:
    num_tokens, heads, value_dim = x.shape
    assert x.is_contiguous() and z.stride()[1:] == (value_dim, 1)
    out = z.new_empty(x.shape)
    rows, columns = _tiles(value_dim)
    grid = (-(-num_tokens * heads // rows),)
    pdl = dependent_launch(x)
    _kernel[grid](
        x, z, weight, cu_tokens[-1:], out, num_tokens * heads, eps, z.stride(0),
        HEADS=heads, V=value_dim, SIGMOID=activation == "sigmoid", ROWS=rows, BV=columns, PDL=pdl, num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip
    return out


def ahead_of_time() -> list[Build]:
    builds = []
    for dtype, sigmoid in (("*bf16", False), ("*fp32", True)):
        types = {"x": dtype, "z": dtype, "weight": "*fp32", "num_tokens": "*i32", "out": dtype}
        types |= {"rows": "i32", "eps": "fp32", "z_stride": "i32"}
        rows, columns = _tiles(128)
        constants = {"HEADS": 32, "V": 128, "SIGMOID": sigmoid, "ROWS": rows, "BV": columns}
        builds.append(Build(_kernel, types, constants))
    return builds
