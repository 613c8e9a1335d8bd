"""The experts' kernels: router scores, the choice, two grouped products, and their sum."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deltagram.kernels._gates import FEW_EXPERT_ROWS
from deltagram.kernels._packed import Matrix
from deltagram.kernels._triton import Build, dependent_launch, jit, power_of_two, tl

_SLICE = 256  # inputs of the router that are summed at once; the slices are added in order


@jit(do_not_specialize=["num_rows"])
def _scores_kernel(  # type: ignore[no-untyped-def]
    x,
    router,
    partial,  # fp32 [slices / SUMMED, T, E + 1]
    counts,  # int32 [E], zero from here on
    num_rows,
    x_stride,
    E: tl.constexpr,
    H: tl.constexpr,
    E_PADDED: tl.constexpr,
    SLICE: tl.constexpr,
    SUMMED: tl.constexpr,  # slices that a program adds in order
    BM: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    t = tl.program_id(2).to(tl.int64) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    real, known = (t < num_rows)[:, None], (n <= E)[None, :]
    score = tl.zeros([BM, BN], tl.float32)
    for i in range(SUMMED):
        h = (tl.program_id(1) * SUMMED + i) * SLICE + tl.arange(0, SLICE)
        a = tl.load(x + t[:, None] * x_stride + h[None, :], mask=real & (h < H)[None, :], other=0)
        w = tl.load(router + n[None, :] * H + h[:, None], mask=known & (h < H)[:, None], other=0)
        score += tl.dot(a, w, input_precision="ieee")
    at = (tl.program_id(1).to(tl.int64) * num_rows + t) * (E + 1)
    tl.store(partial + at[:, None] + n[None, :], score, mask=real & known)
    if tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0:
        e = tl.arange(0, E_PADDED)
        tl.store(counts + e, tl.zeros_like(e), mask=e < E)


@jit(do_not_specialize=["num_rows"])
def _choose_kernel(  # type: ignore[no-untyped-def]
    partial,
    counts,
    pairs,  # int32 [E, T]: each expert's (token, choice) pairs, as token * TOP_K + choice
    scale,  # fp32 [T, TOP_K + 1]: of a token's experts in the order of their numbers, then of the shared one
    num_rows,
    E: tl.constexpr,
    E_PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, E_PADDED)
    inside = e < E
    score = tl.zeros([E_PADDED], tl.float32)
    shared = 0.0
    for i in tl.static_range(PARTS):
        at = partial + (i * num_rows.to(tl.int64) + t) * (E + 1)
        score += tl.load(at + e, mask=inside, other=0)
        shared += tl.load(at + E)
    likely = tl.where(inside, tl.exp(score - tl.max(tl.where(inside, score, float("-inf")))), 0)
    likely = likely / tl.sum(likely)
    # As integers the scores have the same order, and NaN has a place in it.
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    key = tl.where(inside, bits ^ ((bits >> 31) & 0x7FFFFFFF), -0x80000000)
    left, chosen = inside, e < 0
    for _ in tl.static_range(TOP_K):
        best = tl.min(tl.where(left & (key == tl.max(tl.where(left, key, -0x80000000))), e, E_PADDED))
        chosen = chosen | (e == best)
        left = left & (e != best)
    weight = likely
    if RENORMALISE:
        weight = likely / tl.sum(tl.where(chosen, likely, 0))
    choice = tl.cumsum(chosen.to(tl.int32)) - 1
    tl.store(scale + t * (TOP_K + 1) + choice, weight, mask=chosen)
    tl.store(scale + t * (TOP_K + 1) + TOP_K, 1 / (1 + tl.exp(-shared)))
    place = tl.atomic_add(counts + e, 1, mask=chosen, sem="relaxed")
    tl.store(pairs + e * num_rows.to(tl.int64) + place, (t * TOP_K + choice).to(tl.int32), mask=chosen)


@jit
def _find(tile, counts, num_rows, E, E_PADDED: tl.constexpr, BM):  # type: ignore[no-untyped-def]
    """Which expert's pairs a tile takes, from which on, and how many there are. The shared expert's tiles come first,
    and its number is E; E_PADDED and no pairs for a tile past the last."""
    e = tl.arange(0, E_PADDED)
    count = tl.load(counts + e, mask=e < E, other=0)
    end = tl.cumsum((count + BM - 1) // BM)
    own = (num_rows + BM - 1) // BM
    at = tile - own
    expert = tl.sum((end <= at).to(tl.int32))
    first = (at - tl.max(tl.where(end <= at, end, 0))) * BM
    rows = tl.sum(tl.where(e == expert, count, 0))
    shared = tile < own
    return tl.where(shared, E, expert), tl.where(shared, tile * BM, first), tl.where(shared, num_rows, rows), shared


@jit(do_not_specialize=["num_rows"])
def _up_kernel(  # type: ignore[no-untyped-def]
    x,
    gate_up,
    shared_gate_up,
    counts,
    pairs,
    act,  # [T * TOP_K + T, max(I, IS)]: of each pair, then of each token for the shared expert
    num_rows,
    x_stride,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    IS: tl.constexpr,
    E_PADDED: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """silu(gate) * up of one tile of pairs and BN columns."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    widest: tl.constexpr = max(I, IS)
    blocks: tl.constexpr = (widest + BN - 1) // BN
    expert, first, rows, shared = _find(tl.program_id(0) // blocks, counts, num_rows, E, E_PADDED, BM)
    inner = tl.where(shared, IS, I)
    begin = tl.program_id(0) % blocks * BN
    if (rows == 0) | (begin >= inner):
        return
    r = first + tl.arange(0, BM)
    inside = r < rows
    at = pairs + expert * num_rows.to(tl.int64) + r
    pair = tl.where(shared, num_rows * TOP_K + r, tl.load(at, mask=inside & (expert < E), other=0))
    token = tl.where(shared, r, pair // TOP_K).to(tl.int64)
    n = begin + tl.arange(0, BN)
    k = tl.arange(0, BK)
    base = tl.where(shared, shared_gate_up, gate_up + expert.to(tl.int64) * (2 * I * H))
    gate_at = base + n[None, :].to(tl.int64) * H + k[:, None]
    up_at = gate_at + inner.to(tl.int64) * H
    x_at = x + token[:, None] * x_stride + k[None, :]
    gate = tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    for i in range(0, H, BK):
        if EVEN:
            a = tl.load(x_at + i, mask=inside[:, None], other=0)
            w_gate = tl.load(gate_at + i)
            w_up = tl.load(up_at + i)
        else:
            known = (n < inner)[None, :] & (i + k < H)[:, None]
            a = tl.load(x_at + i, mask=inside[:, None] & (i + k < H)[None, :], other=0)
            w_gate = tl.load(gate_at + i, mask=known, other=0)
            w_up = tl.load(up_at + i, mask=known, other=0)
        gate = tl.dot(a, w_gate, gate, input_precision="ieee")
        up = tl.dot(a, w_up, up, input_precision="ieee")
    y = gate / (1 + tl.exp(-gate)) * up
    at = act + pair.to(tl.int64)[:, None] * widest + n[None, :]
    tl.store(at, y.to(act.dtype.element_ty), mask=inside[:, None] & (n < inner)[None, :])


@jit(do_not_specialize=["num_rows"])
def _down_kernel(  # type: ignore[no-untyped-def]
    act,
    down,
    shared_down,
    counts,
    pairs,
    y,  # [T * TOP_K + T, H]
    num_rows,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    IS: tl.constexpr,
    E_PADDED: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The outputs of one tile of pairs and BN columns."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    widest: tl.constexpr = max(I, IS)
    blocks: tl.constexpr = (H + BN - 1) // BN
    expert, first, rows, shared = _find(tl.program_id(0) // blocks, counts, num_rows, E, E_PADDED, BM)
    if rows == 0:
        return
    inner = tl.where(shared, IS, I)
    r = first + tl.arange(0, BM)
    inside = r < rows
    at = pairs + expert * num_rows.to(tl.int64) + r
    pair = tl.where(shared, num_rows * TOP_K + r, tl.load(at, mask=inside & (expert < E), other=0)).to(tl.int64)
    n = tl.program_id(0) % blocks * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    base = tl.where(shared, shared_down, down + expert.to(tl.int64) * (H * I))
    w_at = base + n[None, :].to(tl.int64) * inner + k[:, None]
    a_at = act + pair[:, None] * widest + k[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    for i in range(0, inner, BK):
        if EVEN:
            a = tl.load(a_at + i, mask=inside[:, None], other=0)
            w = tl.load(w_at + i)
        else:
            a = tl.load(a_at + i, mask=inside[:, None] & (i + k < inner)[None, :], other=0)
            w = tl.load(w_at + i, mask=(n < H)[None, :] & (i + k < inner)[:, None], other=0)
        acc = tl.dot(a, w, acc, input_precision="ieee")
    at = y + pair[:, None] * H + n[None, :]
    tl.store(at, acc.to(y.dtype.element_ty), mask=inside[:, None] & (n < H)[None, :])


@jit(do_not_specialize=["num_rows"])
def _add_kernel(  # type: ignore[no-untyped-def]
    y,
    scale,
    residual,
    out,
    num_rows,
    residual_stride,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A token's shared expert, its own in the order of their numbers, and the residual."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = num_rows.to(tl.int64) * TOP_K
    total = tl.load(y + (first + t) * H + h, mask=h < H, other=0).to(tl.float32)
    total *= tl.load(scale + t * (TOP_K + 1) + TOP_K)
    for choice in tl.static_range(TOP_K):
        value = tl.load(y + (t * TOP_K + choice) * H + h, mask=h < H, other=0).to(tl.float32)
        total += value * tl.load(scale + t * (TOP_K + 1) + choice)
    if RESIDUAL:
        total += tl.load(residual + t * residual_stride + h, mask=h < H, other=0).to(tl.float32)
    tl.store(out + t * H + h, total.to(out.dtype.element_ty), mask=h < H)


class _Tile(NamedTuple):
    """Rows, outputs and inputs of a product's tile, and how its program runs."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int

    def even(self, outputs: int, inputs: tuple[int, ...]) -> bool:
        """Whether tiles fill a weight."""
        return outputs % self.outputs == 0 and all(size % self.inputs == 0 for size in inputs)

    @property
    def sizes(self) -> dict[str, int]:
        return {"BM": self.rows, "BN": self.outputs, "BK": self.inputs}

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


# By dtype and whether experts have many rows: of gate and up, and of down.
_TILES = {
    (torch.bfloat16, False): (_Tile(16, 32, 256, 4, 3), _Tile(16, 64, 256, 4, 2)),
    (torch.bfloat16, True): (_Tile(64, 64, 64, 4, 3), _Tile(64, 128, 64, 4, 3)),
    (torch.float32, False): (_Tile(16, 16, 32, 4, 2), _Tile(16, 32, 32, 4, 2)),
    (torch.float32, True): (_Tile(32, 32, 32, 4, 2), _Tile(32, 64, 32, 4, 2)),
}


def tiles(dtype: torch.dtype, num_pairs: int, num_experts: int) -> tuple[_Tile, _Tile]:
    """The tiles of the two products; both have the same rows."""
    return _TILES[dtype if dtype == torch.float32 else torch.bfloat16, num_pairs > FEW_EXPERT_ROWS * num_experts]


def _launch(
    x: Tensor,
    router: Matrix,
    gate_up: Matrix,
    down: Matrix,
    shared_gate_up: Matrix,
    shared_down: Matrix,
    top_k: int,
    renormalise: bool,
    residual: Tensor | None = None,
) -> Tensor:
    weights = router, gate_up, down, shared_gate_up, shared_down
    for each in weights:
        assert isinstance(each, Tensor) and each.is_contiguous() and each.dtype == x.dtype, "weights are x's, unpacked"
    num_rows, hidden = x.shape
    num_experts, _, inner = down.shape  # type: ignore[union-attr]
    shared_inner = shared_down.shape[1]  # type: ignore[union-attr]
    assert x.stride(1) == 1 and (residual is None or residual.stride(1) == 1)
    out = x.new_empty(num_rows, hidden)
    if num_rows == 0:
        return out
    slices, num_pairs, padded = -(-hidden // _SLICE), num_rows * top_k, power_of_two(num_experts)
    partial = torch.empty(slices, num_rows, num_experts + 1, dtype=torch.float32, device=x.device)
    scale = torch.empty(num_rows, top_k + 1, dtype=torch.float32, device=x.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=x.device)
    pairs = torch.empty(num_experts, num_rows, dtype=torch.int32, device=x.device)
    act = x.new_empty(num_pairs + num_rows, max(inner, shared_inner))
    y = x.new_empty(num_pairs + num_rows, hidden)
    pdl = dependent_launch(x)
    launch = {"PDL": pdl, "launch_pdl": pdl}
    experts: dict[str, int] = {"E": num_experts, "E_PADDED": padded}
    up_tile, down_tile = tiles(x.dtype, num_pairs, num_experts)
    score_rows, score_outputs, summed = (16, 16, 1) if up_tile.rows == 16 else (32, 32, slices)
    _scores_kernel[(-(-(num_experts + 1) // score_outputs), slices // summed, -(-num_rows // score_rows))](
        x, router, partial, counts, num_rows, x.stride(0),
        **experts, H=hidden, SLICE=_SLICE, SUMMED=summed, BM=score_rows, BN=score_outputs, num_warps=4, **launch,
    )  # fmt: skip
    _choose_kernel[(num_rows,)](
        partial, counts, pairs, scale, num_rows,
        **experts, PARTS=slices // summed, TOP_K=top_k, RENORMALISE=renormalise, num_warps=1, **launch,
    )  # fmt: skip
    num_tiles = -(-num_rows // up_tile.rows) + min(num_pairs, num_pairs // up_tile.rows + num_experts)
    sizes = experts | {"TOP_K": top_k, "H": hidden, "I": inner, "IS": shared_inner}
    _up_kernel[(num_tiles * -(-max(inner, shared_inner) // up_tile.outputs),)](
        x, gate_up, shared_gate_up, counts, pairs, act, num_rows, x.stride(0), **sizes, **up_tile.sizes,
        EVEN=all(up_tile.even(size, (hidden,)) for size in (inner, shared_inner)), **up_tile.options, **launch,
    )  # fmt: skip
    _down_kernel[(num_tiles * -(-hidden // down_tile.outputs),)](
        act, down, shared_down, counts, pairs, y, num_rows, **sizes, **down_tile.sizes,
        EVEN=down_tile.even(hidden, (inner, shared_inner)), **down_tile.options, **launch,
    )  # fmt: skip
    _add_kernel[(num_rows, -(-hidden // 1024))](
        y, scale, residual, out, num_rows, 0 if residual is None else residual.stride(0),
        H=hidden, TOP_K=top_k, RESIDUAL=residual is not None, BLOCK=1024, num_warps=4, **launch,
    )  # fmt: skip
    return out


def ahead_of_time() -> list[Build]:
    builds = []
    names = ("x", "router", "gate_up", "down", "shared_gate_up", "shared_down", "act", "y", "residual", "out")
    for dtype, many in _TILES:
        types = dict.fromkeys(names, "*fp32" if dtype == torch.float32 else "*bf16")
        types |= {"partial": "*fp32", "scale": "*fp32", "counts": "*i32", "pairs": "*i32"}
        types |= {"num_rows": "i32", "x_stride": "i32", "residual_stride": "i32"}
        experts: dict[str, object] = {"E": 256, "E_PADDED": 256}
        sizes = experts | {"TOP_K": 8, "H": 2048, "I": 512, "IS": 512, "EVEN": True}
        side = 32 if many else 16
        scored = {"H": 2048, "SLICE": _SLICE, "SUMMED": 8 if many else 1}
        up, down = _TILES[dtype, many]
        builds += [
            Build(_scores_kernel, types, experts | scored | {"BM": side, "BN": side}),
            Build(_up_kernel, types, sizes | up.sizes, up.options),
            Build(_down_kernel, types, sizes | down.sizes, down.options),
            Build(_up_kernel, types, sizes | up.sizes | {"EVEN": False, "IS": 400}, up.options),
            Build(_down_kernel, types, sizes | down.sizes | {"EVEN": False, "IS": 400}, down.options),
        ]
        if not many:
            chosen = {"PARTS": 8, "TOP_K": 8, "RENORMALISE": True}
            builds += [
                Build(_choose_kernel, types, experts | chosen, {"num_warps": 1}),
                Build(_add_kernel, types, {"H": 2048, "TOP_K": 8, "RESIDUAL": True, "BLOCK": 1024}),
            ]
    return builds
