"""Multi-token prediction: a head that drafts from a model's own hidden states, the `mtp.*` weights of its checkpoint.

A head has one layer of the model's kind with full attention, whose keys and values lie in the request's own pages: it
is one more of the model's `attention_layers`. Word embedding, output head and rotary embedding are the model's. The
layer after the model's last sees pairs, not tokens: place p of its cache belongs to the hidden state at position p and
the token at p + 1 (step/drafts.py).

How to draft up to k tokens after each step:

    hidden = model.forward(table, history)             of all tokens: the head's cache needs every one
    ... logits of those that are sampled after; the history takes the tokens ...
    drafting = prepare_drafts(table, history, wanted, k)    wanted: drafts of each sequence, 0 for one not sampled
    logits, hidden = head.draft(hidden, drafting.follower, table, drafting.first)
    for pass_table in drafting.tables:
        token = logits.argmax(-1)                      or drawn; row i is of sequence drafting.order[i]
        logits, hidden = head.draft(hidden, token, pass_table)

Each pass leaves as many real rows as sequences want that many drafts. Nothing of it waits on the host.

What a caller must see to:
- A step whose tokens the head did not take leaves holes in its cache, and later drafts read them.
- Passes from the second on write places up to L + k - 3 of a request with L known tokens: its pages must reach there,
  and the engine's largest context must. All that they write, the next step's first pass writes anew with the model's
  own hidden states, or another step does before it is read.
- Place p depends on the token at p + 1. A prefix of P tokens shared by two requests has P - 1 places in common; the
  last one may be the other's, which costs that one draft some of its likelihood and nothing else: drafts never change
  what is generated.

Source: there is no paper; names and order of operations are those of public checkpoints and of vLLM and SGLang, which
serve them. Both give the head what their model's output head reads, normalised, and feed it its own normalised output;
a head of streams gets them before the last mixing, and its norm of them is one over all streams.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from deltagram.attention.layer import Attention
from deltagram.layers.basic import Factory, Linear, RMSNorm
from deltagram.layers.hyper_connections import HyperConnection
from deltagram.models import qwen4_exp, residual
from deltagram.models.base import Model, as_weights, dense_mlp, experts
from deltagram.models.config import MoEConfig, Qwen3NextConfig, Qwen35Config
from deltagram.models.weights import Weight
from deltagram.step.sequences import SequenceTable

LAYER = "mtp.layers.0"


class MTPHead:
    """Of a decoder on a plain residual:

    hidden' = norm(layer(fc([norm_e(embedding) | norm_h(hidden)]))),  logits = lm_head(hidden')
    """

    def __init__(self, model: residual.ResidualDecoder, make: Factory) -> None:
        config, size, eps = model.config, model.config.hidden_size, model.config.rms_norm_eps
        self.model = model
        self.norm_embedding, self.norm_hidden = RMSNorm(size, eps, make), RMSNorm(size, eps, make)
        self.fc = Linear(2 * size, {"fc": size}, make)
        if isinstance(config, MoEConfig):
            self.layer = residual.DecoderLayer(config, True, experts(config, make), make)
        else:
            assert isinstance(config, Qwen35Config | Qwen3NextConfig)
            self.layer = residual.DecoderLayer(config, True, dense_mlp(config, make), make)
        assert isinstance(self.layer.mixer, Attention)
        self.attention = self.layer.mixer
        self.norm = RMSNorm(size, eps, make)

    def draft(
        self, hidden: Tensor, token: Tensor, table: SequenceTable, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """hidden [T, H], of the model or of the pass before, and the token after each, int [T] -> logits [n, vocab] of
        the token after that, and hidden states [n, H] for the next pass; of `rows` (int64 [n]) alone, if given. The
        layer's cache takes every token of the table."""
        x = self._pairs(hidden, token)
        _, hidden = self.layer(x, self.layer.input_norm(x), table, self.model.rotary, rows, self.norm)
        return self.model.logits(hidden), hidden

    def remember(self, hidden: Tensor, token: Tensor, table: SequenceTable) -> None:
        """See DraftHead.remember."""
        self.attention.remember(self.layer.input_norm(self._pairs(hidden, token)), table, self.model.rotary)

    def _pairs(self, hidden: Tensor, token: Tensor) -> Tensor:
        words = self.norm_embedding(self.model.embedding(token))
        return self.fc(torch.cat((words, self.norm_hidden(hidden)), -1))

    def weights(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Weight]:
        """See Model.weights."""
        tensors = (
            self.norm_embedding.tensors("mtp.pre_fc_norm_embedding")
            | self.norm_hidden.tensors("mtp.pre_fc_norm_hidden")
            | self.fc.tensors("mtp")
            | self.norm.tensors("mtp.norm")
        )
        return as_weights(tensors) | self.layer.weights(LAYER, shapes)


