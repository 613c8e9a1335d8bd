"""What lies between an attention layer's projection and its attention: queries and keys normalised and turned, keys and
values written to their pages.

    out[t] = norm_rope(q[t], q_weight);  k_cache[cache_index[t]] = norm_rope(k[t], k_weight);  v_cache[...] = v[t]

for the first cu_tokens[-1] tokens; the others are padding, whose rows of the result mean nothing. norm_rope as in
norm_rope.py.

Shapes: q [T, Hq, D], k and v [T, Hkv, D] (strided, dimensions side by side); q_weight and k_weight fp32 [D]; cos and
sin fp32 [positions, dim] (their halves are equal); position [T] and cu_tokens [N + 1] int32; cache_index int64 [T],
page * page size + offset; k_cache, v_cache [pages, page size, Hkv, D], updated in place. Returns [T, Hq, D].
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._rotary import head_tile, load_and_turn, normed_and_turned
from deltagram.kernels._triton import Build, Impl, choose, dependent_launch, jit, on_cpu, tl


def qkv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    cache_index: Tensor,
    cu_tokens: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    eps: float,
    impl: Impl = None,
) -> Tensor:
    """See the file's docstring."""
    body = choose(impl, q, _reference, _launch, _compiled if k_cache.dtype == torch.float32 else None)
    return body(q, k, v, q_weight, k_weight, cos, sin, position, cache_index, cu_tokens, k_cache, v_cache, eps)


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    cache_index: Tensor,
    cu_tokens: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    eps: float,
) -> Tensor:
    num_tokens = int(cu_tokens[-1])
    place = cache_index[:num_tokens]
    key = normed_and_turned(k[:num_tokens], k_weight, cos, sin, position[:num_tokens], eps)
    for pool, values in ((k_cache, key), (v_cache, v[:num_tokens])):
        pool.view(-1, *pool.shape[2:])[place] = values.to(pool.dtype)
    return normed_and_turned(q, q_weight, cos, sin, position, eps)


_compiled = on_cpu("qkv_write")


@jit(
    do_not_specialize=["num_sequences"],
    do_not_specialize_on_alignment=["position", "cache_index", "cu_tokens"],
)
def _kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    q_weight,
    k_weight,
    cos,
    sin,
    position,
    cache_index,
    cu_tokens,
    k_cache,
    v_cache,
    out,
    num_sequences,
    q_stride,
    q_head,
    k_stride,
    k_head,
    v_stride,
    v_head,
    eps,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes up to BH heads of one token: first the values', then the keys', then the queries'."""
    t = tl.program_id(0).to(tl.int64)
    place = tl.load(position + t).to(tl.int64)
    line = tl.load(cache_index + t) * (HKV * D)
    padding = t >= tl.load(cu_tokens + num_sequences)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # attention looks at its tables and asks for keys until we have ended
        tl.extra.cuda.gdc_wait()
    if padding:
        return
    groups: tl.constexpr = (HKV + BH - 1) // BH
    g = tl.program_id(1)
    d = tl.arange(0, BD)[None, :]
    h = (g % groups) * BH + tl.arange(0, BH)[:, None]
    inside = (h < HKV) & (d < D)
    if g < groups:
        value = tl.load(v + t * v_stride + h * v_head + d, mask=inside)
        tl.store(v_cache + line + h * D + d, value.to(v_cache.dtype.element_ty), mask=inside)
    elif g < 2 * groups:
        key = load_and_turn(k + t * k_stride + h * k_head, h < HKV, k_weight, place, cos, sin, eps, D, DIM, BD)
        tl.store(k_cache + line + h * D + d, key.to(k_cache.dtype.element_ty), mask=inside)
    else:
        h = (g - 2 * groups) * BH + tl.arange(0, BH)[:, None]
        query = load_and_turn(q + t * q_stride + h * q_head, h < HQ, q_weight, place, cos, sin, eps, D, DIM, BD)
        tl.store(out + (t * HQ + h) * D + d, query.to(out.dtype.element_ty), mask=(h < HQ) & (d < D))


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    cache_index: Tensor,
    cu_tokens: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    eps: float,
) -> Tensor:
    rows, heads, size = q.shape
    key_heads = k.shape[1]
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    out, pdl = q.new_empty(q.shape), dependent_launch(q)
    tile = head_tile(key_heads, size)
    grid = (rows, 2 * -(-key_heads // tile["BH"]) + -(-heads // tile["BH"]))
    _kernel[grid](
        q, k, v, q_weight, k_weight, cos, sin, position, cache_index, cu_tokens, k_cache, v_cache, out,
        len(cu_tokens) - 1, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], eps, HQ=heads, HKV=key_heads, D=size,
        DIM=cos.shape[1], **tile, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


def ahead_of_time() -> list[Build]:
    builds = []
    for dtype, heads, key_heads, size, dim in (("*bf16", 16, 4, 256, 64), ("*fp32", 6, 3, 80, 20)):
        types = dict.fromkeys(("q", "k", "v", "k_cache", "v_cache", "out"), dtype)
        types |= dict.fromkeys(("q_weight", "k_weight", "cos", "sin"), "*fp32")
        types |= {"position": "*i32", "cu_tokens": "*i32", "cache_index": "*i64", "num_sequences": "i32", "eps": "fp32"}
        types |= dict.fromkeys(("q_stride", "q_head", "k_stride", "k_head", "v_stride", "v_head"), "i32")
        constants = {"HQ": heads, "HKV": key_heads, "D": size, "DIM": dim, **head_tile(key_heads, size)}
        builds.append(Build(_kernel, types, constants))
    return builds
