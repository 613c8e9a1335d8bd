"""RMS norm of each head, then rotary position embedding: what queries and keys go through.

    n = weight * x / sqrt(mean(x^2) + eps)
    y[i] = n[i] cos[i] - n[i + dim / 2] sin[i];  y[i + dim / 2] = n[i + dim / 2] cos[i] + n[i] sin[i]     for i < dim
    / 2

with cos and sin of the token's position; dimensions from `dim` on pass through.

Shapes: x [T, heads, D] (strided, dimensions side by side), weight fp32 [D], cos and sin fp32 [positions, dim] (their
halves are equal), position [T] int32. Returns [T, heads, D] in x's dtype. Source: RoFormer,
https://arxiv.org/abs/2104.09864.
"""

from __future__ import annotations

from torch import Tensor

from deltagram.kernels._rotary import head_tile, load_and_turn, normed_and_turned
from deltagram.kernels._triton import Build, Impl, choose, jit, on_cpu, tl


def norm_rope(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, position: Tensor, eps: float, impl: Impl = None
) -> Tensor:
    """See the file's docstring."""
    return choose(impl, x, _reference, _launch, _compiled)(x, weight, cos, sin, position, eps)


def _reference(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, position: Tensor, eps: float) -> Tensor:
    return normed_and_turned(x, weight, cos, sin, position, eps)


_compiled = on_cpu("norm_rope")


@jit(do_not_specialize_on_alignment=["position"])
def _kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    cos,
    sin,
    position,
    out,
    x_stride,
    head_stride,
    eps,
    H: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)[:, None]
    d = tl.arange(0, BD)[None, :]
    place = tl.load(position + t).to(tl.int64)
    y = load_and_turn(x + t * x_stride + h * head_stride, h < H, weight, place, cos, sin, eps, D, DIM, BD)
    tl.store(out + (t * H + h) * D + d, y.to(out.dtype.element_ty), mask=(h < H) & (d < D))


def _launch(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, position: Tensor, eps: float) -> Tensor:
    rows, heads, size = x.shape
    assert x.stride(2) == 1 and cos.is_contiguous() and sin.is_contiguous()
    out = x.new_empty(x.shape)
    tile = head_tile(heads, size)
    _kernel[(rows, -(-heads // tile["BH"]))](
        x, weight, cos, sin, position, out, x.stride(0), x.stride(1), eps, H=heads, D=size, DIM=cos.shape[1], **tile,
        num_warps=4,
    )  # fmt: skip
    return out


def ahead_of_time() -> list[Build]:
    builds = []
    for dtype, heads, size, dim in (("*bf16", 16, 256, 64), ("*fp32", 3, 80, 20)):
        types = {"x": dtype, "out": dtype, "weight": "*fp32", "cos": "*fp32", "sin": "*fp32", "position": "*i32"}
        types |= {"x_stride": "i32", "head_stride": "i32", "eps": "fp32"}
        builds.append(Build(_kernel, types, {"H": heads, "D": size, "DIM": dim, **head_tile(heads, size)}))
    return builds
