"""The demo model's draft head (`mtp.*`) over whole sequences, in plain PyTorch, with its checkpoint's names.

    streams' = layer(fc_embedding(norm_e(embedding)) + fc_hidden(norm_h(streams))),  logits = embedding(mix(streams'))

It pairs the model's streams at position p with the token at p + 1 and says what comes at p + 2; given its own streams'
instead, moved on by one token, it says what comes after that. Source: the checkpoints' format; what serves it is
src/deltagram/models/mtp.py.
"""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch
import torch.nn.functional as F
from demo_export import expert_tensors, write_safely
from demo_layers import HyperConnection, OffsetNorm, linear
from demo_model import DecoderLayer, DemoModel
from safetensors.torch import save
from torch import Tensor, nn

FILE = "draft-head.safetensors"
INDEX = "model.safetensors.index.json"


class DraftHead(nn.Module):
    """Starts as the model's last layer and its last mixer, on streams to which the token adds little yet."""

    def __init__(self, model: DemoModel) -> None:
        super().__init__()
        config = model.config
        last = model.decoder_layers[-1]
        assert last.self_attn is not None and last.ple is None, "a head is a layer of attention without memory"
        self.count = config.hc_count
        self.pre_fc_norm_embedding = OffsetNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = OffsetNorm(config.hc_count * config.hidden_size, config.rms_norm_eps)
        self.fc_embedding = linear(config.hidden_size, config.hidden_size)
        self.fc_hidden = linear(config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList([DecoderLayer(config, config.num_hidden_layers - 1, 0.0)])
        self.hyper_connection_mixer = HyperConnection(config, inject=False)
        nn.init.normal_(self.fc_embedding.weight, std=config.initializer_range)
        nn.init.eye_(self.fc_hidden.weight)
        self.layers[0].load_state_dict(last.state_dict())
        self.hyper_connection_mixer.load_state_dict(model.model.hyper_connection_mixer.state_dict())

    def forward(self, streams: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        """streams [B, T, S * H] and the embedding of the token after each [B, T, H] -> what goes to the output head
        [B, T, H], and the streams for a further pass."""
        normed = self.pre_fc_norm_hidden(streams).unflatten(-1, (self.count, -1))
        token = self.fc_embedding(self.pre_fc_norm_embedding(words)).unsqueeze(-2)
        streams = self.layers[0]((token + self.fc_hidden(normed)).float().flatten(-2), words)
        return self.hyper_connection_mixer(streams)[0], streams


def passes(model: DemoModel, head: DraftHead, ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pass after pass, without end: what the head and what the model say of the same tokens, float32 logits
    [B, T - pass, vocab], the first pass being 1. Nothing of the model has a gradient."""
    table = model.model.embed_tokens.weight.detach()

    def logits(hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.float(), table)

    with torch.no_grad():
        streams, words = model.model.streams(ids), F.embedding(ids, table)
        theirs = logits(model.model.hyper_connection_mixer(streams)[0])
    for number in count(1):
        hidden, streams = head(streams[:, :-1], words[:, number:])
        yield logits(hidden), theirs[:, number:]


def export_head(
    model: DemoModel, head: DraftHead, folder: Path, out: Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    """FILE and the index of the checkpoint in `folder` with it, into `out`: copied over the checkpoint, they give it
    the head."""
    tensors: dict[str, Tensor] = {}
    for name, value in head.state_dict().items():
        tensors |= expert_tensors(f"mtp.{name}", value.detach().cpu().to(dtype))
    write_safely(out / FILE, save({n: v.contiguous().clone() for n, v in tensors.items()}, metadata={"format": "pt"}))
    index = json.loads((folder / INDEX).read_text("utf-8"))
    index["weight_map"] |= dict.fromkeys(tensors, FILE)
    index["metadata"]["total_size"] += sum(value.nbytes for value in tensors.values())
    write_safely(out / INDEX, (json.dumps(index, indent=2) + "\n").encode())
