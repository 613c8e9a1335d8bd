"""LongCat's n-gram embedding: a mean of the word's embedding and the n-grams', in place of the word's alone."""

import torch.nn.functional as F
from torch import Tensor

from deltagram.layers.basic import Factory


class LongCatEmbedding:
    """out = (word + sum over columns c of projection_c(row_c)) / (1 + columns).

    The projections stand side by side in one weight [H, columns * dim], so that their sum is one product. `scale_word`
    False leaves the word undivided, as the Sparse variant does. Source: LongCat-Flash-Lite's published rules.
    """

    def __init__(
        self, hidden_size: int, num_columns: int, row_dim: int, make: Factory, scale_word: bool = True
    ) -> None:
        self.num_columns, self.row_dim, self.scale_word = num_columns, row_dim, scale_word
        self.weight = make.empty(hidden_size, num_columns * row_dim)

    def __call__(self, words: Tensor, rows: Tensor) -> Tensor:
        """words [T, H], rows [T, columns, dim] -> [T, H]."""
        memory, share = F.linear(rows.flatten(1), self.weight), 1 / (1 + self.num_columns)
        return (words + memory) * share if self.scale_word else words + memory * share

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Where the checkpoint's projections go."""
        parts = self.weight.split(self.row_dim, 1)
        return {f"{prefix}.post_projs.{column}.weight": part for column, part in enumerate(parts)}
