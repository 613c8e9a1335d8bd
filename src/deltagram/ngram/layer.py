"""How memory rows enter the residual streams: Qwen4-Exp's per-layer embedding (PLE)."""

from torch import Tensor

from deltagram.kernels.causal_conv1d import causal_conv1d
from deltagram.kernels.ple_add import ple_add
from deltagram.kernels.ple_gate import ple_gate
from deltagram.layers.basic import Factory, Linear, RMSNorm
from deltagram.step.sequences import SequenceTable


class MemoryProjection:
    """Rows to one key a residual stream and one value: the part of the layer that runs ahead."""

    def __init__(self, embed_dim: int, hidden_size: int, num_streams: int, eps: float, make: Factory) -> None:
        self.num_streams, self.hidden_size, self.dtype = num_streams, hidden_size, make.dtype
        self.key_value = Linear(embed_dim, {"key_proj": num_streams * hidden_size, "value_proj": hidden_size}, make)
        self.norm_key = RMSNorm(hidden_size, eps, make, groups=num_streams)

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """rows [T, columns, row_dim] -> normalised keys [T, streams, H], value [T, H]."""
        key, value = self.key_value.split(rows.flatten(1))
        return self.norm_key(key.unflatten(1, (self.num_streams, self.hidden_size))), value

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        return self.key_value.tensors(prefix) | self.norm_key.tensors(f"{prefix}.norm_key")


class PLELayer:
    """Adds to the streams X [T, streams, H], from a token's memory key K (normalised, one a stream) and value v:

        d    = sum(K * norm_query(X)) / sqrt(H);  gate = sigmoid(sign(d) sqrt(max(|d|, 1e-6)))
        G    = gate * v
        X   += G + silu(causal conv over norm_conv(G), dilation max_order)

    `history` is the ring of past conv inputs, [slots, entries, streams * H]; the engine's pools own it.
    """

    def __init__(
        self, embed_dim: int, hidden_size: int, num_streams: int, kernel: int, dilation: int, eps: float, make: Factory
    ) -> None:
        self.dilation, self.reach = dilation, (kernel - 1) * dilation
        self.width = num_streams * hidden_size
        self.projection = MemoryProjection(embed_dim, hidden_size, num_streams, eps, make)
        self.norm_query = RMSNorm(hidden_size, eps, make, groups=num_streams)
        self.norm_conv = RMSNorm(hidden_size, eps, make, groups=num_streams)
        self.conv = make.empty(self.width, kernel)
        self.history: Tensor | None = None

    def __call__(self, streams: Tensor, key: Tensor, value: Tensor, table: SequenceTable) -> None:
        """Update `streams` in place. key [T, streams, H], value [T, H]: MemoryProjection's."""
        assert self.history is not None, "the layer has no pool"
        norms = self.norm_query.scale, self.norm_conv.scale
        gated, normed = ple_gate(streams, key, value, *norms, self.norm_query.eps)
        mixed = causal_conv1d(
            normed.flatten(1),
            self.conv,
            self.history,
            table.cu_tokens,
            table.sequence,
            table.position,
            table.start,
            table.slot,
            self.dilation,
        )
        ple_add(streams, gated, mixed.view_as(gated))

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        return (
            self.projection.tensors(prefix)
            | self.norm_query.tensors(f"{prefix}.norm_query")
            | self.norm_conv.tensors(f"{prefix}.norm_conv")
            | {f"{prefix}.conv1d.weight": self.conv[:, None]}
        )
