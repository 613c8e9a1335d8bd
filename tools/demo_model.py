"""A trainable Qwen4-Exp text model with the parameter names of its checkpoints: whole sequences only, no cache.

What the checkpoint format leaves out is here too: the indexer is trained by a loss of its own (`IndexedAttention`), the
router by a load-balancing loss (`SparseMoE`). Both are read with `DemoModel.auxiliary_losses` after a training forward.
"""

import math

import torch
import torch.nn.functional as F
from demo_config import DemoConfig
from demo_layers import HyperConnection, Memory, SparseMoE
from demo_mixers import GatedDeltaNet, IndexedAttention
from torch import Tensor, nn


class DecoderLayer(nn.Module):
    def __init__(self, config: DemoConfig, index: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.memory_on = True
        is_linear = config.layer_types[index] == "linear_attention"
        self.linear_attn = GatedDeltaNet(config) if is_linear else None
        self.self_attn = None if is_linear else IndexedAttention(config)
        self.mlp = SparseMoE(config)
        has_memory = index + 1 in config.ple_layer_ids
        self.ple = Memory(config, config.ple_layer_ids.index(index + 1), dropout) if has_memory else None
        self.attn_hyper_connection = HyperConnection(config)
        self.mlp_hyper_connection = HyperConnection(config)

    def forward(self, streams: Tensor, ids: Tensor) -> Tensor:
        if self.ple is not None and self.memory_on:
            streams = streams + self.ple(streams, ids)
        mixer = self.linear_attn or self.self_attn
        assert mixer is not None
        for connection, block in ((self.attn_hyper_connection, mixer), (self.mlp_hyper_connection, self.mlp)):
            x, injection = connection(streams)
            out = F.dropout(block(x).float(), self.dropout, self.training)
            streams = streams + (injection.unsqueeze(-1) * out.unsqueeze(-2)).flatten(-2)
        return streams


class TextModel(nn.Module):
    """Token ids [B, T] -> hidden [B, T, H]."""

    def __init__(self, config: DemoConfig, dropout: float) -> None:
        super().__init__()
        self.config, self.dropout = config, dropout
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i, dropout) for i in range(config.num_hidden_layers))
        self.hyper_connection_mixer = HyperConnection(config, inject=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.hyper_connection_mixer(self.streams(ids))[0]

    def streams(self, ids: Tensor) -> Tensor:
        """The residual streams after the last layer, [B, T, S * H]."""
        embedded = F.dropout(self.embed_tokens(ids), self.dropout, self.training)
        streams = embedded.repeat(1, 1, self.config.hc_count)
        for layer in self.layers:
            streams = layer(streams, ids)
        return streams


class DemoModel(nn.Module):
    """Qwen4ExpForCausalLM with tied embeddings. Token ids [B, T] -> logits [B, T, vocab]."""

    def __init__(self, config: DemoConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.model = TextModel(config, dropout)
        for name, parameter in self.named_parameters():
            if name.endswith("ple.conv1d.weight"):
                nn.init.zeros_(parameter)
            elif name.endswith("linear_attn.conv1d.weight"):
                nn.init.normal_(parameter, std=0.5)
            elif parameter.dim() > 1:
                nn.init.normal_(parameter, std=config.initializer_range)
        # Blocks that write to the streams start smaller, the deeper the model (as in GPT-2).
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")):
                parameter.data /= math.sqrt(2 * config.num_hidden_layers)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.model(ids), self.model.embed_tokens.weight)

    def auxiliary_losses(self) -> tuple[Tensor, Tensor]:
        """(mean balance loss over layers, sum of index losses over attention layers) of the last training forward."""
        balance = [layer.mlp.balance_loss for layer in self.decoder_layers if layer.mlp.balance_loss is not None]
        index = [mixer.index_loss for mixer in self.attention_mixers if mixer.index_loss is not None]
        return torch.stack(balance).mean(), torch.stack(index).sum()

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.model.layers if isinstance(layer, DecoderLayer)]

    @property
    def attention_mixers(self) -> list[IndexedAttention]:
        return [layer.self_attn for layer in self.decoder_layers if layer.self_attn is not None]

    def set_memory(self, on: bool) -> None:
        """Open or shut the gate of every memory layer: shut, the memory adds nothing to the streams."""
        for layer in self.decoder_layers:
            layer.memory_on = on

    def set_sparse(self, sparse: bool) -> None:
        """Let the indexer restrict attention (`indexer_budget`), or attend to everything."""
        for mixer in self.attention_mixers:
            mixer.sparse = sparse
