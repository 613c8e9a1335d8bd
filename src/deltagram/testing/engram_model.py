"""A Qwen3.5 model with DeepSeek's Engram layers before some of its own: no published checkpoint is one, so it has
random weights. For benchmarks of memory beside a model's own work, and tests."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deltagram.layers.basic import Factory
from deltagram.models.base import as_weights
from deltagram.models.config import Qwen35Config
from deltagram.models.qwen3_5 import Qwen35
from deltagram.models.qwen4_exp import IN_DEVICE
from deltagram.models.weights import Weight
from deltagram.ngram.engram import EngramLayer
from deltagram.ngram.formats import RowFormat
from deltagram.ngram.placement import Placement, make_store, table_of
from deltagram.ngram.run_ahead import RunAhead
from deltagram.ngram.spec import HashSpec, engram_specs
from deltagram.step.history import TokenHistory
from deltagram.step.sequences import SequenceTable
from deltagram.testing.shapes import qwen3_5_config, randomise

ROWS = RowFormat(torch.float8_e4m3fn, 256, group=32)  # DeepSeek-V4.1's, 264 bytes
BASE = 2_040_000  # rows of a column, at least: 24 of them are 12 GiB
PIECE = 1 << 22  # rows filled at a time


def memory_specs(vocab_size: int, layers: Sequence[int], base: int = BASE) -> list[HashSpec]:
    """DeepSeek-V4.1's hashes for `layers`: orders 2 to 4, 8 heads, from `base` rows a column on. Its token map is
    another tokenizer's; this one sends five ids to each two."""
    compressed = -(-vocab_size * 2 // 5)
    return engram_specs(
        token_map=[token % compressed for token in range(vocab_size)],
        compressed_vocab_size=compressed,
        pad_token=2,
        max_order=4,
        heads=8,
        base=base,
        layers=layers,
        num_rows=[24 * (base + 2000)] * len(layers),
    )


class EngramModel(Qwen35):
    """Qwen3.5 with an Engram layer before each of the layers `before`, whose hashes are `specs`.

    The layer adds to several residual streams; here they are all the one there is, and their mean takes its place.
    Rows have `form`, and live where `placement` says.
    """

    def __init__(
        self,
        config: Qwen35Config,
        max_context: int,
        make: Factory,
        before: Sequence[int],
        specs: Sequence[HashSpec],
        form: RowFormat = ROWS,
        num_streams: int = 4,
        placement: Placement = IN_DEVICE,
    ) -> None:
        super().__init__(config, max_context, make)
        self.specs, self.num_streams = list(specs), num_streams
        self.stores = [make_store(placement, spec.num_rows, form, make.device) for spec in specs]
        size, eps = config.hidden_size, config.rms_norm_eps
        made = [
            EngramLayer(size, num_streams, spec.num_columns, eps, make, store)
            for spec, store in zip(specs, self.stores, strict=True)
        ]
        self.engrams = dict(zip(before, made, strict=True))
        projections: list[Any] = [engram.projection for engram in made]  # used as a MemoryProjection is
        self.run_ahead = RunAhead(list(before), self.specs, self.stores, projections, make.device)

    def forward(self, table: SequenceTable, history: TokenHistory, rows: Tensor | None = None) -> Tensor:
        assert self.run_ahead is not None
        x = self.embedding(table.token)
        normed = self.norms[0](x)
        try:
            self.run_ahead.start(table, history)
            for i, layer in enumerate(self.layers):
                if i in self.engrams:
                    streams = x[:, None].expand(-1, self.num_streams, -1).contiguous()
                    x = self.engrams[i].fuse(streams, *self.run_ahead.take(i)).mean(1)
                    normed = self.norms[i](x)  # in place of that before the memory
                wanted = rows if layer is self.layers[-1] else None
                x, normed = layer(x, normed, table, self.rotary, wanted, self.norms[i + 1])
        finally:
            self.run_ahead.finish()
        return normed

    def weights(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Weight]:
        plan = super().weights(shapes)
        for i, engram in self.engrams.items():
            plan |= as_weights(engram.tensors(f"model.layers.{i}.engram"))
        return plan

    def fill(self, seed: int = 0) -> None:
        """Random weights, and random rows, each a number."""
        randomise(self, seed)
        for store in self.stores:
            device_store = table_of(store)
            assert device_store is not None, "rows on disk are the checkpoint's"
            fill_rows(device_store.table, store.format, device_store.device, seed)


def fill_rows(table: Tensor, form: RowFormat, device: torch.device, seed: int = 0) -> None:
    """Random fp8 values below 2 in magnitude with scales of 2^-7 to 1 into `table`, uint8 [rows, row_bytes], which may
    lie in host memory: the numbers are drawn on `device`."""
    generator = torch.Generator(device).manual_seed(seed)
    for piece in table.split(PIECE):
        drawn = torch.randint(0, 256, piece.shape, dtype=torch.uint8, device=device, generator=generator)
        drawn[:, : form.value_bytes] &= 0xBF
        drawn[:, form.value_bytes :] &= 7
        drawn[:, form.value_bytes :] += 120
        piece.copy_(drawn)


def engram_4b(
    max_context: int,
    device: torch.device,
    placement: Placement = IN_DEVICE,
) -> EngramModel:
    """The 4B shape in bf16 with memory before layers 2 and 15: tables of 24.1 GiB in all, random."""
    config = qwen3_5_config("4B")
    specs = memory_specs(config.vocab_size, [1, 14])
    make = Factory(device, torch.bfloat16)
    model = EngramModel(config, max_context, make, [2, 15], specs, placement=placement)
    model.fill()
    return model
