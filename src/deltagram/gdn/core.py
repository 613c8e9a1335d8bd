"""The gated delta rule over a step: one fixed sequence of ops, whatever the step mixes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from deltagram.kernels.causal_conv1d import causal_conv1d
from deltagram.kernels.gated_delta_chunk import gated_delta_chunk
from deltagram.kernels.gated_delta_prep import gated_delta_prep
from deltagram.kernels.gated_delta_recurrent import gated_delta_recurrent
from deltagram.step.sequences import SequenceTable


@dataclass(slots=True)
class LayerState:
    """One layer's part of the pools: see gdn/state.py."""

    recurrent: Tensor
    conv: Tensor


def forward_core(
    table: SequenceTable,
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    num_key_heads: int,
    key_dim: int,
    state: LayerState,
) -> Tensor:
    """qkv [T, 2 H K + HV V], a and b [T, HV] -> the layer's heads [T, HV, V] before norm and gate; `state` is updated.

    Tokens stay where they are: each op takes the rows of its own kind and leaves the others.
    """
    convolved = causal_conv1d(
        qkv, conv_weight, state.conv, table.cu_tokens, table.sequence, table.position, table.start, table.slot
    )
    q, k, v, g, beta = gated_delta_prep(convolved, a, b, A_log, dt_bias, num_key_heads, key_dim)
    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    gated_delta_recurrent(q, k, v, g, beta, state.recurrent, table.kind, table.slot, out)
    if table.bucket.mixed:
        gated_delta_chunk(
            q, k, v, g, beta, state.recurrent, table.chunks, table.cu_tokens, table.start, table.slot, out
        )
    return out
