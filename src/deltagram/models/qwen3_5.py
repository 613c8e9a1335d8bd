"""Qwen3.5 (dense): Gated DeltaNet and full attention layers on a plain residual."""

from collections.abc import Mapping

from torch import Tensor

from deltagram.attention.layer import Attention
from deltagram.gdn.layer import GatedDeltaNet
from deltagram.layers.basic import Factory, RMSNorm
from deltagram.layers.mlp import MLP
from deltagram.layers.rotary import Rotary
from deltagram.models.base import Embedding, as_weights, is_full, linear_attention
from deltagram.models.config import Qwen35Config
from deltagram.models.weights import Weight
from deltagram.ngram.layer import PLELayer
from deltagram.step.history import TokenHistory
from deltagram.step.sequences import SequenceTable


class DecoderLayer:
    """x += mixer(norm(x)); x += mlp(norm(x))."""

    def __init__(self, config: Qwen35Config, layer: int, make: Factory) -> None:
        self.full = is_full(config, layer)
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, make)
        self.mixer: Attention | GatedDeltaNet
        if self.full:
            heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
            self.mixer = Attention(config.hidden_size, *heads, config.rms_norm_eps, make)
        else:
            self.mixer = linear_attention(config, make)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, make)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, make)

    def __call__(self, x: Tensor, table: SequenceTable, rotary: Rotary, rows: Tensor | None) -> Tensor:
        """Past the mixer only `rows` go on, if given."""
        normed = self.input_norm(x)
        x = x + (self.mixer(normed, table, rotary) if isinstance(self.mixer, Attention) else self.mixer(normed, table))
        x = x if rows is None else x[rows]
        return x + self.mlp(self.post_norm(x))

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        return (
            self.input_norm.tensors(f"{prefix}.input_layernorm")
            | self.mixer.tensors(f"{prefix}.{'self_attn' if self.full else 'linear_attn'}")
            | self.post_norm.tensors(f"{prefix}.post_attention_layernorm")
            | self.mlp.tensors(f"{prefix}.mlp")
        )


class Qwen35:
    """The Qwen3.5 text model: see models/base.py for what the engine asks of it."""

    block_size = 1

    def __init__(self, config: Qwen35Config, max_context: int, make: Factory) -> None:
        self.config = config
        self.embedding = Embedding(config, make)
        self.layers = [DecoderLayer(config, layer, make) for layer in range(config.num_hidden_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, make)
        self.rotary = Rotary(config.rope, config.rotary_dim, max_context, make.device)
        self.linear_layers = [layer.mixer for layer in self.layers if isinstance(layer.mixer, GatedDeltaNet)]
        self.attention_layers = [layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention)]
        self.memory_layers: list[PLELayer] = []

    def forward(self, table: SequenceTable, history: TokenHistory, rows: Tensor | None = None) -> Tensor:
        x = self.embedding(table.token)
        for layer in self.layers:
            x = layer(x, table, self.rotary, rows if layer is self.layers[-1] else None)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.embedding.logits(hidden)

    def weights(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Weight]:
        tensors = self.norm.tensors("model.norm")
        for i, layer in enumerate(self.layers):
            tensors |= layer.tensors(f"model.layers.{i}")
        return self.embedding.weights() | as_weights(tensors)
