"""The chain of every memory layer, which depends on token ids alone: hash, row lookup, key and value projection.

`start` begins the chains at the start of a step and `take` hands a layer what its own chain made. Here the hashes of
all layers are made at once, and each layer's rows when it asks for them.
"""

import torch
from torch import Tensor

from deltagram.ngram.disk import DiskStore
from deltagram.ngram.layer import MemoryProjection
from deltagram.ngram.spec import HashConstants, HashSpec
from deltagram.ngram.stores import RowStore
from deltagram.step.history import TokenHistory
from deltagram.step.sequences import SequenceTable


class RunAhead:
    """The chains of a model's memory layers; `layers` names them in the order of `specs`, `stores` and
    `projections`."""

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
        self.constants = HashConstants.of(specs, device)
        self._ids: Tensor | None = None

    def start(self, table: SequenceTable, history: TokenHistory) -> None:
        """Hash the step's tokens for every layer."""
        assert self._ids is None, "the last step's chains were not finished"
        self._ids = self.constants.ids(history.tokens, table.sequence, table.row, table.position)

    def take(self, layer: int) -> tuple[Tensor, Tensor]:
        """The keys and the value of model layer `layer`: see MemoryProjection."""
        assert self._ids is not None, "take before start"
        i = self.order[layer]
        projection = self.projections[i]
        return projection(self.stores[i].lookup(self._ids[i], projection.dtype))

    def finish(self) -> None:
        """End the step: chains that no layer took are dropped."""
        self._ids = None

    def check(self) -> None:
        """After a captured step: raises HelperError if a chain went without its rows, which makes the step void."""
        for store in self.stores:
            below = getattr(store, "below", store)
            if isinstance(below, DiskStore) and below.in_graphs is not None:
                below.in_graphs.check()
