"""The chain of every memory layer, which depends on token ids alone: hash, row lookup, key and value projection.

`start` begins the chains at the start of a step and `take` hands a layer what its own chain made. Here the hashes of all
layers are made at once, and each layer's rows when it asks for them.
"""

import torch
from torch import Tensor

from deltagram.kernels.ngram_hash import ngram_hash
from deltagram.ngram.layer import MemoryProjection
from deltagram.ngram.spec import HashSpec
from deltagram.ngram.stores import RowStore
from deltagram.step.history import TokenHistory
from deltagram.step.sequences import SequenceTable


class RunAhead:
    """The chains of a model's memory layers; `layers` names them in the order of `specs`, `stores` and `projections`."""

    def __init__(
        self,
        layers: list[int],
        specs: list[HashSpec],
        stores: list[RowStore],
        projections: list[MemoryProjection],
        device: torch.device,
    ) -> None:
        assert len(layers) == len(specs) == len(stores) == len(projections)
        self.order = {layer: i for i, layer in enumerate(layers)}
        self.stores, self.projections = stores, projections
        self.fill, self.end_of_sequence = specs[0].fill, specs[0].end_of_sequence
        self.num_columns = specs[0].num_columns
        constants = [[getattr(spec, name) for spec in specs] for name in ("multipliers", "moduli", "offsets")]
        host = [torch.tensor(rows, dtype=torch.int64) for rows in constants]
        self.multipliers, self.moduli, self.offsets = (rows.to(device) for rows in host)
        self._ids: Tensor | None = None

    def start(self, table: SequenceTable, history: TokenHistory) -> None:
        """Hash the step's tokens for every layer."""
        assert self._ids is None, "the last step's chains were not finished"
        row = torch.where(table.sequence >= 0, table.row[table.sequence.long()], -1)
        self._ids = ngram_hash(
            history.tokens,
            row,
            table.position,
            self.multipliers,
            self.moduli,
            self.offsets,
            self.fill,
            self.end_of_sequence,
        )

    def take(self, layer: int) -> tuple[Tensor, Tensor]:
        """The keys and the value of model layer `layer`: see MemoryProjection."""
        assert self._ids is not None, "take before start"
        i = self.order[layer]
        projection = self.projections[i]
        return projection(self.stores[i].lookup(self._ids[i], projection.dtype))

    def finish(self) -> None:
        """End the step: chains that no layer took are dropped."""
        self._ids = None
