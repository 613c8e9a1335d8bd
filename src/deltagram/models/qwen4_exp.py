"""Qwen4-Exp: n-gram memory, Gated DeltaNet and indexed attention, experts, on several residual streams."""

from collections.abc import Mapping

import torch
from torch import Tensor

from deltagram.attention.indexer import Indexer
from deltagram.attention.layer import Attention
from deltagram.gdn.layer import GatedDeltaNet
from deltagram.layers.basic import Factory
from deltagram.layers.hyper_connections import HyperConnection
from deltagram.layers.rotary import Rotary
from deltagram.models.base import DraftHead, Embedding, as_weights, experts, experts_weights, is_full, linear_attention
from deltagram.models.config import Qwen4ExpConfig
from deltagram.models.weights import Weight, rows_of
from deltagram.ngram.checkpoint import TensorInfo, qwen4_exp_table, read_scale
from deltagram.ngram.formats import RowFormat
from deltagram.ngram.holding import Holding
from deltagram.ngram.layer import PLELayer
from deltagram.ngram.placement import Placement, make_store, table_of
from deltagram.ngram.run_ahead import RunAhead
from deltagram.ngram.sharding import slice_segments
from deltagram.ngram.spec import HashSpec, qwen4_exp_spec
from deltagram.ngram.stores import RowStore
from deltagram.step.history import TokenHistory
from deltagram.step.sequences import SequenceTable

IN_DEVICE = Placement("device")
Block = tuple[Tensor, Tensor]  # injection weights [T, streams] and output [T, H] of a block that has yet to leave


class DecoderLayer:
    """Memory (where the layer has one) added to the streams, then mixer and experts, each between hyper-connections."""

    def __init__(self, config: Qwen4ExpConfig, full: bool, memory: bool, make: Factory) -> None:
        eps, hidden = config.rms_norm_eps, config.hidden_size
        self.memory: PLELayer | None = None
        if memory:
            sizes = config.ple_embed_dim, hidden, config.hc_count, config.ple_conv_kernel_size, config.ngram_size
            self.memory = PLELayer(*sizes, eps, make)
        self.mixer: Attention | GatedDeltaNet
        if full:
            index = (
                config.indexer_n_heads,
                config.indexer_head_dim,
                config.indexer_budget,
                config.indexer_compress_ratio,
            )
            heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
            self.mixer = Attention(hidden, *heads, eps, make, Indexer(hidden, *index, eps, make))
        else:
            self.mixer = linear_attention(config, make)
        self.around_mixer = HyperConnection(hidden, config.hc_count, config.hc_lowrank, eps, make)
        self.around_experts = HyperConnection(hidden, config.hc_count, config.hc_lowrank, eps, make)
        self.experts = experts(config, make)

    def __call__(
        self, streams: Tensor, last: Block | None, table: SequenceTable, rotary: Rotary, rows: Tensor | None
    ) -> tuple[Tensor, Block]:
        """The streams, updated in place but for the experts' output, which is returned as `last` was given: whoever
        reads the streams next adds it. Past the mixer only `rows` go on, if given."""
        x, inject = self.around_mixer.enter(streams, *(last or ()))
        if isinstance(self.mixer, Attention):
            out = self.mixer(x, table, rotary, rows=rows)
        else:
            out = self.mixer(x, table)
            out = out if rows is None else out[rows]
        if rows is not None:
            streams, inject = streams[rows], inject[rows]
        x, inject = self.around_experts.enter(streams, inject, out)
        return streams, (inject, self.experts(x))

    def weights(self, prefix: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Weight]:
        """See Model.weights."""
        tensors = (
            self.around_mixer.tensors(f"{prefix}.attn_hyper_connection")
            | self.mixer.tensors(f"{prefix}.{'self_attn' if isinstance(self.mixer, Attention) else 'linear_attn'}")
            | self.around_experts.tensors(f"{prefix}.mlp_hyper_connection")
            | (self.memory.tensors(f"{prefix}.ple") if self.memory else {})
        )
        return as_weights(tensors) | experts_weights(self.experts, f"{prefix}.mlp", shapes)


