"""The QSA indexer of Qwen4-Exp: which blocks of past tokens an attention layer looks at."""

from torch import Tensor

from deltagram.attention.cache import LayerCache
from deltagram.kernels.cache_write import cache_write
from deltagram.kernels.pool_blocks import pool_blocks
from deltagram.kernels.select_blocks import select_blocks
from deltagram.layers.basic import Factory, Linear, RMSNorm
from deltagram.layers.rotary import Rotary
from deltagram.step.sequences import SequenceTable


class Indexer:
    """Scores complete blocks of `block_size` tokens against small queries and picks the `top_k` best for each token.

    A block's key is the fp32 mean of its tokens' raw keys, normalised and turned to the block's first position. It is
    pooled by the step that brings the block's last token. A rejected draft may have pooled a block too early; the
    token that takes its place pools it again before any query can see it.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, head_dim: int, budget: int, block_size: int, eps: float, make: Factory
    ) -> None:
        self.num_heads, self.head_dim = num_heads, head_dim
        self.budget, self.block_size, self.top_k = budget, block_size, budget // block_size
        self.project = Linear(hidden_size, {"index_qk_proj": (num_heads + 1) * head_dim}, make)
        self.q_norm = RMSNorm(head_dim, eps, make)
        self.k_norm = RMSNorm(head_dim, eps, make)

    def __call__(
        self,
        x: Tensor,
        table: SequenceTable,
        rotary: Rotary,
        cache: LayerCache,
        asking: tuple[Tensor, SequenceTable] | None = None,
    ) -> Tensor | None:
        """x [T, hidden] -> int32 [T, top_k], the chosen blocks; None on a CPU where the step's contexts have no more
        blocks than are chosen: on a GPU the kernels see that for themselves, token by token.

        The cache takes the tokens' index keys either way. `asking`: the rows of x that are asked for, and their table.
        """
        assert cache.block_keys is not None
        queries = self.num_heads * self.head_dim
        if asking is None:
            projected, asked = self.project(x), table
            keys = projected[:, queries:]
        else:
            projected, asked = self.project.outputs(asking[0], 0, queries), asking[1]
            keys = self.project.outputs(x, queries, queries + self.head_dim)
        self._keep(keys, table, rotary, cache)
        if not x.is_cuda and int(table.length.max()) // self.block_size <= self.top_k:
            return None
        return select_blocks(
            rotary.normed(projected[:, :queries].unflatten(1, (-1, self.head_dim)), self.q_norm, asked.position),
            cache.block_keys,
            asked.page_table,
            asked.row,
            asked.cu_tokens,
            asked.length,
            asked.position,
            self.block_size,
            self.top_k,
        )

    def remember(self, x: Tensor, table: SequenceTable, rotary: Rotary, cache: LayerCache) -> None:
        """The index keys of x [T, hidden] to their pages; nothing is chosen."""
        queries = self.num_heads * self.head_dim
        self._keep(self.project.outputs(x, queries, queries + self.head_dim), table, rotary, cache)

    def _keep(self, keys: Tensor, table: SequenceTable, rotary: Rotary, cache: LayerCache) -> None:
        assert cache.index_keys is not None and cache.block_keys is not None
        cache_write(cache.index_keys, keys, table.cache_index, table.cu_tokens)
        pool_blocks(
            cache.index_keys,
            cache.block_keys,
            self.k_norm.scale,
            rotary.cos,
            rotary.sin,
            table.position,
            table.cache_index,
            table.cu_tokens,
            self.block_size,
            self.k_norm.eps,
        )

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        return (
            self.project.tensors(prefix)
            | self.q_norm.tensors(f"{prefix}.q_layernorm")
            | self.k_norm.tensors(f"{prefix}.k_layernorm")
        )
