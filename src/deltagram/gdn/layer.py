"""A Gated DeltaNet layer: projections, the core, the gated norm, the output projection."""

import torch
from torch import Tensor

from deltagram.gdn.core import Gate, LayerState, Weights, forward_core
from deltagram.layers.basic import Factory, Linear
from deltagram.step.sequences import SequenceTable


class GatedDeltaNet:
    """Linear attention of the Qwen hybrids, H key heads of size K, HV value heads of size V.

    `state` is the layer's part of the pools, set by the engine.
    """

    def __init__(
        self,
        hidden_size: int,
        num_key_heads: int,
        num_value_heads: int,
        key_dim: int,
        value_dim: int,
        conv_kernel: int,
        eps: float,
        gate: str,
        make: Factory,
    ) -> None:
        self.num_key_heads, self.num_value_heads = num_key_heads, num_value_heads
        self.key_dim, self.value_dim = key_dim, value_dim
        self.eps, self.gate = eps, gate
        self.channels = 2 * num_key_heads * key_dim + num_value_heads * value_dim
        self.conv_reach = conv_kernel - 1
        parts = {
            "in_proj_qkv": self.channels,
            "in_proj_z": num_value_heads * value_dim,
            "in_proj_b": num_value_heads,
            "in_proj_a": num_value_heads,
        }
        self.project = Linear(hidden_size, parts, make)
        self.conv = make.empty(self.channels, conv_kernel)
        self.A_log = make.empty(num_value_heads, dtype=torch.float32)
        self.dt_bias = make.empty(num_value_heads, dtype=torch.float32)
        self.norm = make.empty(value_dim, dtype=torch.float32)
        self.out = Linear(num_value_heads * value_dim, {"out_proj": hidden_size}, make)
        self.state: LayerState | None = None

    def __call__(self, x: Tensor, table: SequenceTable) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        return self.out(self.heads(x, table))

    def heads(self, x: Tensor, table: SequenceTable) -> Tensor:
        """x [T, hidden] -> [T, HV * V], which `out` takes."""
        assert self.state is not None, "the layer has no pool"
        qkv, z, b, a = self.project.split(x)
        weights = Weights(self.conv, self.A_log, self.dt_bias, self.num_key_heads)
        gate = Gate(z.unflatten(1, (self.num_value_heads, self.value_dim)), self.norm, self.eps, self.gate)
        return forward_core(table, qkv, a, b, weights, self.state, gate).flatten(1)

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        return self.project.tensors(prefix) | self._common(prefix)

    def by_key_head(self, prefix: str) -> dict[str, Tensor | tuple[Tensor, ...]]:
        """Names of Qwen3-Next's layout, and where their rows go in turn. It packs the projections by key head:
        in_proj_qkvz [H * (2 K + 2 r V), hidden] holds q, k, r heads of v and r of z, and in_proj_ba [H * 2 r, hidden]
        holds r rows of b and r of a, with r = HV / H."""
        keys, heads = self.num_key_heads * self.key_dim, self.num_key_heads
        qkv, z, b, a = self.project.weight.split(self.project.sizes)
        q, k, v = qkv.split([keys, keys, self.channels - 2 * keys])

        def in_turn(*parts: Tensor) -> tuple[Tensor, ...]:
            chunks = zip(*(part.chunk(heads) for part in parts), strict=True)
            return tuple(chunk for head in chunks for chunk in head)

        packed = {f"{prefix}.in_proj_qkvz.weight": in_turn(q, k, v, z), f"{prefix}.in_proj_ba.weight": in_turn(b, a)}
        return packed | self._common(prefix)

    def _common(self, prefix: str) -> dict[str, Tensor]:
        return self.out.tensors(prefix) | {
            f"{prefix}.conv1d.weight": self.conv[:, None],
            f"{prefix}.A_log": self.A_log,
            f"{prefix}.dt_bias": self.dt_bias,
            f"{prefix}.norm.weight": self.norm,
        }
