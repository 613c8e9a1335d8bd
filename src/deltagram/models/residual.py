"""Decoders on a plain residual: what Qwen3.5, Qwen3.5-MoE and Qwen3-Next have in common."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from deltagram.attention.layer import Attention
from deltagram.gdn.layer import GatedDeltaNet
from deltagram.layers.basic import Factory, RMSNorm
from deltagram.layers.mlp import MLP, MoE
from deltagram.layers.rotary import Rotary
from deltagram.models.base import DraftHead, Embedding, as_weights, experts_weights, is_full, linear_attention
from deltagram.models.config import ModelConfig
from deltagram.models.weights import Weight
from deltagram.ngram.layer import PLELayer
from deltagram.ngram.run_ahead import RunAhead
from deltagram.step.history import TokenHistory
from deltagram.step.sequences import SequenceTable


class DecoderLayer:
    """x += mixer(norm(x)); x += mlp(norm(x)), with full attention or, if not `full`, a Gated DeltaNet as the mixer."""

    def __init__(self, config: ModelConfig, full: bool, mlp: MLP | MoE, make: Factory) -> None:
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, make)
        self.mixer: Attention | GatedDeltaNet
        if full:
            heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
            self.mixer = Attention(config.hidden_size, *heads, config.rms_norm_eps, make)
        else:
            self.mixer = linear_attention(config, make)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, make)
        self.mlp = mlp

    def __call__(
        self, x: Tensor, normed: Tensor, table: SequenceTable, rotary: Rotary, rows: Tensor | None, following: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        """x, which is used up, and `input_norm` of it -> the new x and `following` of it: what makes x takes its norm
        on the way. Past the mixer only `rows` go on, if given."""
        if isinstance(self.mixer, Attention):
            heads = self.mixer.heads(normed, table, rotary)
        else:
            heads = self.mixer.heads(normed, table)
        if rows is not None:
            x, heads = x[rows], heads[rows]
        x, normed = self.mixer.out.onto(x, heads, self.post_norm)
        if isinstance(self.mlp, MoE):
            x = self.mlp(normed, residual=x)
            return x, following(x)
        return self.mlp.onto(x, normed, following)

    def weights(
        self, prefix: str, shapes: Mapping[str, tuple[int, ...]], by_key_head: bool = False
    ) -> dict[str, Weight]:
        """See Model.weights. `by_key_head` says how the projections of a Gated DeltaNet are packed."""
        norms = self.input_norm.tensors(f"{prefix}.input_layernorm")
        norms |= self.post_norm.tensors(f"{prefix}.post_attention_layernorm")
        if isinstance(self.mixer, Attention):
            mixer = as_weights(self.mixer.tensors(f"{prefix}.self_attn"))
        else:
            name = f"{prefix}.linear_attn"
            mixer = as_weights(self.mixer.by_key_head(name) if by_key_head else self.mixer.tensors(name))
        if isinstance(self.mlp, MoE):
            mlp = experts_weights(self.mlp, f"{prefix}.mlp", shapes)
        else:
            mlp = as_weights(self.mlp.tensors(f"{prefix}.mlp"))
        return as_weights(norms) | mixer | mlp


class ResidualDecoder:
    """A text model with one of `mlps` a layer: see models/base.py for what the engine asks of it."""

    block_size = 1
    by_key_head = False  # how the checkpoint packs the projections of a Gated DeltaNet

    def __init__(self, config: ModelConfig, max_context: int, make: Factory, mlps: Sequence[MLP | MoE]) -> None:
        self.config = config
        self.embedding = Embedding(config, make)
        self.layers = [DecoderLayer(config, is_full(config, i), mlp, make) for i, mlp in enumerate(mlps)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, make)
        self.norms = [*(layer.input_norm for layer in self.layers), self.norm]  # layer i reads what norms[i] gives
        self.rotary = Rotary(config.rope, config.rotary_dim, max_context, make.device)
        self.linear_layers = [layer.mixer for layer in self.layers if isinstance(layer.mixer, GatedDeltaNet)]
        self.attention_layers = [layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention)]
        self.memory_layers: list[PLELayer] = []
        self.mtp: DraftHead | None = None
        self.run_ahead: RunAhead | None = None

    def forward(self, table: SequenceTable, history: TokenHistory, rows: Tensor | None = None) -> Tensor:
        x = self.embedding(table.token)
        normed = self.norms[0](x)
        for layer, following in zip(self.layers, self.norms[1:], strict=True):
            wanted = rows if layer is self.layers[-1] else None
            x, normed = layer(x, normed, table, self.rotary, wanted, following)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        return self.embedding.logits(hidden)

    def weights(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Weight]:
        plan = self.embedding.weights() | as_weights(self.norm.tensors("model.norm"))
        for i, layer in enumerate(self.layers):
            plan |= layer.weights(f"model.layers.{i}", shapes, self.by_key_head)
        return plan
