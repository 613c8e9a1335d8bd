"""What the engine asks of a model, and what the families share."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from deltagram.attention.layer import Attention
from deltagram.gdn.layer import GatedDeltaNet
from deltagram.kernels._packed import Matrix, Packed
from deltagram.kernels.embed import embed
from deltagram.kernels.linear import linear
from deltagram.layers.basic import Factory
from deltagram.layers.mlp import MLP, MoE
from deltagram.models.config import FULL, ModelConfig, MoEConfig, Qwen3NextConfig, Qwen35Config
from deltagram.models.weights import Weight
from deltagram.ngram.layer import PLELayer
from deltagram.ngram.run_ahead import RunAhead
from deltagram.step.history import TokenHistory
from deltagram.step.sequences import SequenceTable


class DraftHead(Protocol):
    """What drafts from a model's hidden states: see models/mtp.py."""

    def draft(
        self, hidden: Tensor, token: Tensor, table: SequenceTable, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Hidden states [T, ...] as `Model.forward` or the last pass gave them, and the token after each, int [T] ->
        logits [n, vocab] of the token after that, and hidden states [n, ...] for the next pass."""
        ...

    def remember(self, hidden: Tensor, token: Tensor, table: SequenceTable) -> None:
        """What `draft` keeps of a step's tokens, and no more: for steps on a CPU after which nobody wants drafts."""
        ...

    def weights(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Weight]:
        """As Model.weights, of the head's own."""
        ...


class Model(Protocol):
    """A hybrid decoder. The engine gives each layer of the three lists its part of the pools before the first step."""

    @property
    def config(self) -> ModelConfig: ...

    linear_layers: list[GatedDeltaNet]
    attention_layers: list[Attention]
    memory_layers: list[PLELayer]
    block_size: int  # tokens an indexer's block; 1 without one
    mtp: DraftHead | None  # if it was asked for; its attention is the last of `attention_layers`
    run_ahead: RunAhead | None  # the chains of its memory layers, if it has any

    def forward(self, table: SequenceTable, history: TokenHistory, rows: Tensor | None = None) -> Tensor:
        """Run a step's tokens; their last hidden states [T, H], or [T, streams, H] of a model with residual streams; or
        those of `rows` (int64 [n]) alone, which spares the others the end of the last layer. Pools are updated in
        place."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, H] or [n, streams, H], as `forward` gave it -> [n, vocab]."""
        ...

    def weights(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Weight]:
        """Where each tensor of a checkpoint goes. `shapes` are its own, for layouts that come in variants."""
        ...


class Embedding:
    """Word embedding and output head, one tensor where they are tied."""

    def __init__(self, config: ModelConfig, make: Factory) -> None:
        self.tied = config.tie_word_embeddings
        self.words = make.empty(config.vocab_size, config.hidden_size)
        self.head = self.words if self.tied else make.empty(config.vocab_size, config.hidden_size)
        self._matrix: Matrix = self.head
        make.packers.append(self._pack)

    def __call__(self, token: Tensor, copies: int | None = None) -> Tensor:
        """token [T] -> [T, H], or [T, copies, H]."""
        return embed(token, self.words, copies)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, H] -> [n, vocab]."""
        return linear(hidden, self._matrix)

    def _pack(self) -> None:
        self._matrix = Packed.of(self.head)

    def weights(self) -> dict[str, Weight]:
        """A tied checkpoint may hold the head too; it is the same tensor, and is not read."""
        head = Weight(None, optional=True) if self.tied else Weight(self.head)
        return {"model.embed_tokens.weight": Weight(self.words), "lm_head.weight": head}


def linear_attention(config: ModelConfig, make: Factory) -> GatedDeltaNet:
    """The Gated DeltaNet layer that `config` describes."""
    return GatedDeltaNet(
        config.hidden_size,
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
        config.rms_norm_eps,
        config.output_gate_type,
        make,
    )


def dense_mlp(config: Qwen35Config | Qwen3NextConfig, make: Factory) -> MLP:
    """The gated MLP that `config` describes."""
    return MLP(config.hidden_size, config.intermediate_size, make)


def experts(config: MoEConfig, make: Factory) -> MoE:
    """The experts that `config` describes."""
    return MoE(
        config.hidden_size,
        config.num_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        config.shared_expert_intermediate_size,
        config.norm_topk_prob,
        make,
    )


def is_full(config: ModelConfig, layer: int) -> bool:
    """Whether a layer attends (fully or indexed) rather than keeps a recurrent state."""
    return config.layer_types[layer] == FULL


def as_weights(tensors: Mapping[str, Tensor | tuple[Tensor, ...]]) -> dict[str, Weight]:
    """Layers name tensors; loading wants to know that each of them is needed."""
    return {name: Weight(tensor) for name, tensor in tensors.items()}


def experts_weights(mlp: MoE, prefix: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Weight]:
    """Experts lie packed or one by one: as the checkpoint has them."""
    packed = f"{prefix}.experts.gate_up_proj" in shapes
    return as_weights(mlp.tensors(prefix) if packed else mlp.unpacked(prefix))


def meta_factory(dtype: torch.dtype) -> Factory:
    """Tensors without memory: a model of shapes, to check a checkpoint against before anything is allocated."""
    return Factory(torch.device("meta"), dtype)
