"""The gated delta rule over a step: one fixed sequence of ops, whatever the step mixes.

On a GPU decode and verify sequences are one launch, and prefill chunks, where the bucket may have some, four after it.
Their grids are the bucket's capacity and their sizes are read from the sequence table on the device, so a captured step
is an eager one.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deltagram.kernels._triton import Impl, choose, on_cpu
from deltagram.kernels.causal_conv1d import causal_conv1d
from deltagram.kernels.gated_delta_chunk import gated_delta_chunk
from deltagram.kernels.gated_delta_decode import gated_delta_decode
from deltagram.kernels.gated_delta_prep import gated_delta_prep
from deltagram.kernels.gated_delta_recurrent import gated_delta_recurrent
from deltagram.kernels.rms_norm_gated import rms_norm_gated
from deltagram.step.sequences import SequenceTable


@dataclass(slots=True)
class LayerState:
    """One layer's part of the pools: see gdn/state.py. `recent` are the rings of k, v and gates, if steps may carry
    drafts or leave states for later steps to store."""

    recurrent: Tensor
    conv: Tensor
    recent: tuple[Tensor, Tensor, Tensor] | None = None


class Weights(NamedTuple):
    """conv [C, W], A_log and dt_bias fp32 [HV], and the number of key heads H."""

    conv: Tensor
    A_log: Tensor
    dt_bias: Tensor
    num_key_heads: int


class Gate(NamedTuple):
    """The gated norm at the end: see rms_norm_gated. z [T, HV, V], weight fp32 [V]."""

    z: Tensor
    weight: Tensor
    eps: float
    activation: str


def forward_core(
    table: SequenceTable,
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weights: Weights,
    state: LayerState,
    gate: Gate | None = None,
    impl: Impl = None,
) -> Tensor:
    """qkv [T, 2 H K + HV V], a and b [T, HV] -> the layer's heads [T, HV, V], through `gate` if given; `state` is
    updated.

    Tokens stay where they are: each op takes the rows of its own kind and leaves the others. Nobody writes the rows of
    padding, and the gated norm does not read them.
    """
    rings, most = state.recent, table.bucket.max_draft
    assert rings is None or rings[0].shape[1] >= table.every + 2 * most, "rings of recent tokens are too short"
    replays = rings is not None and (most > 0 or table.every > 1)
    plain = not replays and state.recurrent.dtype == a.dtype == torch.float32
    body = choose(impl, qkv, _op_by_op, _at_once, _head_by_head if plain else _op_by_op)
    return body(table, qkv, a, b, weights, state, gate, impl)


Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, v, g, beta


def _op_by_op(
    table: SequenceTable,
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weights: Weights,
    state: LayerState,
    gate: Gate | None,
    impl: Impl,
) -> Tensor:
    """The plain path, and that of a CPU where tokens may be pending: each op over all tokens."""
    t = table
    parts = _prepared(t, qkv, a, b, weights, state, impl)
    out = parts[2].new_empty(parts[2].shape)
    gated_delta_recurrent(
        *parts, state.recurrent, t.kind, t.cu_tokens, t.start, t.pending, t.stores, t.slot, out, state.recent, impl
    )
    if t.bucket.mixed:
        _prefill(t, parts, state, out, impl)
    return _gated(out, gate, t, impl)


def _at_once(
    table: SequenceTable,
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weights: Weights,
    state: LayerState,
    gate: Gate | None,
    impl: Impl,
) -> Tensor:
    """Decode and verify sequences in one launch; then prefill, whose ops go over all tokens: what they do again for the
    others is what was done, or is not read."""
    t = table
    out = qkv.new_empty(len(qkv), *state.recurrent.shape[1:3])
    pools, where = (state.conv, state.recurrent), (t.kind, t.cu_tokens, t.start, t.pending, t.stores, t.slot)
    heads, max_draft = weights.num_key_heads, t.bucket.max_draft
    gated_delta_decode(qkv, a, b, *weights[:3], *pools, *where, out, heads, state.recent, max_draft, impl)
    if t.bucket.mixed:
        _prefill(t, _prepared(t, qkv, a, b, weights, state, impl), state, out, impl)
    return _gated(out, gate, t, impl)


_compiled = on_cpu("gated_delta_core")


def _head_by_head(
    table: SequenceTable,
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weights: Weights,
    state: LayerState,
    gate: Gate | None,
    impl: Impl,
) -> Tensor:
    """On a CPU, in a step that stores all and finds nothing pending: every op for one head, then for the next."""
    t, key_dim = table, state.recurrent.shape[-1]
    norm = (None, None, 0.0, False) if gate is None else (gate.z, gate.weight, gate.eps, gate.activation == "silu")
    pools = state.conv, state.recurrent
    heads: Tensor = _compiled(qkv, a, b, *weights, key_dim, *pools, t.kind, t.cu_tokens, t.start, t.slot, *norm)
    return heads


def _prepared(
    t: SequenceTable, qkv: Tensor, a: Tensor, b: Tensor, weights: Weights, state: LayerState, impl: Impl
) -> Parts:
    """What the gated delta rule reads; the convolution's ring is updated."""
    ring, key_dim = state.conv, state.recurrent.shape[-1]
    x = causal_conv1d(qkv, weights.conv, ring, t.cu_tokens, t.sequence, t.position, t.start, t.slot, impl=impl)
    return gated_delta_prep(x, a, b, weights.A_log, weights.dt_bias, weights.num_key_heads, key_dim, impl)


def _prefill(t: SequenceTable, parts: Parts, state: LayerState, out: Tensor, impl: Impl) -> None:
    gated_delta_chunk(*parts, state.recurrent, t.chunks, t.kind, t.cu_tokens, t.start, t.slot, out, impl)


def _gated(heads: Tensor, gate: Gate | None, table: SequenceTable, impl: Impl) -> Tensor:
    if gate is None:
        return heads
    return rms_norm_gated(heads, gate.z, gate.weight, table.cu_tokens, gate.eps, gate.activation, impl)