class Qwen4Exp:
    """The Qwen4-Exp text model: see models/base.py for what the engine asks of it.

    Tables keep `table_dtype`, the checkpoint's own, whatever the model computes in: a bf16 row in fp32 is the same row.
    They live where `placement` says; `disk` reads them from the checkpoint's `tensors`, which it needs. `holding` says
    what of them this process has, all if None.
    """

    def __init__(
        self,
        config: Qwen4ExpConfig,
        max_context: int,
        make: Factory,
        table_dtype: torch.dtype,
        placement: Placement = IN_DEVICE,
        tensors: Mapping[str, TensorInfo] | None = None,
        holding: Holding | None = None,
    ) -> None:
        self.config, self.holding = config, holding
        self.embedding = Embedding(config, make)
        self.layers = [
            DecoderLayer(config, is_full(config, i), i + 1 in config.ple_layer_ids, make)
            for i in range(config.num_hidden_layers)
        ]
        self.mixer = HyperConnection(
            config.hidden_size, config.hc_count, config.hc_lowrank, config.rms_norm_eps, make, inject=False
        )
        self.rotary = Rotary(config.rope, config.rotary_dim, max_context, make.device)
        self.linear_layers = [layer.mixer for layer in self.layers if isinstance(layer.mixer, GatedDeltaNet)]
        self.attention_layers = [layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention)]
        self.memory_layers = [layer.memory for layer in self.layers if layer.memory is not None]
        self.mtp: DraftHead | None = None
        self.block_size = config.indexer_compress_ratio if self.attention_layers else 1
        self.specs = [hash_spec(config, index) for index in range(len(config.ple_layer_ids))]
        self.stores = [
            memory_store(config, index, table_dtype, make.device, placement, tensors, holding)
            for index in range(len(self.specs))
        ]
        self.run_ahead: RunAhead | None = None
        if self.specs:
            layers = [layer_id - 1 for layer_id in config.ple_layer_ids]
            projections = [memory.projection for memory in self.memory_layers]
            self.run_ahead = RunAhead(layers, self.specs, self.stores, projections, make.device)

    def forward(self, table: SequenceTable, history: TokenHistory, rows: Tensor | None = None) -> Tensor:
        streams = self.embedding(table.token, self.config.hc_count)  # [T, streams, H]
        last: Block | None = None
        try:
            if self.run_ahead is not None:
                self.run_ahead.start(table, history)
            for i, layer in enumerate(self.layers):
                if layer.memory is not None and self.run_ahead is not None:
                    if last is not None:
                        HyperConnection.leave(streams, *last)
                        last = None
                    layer.memory(streams, *self.run_ahead.take(i), table)
                wanted = rows if layer is self.layers[-1] else None
                streams, last = layer(streams, last, table, self.rotary, wanted)
        finally:
            if self.run_ahead is not None:
                self.run_ahead.finish()
        if last is not None:
            HyperConnection.leave(streams, *last)
        return streams

    def logits(self, hidden: Tensor) -> Tensor:
        return self.embedding.logits(self.mixer.enter(hidden)[0])

    def check_scales(self) -> None:
        """Raises ValueError for a table whose loaded scale is no scale: every row of it would be wrong."""
        for layer, store in zip(self.config.ple_layer_ids, self.stores, strict=True):
            scale: Tensor | None = getattr(store, "scale", None)
            if scale is not None and not (0 < float(scale) < float("inf")):
                name = f"model.layers.{layer - 1}.ple.ple_embedding.ngram_embedding.weight_scale"
                raise ValueError(f"{name} is {float(scale)}; expected a positive number")

    def weights(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Weight]:
        plan = self.embedding.weights() | as_weights(self.mixer.tensors("model.hyper_connection_mixer"))
        for i, layer in enumerate(self.layers):
            plan |= layer.weights(f"model.layers.{i}", shapes)
        for index, layer_id in enumerate(self.config.ple_layer_ids):
            prefix = f"model.layers.{layer_id - 1}.ple.ple_embedding"
            store, spec = self.stores[index], self.specs[index]
            plan |= table_parts(f"{prefix}.ngram_embedding", store, spec, shapes, self.config, self.holding)
            plan |= constants(prefix, self.specs[index])
        return plan