class StreamMTPHead:
    """Of a model with residual streams:

    streams' = layer(fc_embedding(norm_e(embedding)) + fc_hidden(norm_h(streams))),  logits = lm_head(mix(streams'))

    with the embedding's part added to each stream, and a norm_h over all of them at once. The layer is one of indexed
    attention, without n-gram memory.
    """

    def __init__(self, model: qwen4_exp.Qwen4Exp, make: Factory) -> None:
        config, size, eps = model.config, model.config.hidden_size, model.config.rms_norm_eps
        self.model = model
        self.norm_embedding = RMSNorm(size, eps, make)
        self.norm_hidden = RMSNorm(config.hc_count * size, eps, make)
        self.fc_embedding = Linear(size, {"fc_embedding": size}, make)
        self.fc_hidden = Linear(size, {"fc_hidden": size}, make)
        self.layer = qwen4_exp.DecoderLayer(config, True, False, make)
        assert isinstance(self.layer.mixer, Attention)
        self.attention = self.layer.mixer
        self.mixer = HyperConnection(size, config.hc_count, config.hc_lowrank, eps, make, inject=False)

    def draft(
        self, hidden: Tensor, token: Tensor, table: SequenceTable, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As MTPHead.draft, with hidden states [T, streams, H] and [n, streams, H]."""
        streams, last = self.layer(self._pairs(hidden, token), None, table, self.model.rotary, rows)
        HyperConnection.leave(streams, *last)
        return self.model.embedding.logits(self.mixer.enter(streams)[0]), streams

    def remember(self, hidden: Tensor, token: Tensor, table: SequenceTable) -> None:
        """See DraftHead.remember."""
        x, _ = self.layer.around_mixer.enter(self._pairs(hidden, token))
        self.attention.remember(x, table, self.model.rotary)

    def _pairs(self, hidden: Tensor, token: Tensor) -> Tensor:
        words = self.fc_embedding(self.norm_embedding(self.model.embedding(token)))
        normed = self.norm_hidden(hidden.flatten(1)).view_as(hidden)
        return words[:, None] + self.fc_hidden(normed.flatten(0, 1)).view_as(hidden)

    def weights(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Weight]:
        """See Model.weights."""
        tensors = (
            self.norm_embedding.tensors("mtp.pre_fc_norm_embedding")
            | self.norm_hidden.tensors("mtp.pre_fc_norm_hidden")
            | self.fc_embedding.tensors("mtp")
            | self.fc_hidden.tensors("mtp")
            | self.mixer.tensors("mtp.hyper_connection_mixer")
        )
        return as_weights(tensors) | self.layer.weights(LAYER, shapes)


def add_head(model: Model, make: Factory) -> None:
    """Give `model` a head: `model.mtp`, and its attention after the model's own in `model.attention_layers`."""
    head: MTPHead | StreamMTPHead
    if isinstance(model, qwen4_exp.Qwen4Exp):
        head = StreamMTPHead(model, make)
    else:
        assert isinstance(model, residual.ResidualDecoder), model
        head = MTPHead(model, make)
    model.mtp = head
    model.attention_layers.append(head.attention)