def hash_spec(config: Qwen4ExpConfig, index: int) -> HashSpec:
    """The hash of the `index`-th memory layer (from 0)."""
    return qwen4_exp_spec(
        vocab_size=config.vocab_size,
        max_order=config.ngram_size,
        heads=config.heads_per_ngram,
        base=config.ngram_vocab_size_base,
        divisor=config.make_ngram_vocab_size_divisible_by,
        seed=config.seed,
        end_of_sequence=config.eos_token_ids[0],
        layer=index,
    )


def constants(prefix: str, spec: HashSpec) -> dict[str, Weight]:
    """The hash constants a checkpoint may carry: they must be the ones its config implies, or its rows mean other
    n-grams."""
    names = {
        "layer_multipliers": spec.multipliers,
        "ngram_heads_vocab_sizes": spec.moduli,
        "ngram_heads_offsets": spec.offsets,
    }
    return {
        f"{prefix}.{name}": Weight(None, optional=True, expected=torch.tensor(values)) for name, values in names.items()
    }


def memory_store(
    config: Qwen4ExpConfig,
    index: int,
    dtype: torch.dtype,
    device: torch.device,
    placement: Placement,
    tensors: Mapping[str, TensorInfo] | None,
    holding: Holding | None,
) -> RowStore:
    """The store of what this process has of the `index`-th memory layer's table."""
    spec = hash_spec(config, index)
    rows = holding.rows(spec) if holding else range(spec.num_rows)
    dim = config.ple_embed_dim // spec.num_columns
    form = RowFormat(dtype, dim, table_scale=dtype == torch.float8_e4m3fn)
    if placement.kind != "disk":
        return make_store(placement, len(rows), form, device, writer=holding.writer if holding else None)
    assert tensors is not None, "a table on disk needs the checkpoint"
    layer = config.ple_layer_ids[index] - 1
    source = qwen4_exp_table(spec, layer, dim, config.split_ngram_parts, tensors)
    scale = read_scale(source)
    scale = None if scale is None else scale.to(device)
    return make_store(placement, len(rows), source.format, device, slice_segments(source.segments, rows), scale)


def table_parts(
    prefix: str,
    store: RowStore,
    spec: HashSpec,
    shapes: Mapping[str, tuple[int, ...]],
    config: Qwen4ExpConfig,
    holding: Holding | None,
) -> dict[str, Weight]:
    """The table's rows under the checkpoint's names: whole, or in up to `split_ngram_parts` consecutive shards; and its
    scale, which an fp8 table must have. Rows that stay on disk, or that another process loads, are known and not
    loaded."""
    even = -(-spec.num_rows // config.split_ngram_parts)
    names = [f"{prefix}.shard_{i}.weight" for i in range(-(-spec.num_rows // even))]
    if f"{prefix}.weight" in shapes:
        even, names = spec.num_rows, [f"{prefix}.weight"]
    table, scale = table_of(store), f"{prefix}.weight_scale"
    if table is None or (holding is not None and holding.writer is not None):
        return {name: Weight() for name in (*names, *([scale] if store.format.table_scale else []))}
    rows = holding.rows(spec) if holding else range(spec.num_rows)
    plan = {}
    for first, name in zip(range(0, spec.num_rows, even), names, strict=True):
        plan[name] = rows_of(table.values, rows, first, min(even, spec.num_rows - first))
    if table.scale is not None:
        plan[scale] = Weight(table.scale.view(shapes.get(scale, (1,))))
    return plan
