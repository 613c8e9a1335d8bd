"""Full attention of the hybrid models: gated output, normalised queries and keys, partial rotary, paged cache."""

from torch import Tensor

from deltagram.attention.cache import LayerCache
from deltagram.attention.indexer import Indexer
from deltagram.kernels.cache_write import cache_write
from deltagram.kernels.paged_attention import paged_attention
from deltagram.kernels.qkv_write import qkv_write
from deltagram.layers.basic import Factory, Linear, RMSNorm
from deltagram.layers.rotary import Rotary
from deltagram.step.sequences import SequenceTable, each_alone


class Attention:
    """Grouped-query attention; `q_proj` yields [query | gate] per head, and the output is multiplied by sigmoid(gate).

    `indexer`, if any, limits each token to the blocks it selects; it is left out where its budget covers every
    context the engine admits, since it then selects everything. `cache` is the layer's part of the pages, set by the
    engine.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        make: Factory,
        indexer: Indexer | None = None,
    ) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        parts = {
            "q_proj": 2 * num_heads * head_dim,
            "k_proj": num_kv_heads * head_dim,
            "v_proj": num_kv_heads * head_dim,
        }
        self.project = Linear(hidden_size, parts, make)
        self.q_norm = RMSNorm(head_dim, eps, make)
        self.k_norm = RMSNorm(head_dim, eps, make)
        self.out = Linear(num_heads * head_dim, {"o_proj": hidden_size}, make)
        self.indexer = indexer
        self.cache: LayerCache | None = None

    def __call__(self, x: Tensor, table: SequenceTable, rotary: Rotary, rows: Tensor | None = None) -> Tensor:
        """x [T, hidden] -> [T, hidden]; or [n, hidden], of `rows` (int64 [n]) alone."""
        if rows is not None and not x.is_cuda:
            return self._of_rows(x, rows, table, rotary)
        out = self.out(self.heads(x, table, rotary))
        return out if rows is None else out[rows]

    def heads(self, x: Tensor, table: SequenceTable, rotary: Rotary) -> Tensor:
        """x [T, hidden] -> [T, heads * head_dim], which `out` takes."""
        cache = self.cache
        assert cache is not None, "the layer has no pages"
        query_gate, key, value = self.project.split(x)
        query, gate = query_gate.unflatten(1, (self.num_heads, 2 * self.head_dim)).chunk(2, -1)
        query = qkv_write(
            query,
            key.unflatten(1, (self.num_kv_heads, self.head_dim)),
            value.unflatten(1, (self.num_kv_heads, self.head_dim)),
            self.q_norm.scale,
            self.k_norm.scale,
            rotary.cos,
            rotary.sin,
            table.position,
            table.cache_index,
            table.cu_tokens,
            cache.keys,
            cache.values,
            self.q_norm.eps,
        )
        sparse = self.indexer is not None and cache.index_keys is not None
        return paged_attention(
            query,
            cache.keys,
            cache.values,
            table.page_table,
            table.row,
            table.kind,
            table.cu_tokens,
            table.length,
            table.sequence,
            table.position,
            self.head_dim**-0.5,
            table.bucket.mixed,
            table.bucket.max_draft,
            self.indexer(x, table, rotary, cache) if sparse and self.indexer else None,
            self.indexer.block_size if self.indexer else 1,
            gate,
        ).flatten(1)

    def _of_rows(self, x: Tensor, rows: Tensor, table: SequenceTable, rotary: Rotary) -> Tensor:
        """Keys and values of all tokens to their pages; the others' queries are not made."""
        cache, queries = self.cache, 2 * self.num_heads * self.head_dim
        assert cache is not None, "the layer has no pages"
        asking, asked = x[rows], each_alone(table, rows)
        heads = self.project.outputs(asking, 0, queries).unflatten(1, (self.num_heads, 2 * self.head_dim))
        query, gate = heads.chunk(2, -1)
        self._keep(x, table, rotary, cache)
        sparse = self.indexer is not None and cache.index_keys is not None
        attended = paged_attention(
            rotary.normed(query, self.q_norm, asked.position),
            cache.keys,
            cache.values,
            asked.page_table,
            asked.row,
            asked.kind,
            asked.cu_tokens,
            asked.length,
            asked.sequence,
            asked.position,
            self.head_dim**-0.5,
            False,
            0,
            self.indexer(x, table, rotary, cache, (asking, asked)) if sparse and self.indexer else None,
            self.indexer.block_size if self.indexer else 1,
            gate,
        )
        return self.out(attended.flatten(1))

    def remember(self, x: Tensor, table: SequenceTable, rotary: Rotary) -> None:
        """Keys and values of x [T, hidden] to their pages, and index keys, as `__call__` brings them there."""
        assert self.cache is not None, "the layer has no pages"
        self._keep(x, table, rotary, self.cache)
        if self.indexer is not None and self.cache.index_keys is not None:
            self.indexer.remember(x, table, rotary, self.cache)

    def _keep(self, x: Tensor, table: SequenceTable, rotary: Rotary, cache: LayerCache) -> None:
        key, value = self.project.outputs(x, 2 * self.num_heads * self.head_dim, sum(self.project.sizes)).chunk(2, -1)
        key = rotary.normed(key.unflatten(1, (self.num_kv_heads, self.head_dim)), self.k_norm, table.position)
        cache_write(cache.keys, key, table.cache_index, table.cu_tokens)
        cache_write(cache.values, value, table.cache_index, table.cu_tokens)

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        named = self.project.tensors(prefix) | self.out.tensors(prefix)
        named |= self.q_norm.tensors(f"{prefix}.q_norm") | self.k_norm.tensors(f"{prefix}.k_norm")
        return named | (self.indexer.tensors(f"{prefix}.indexer") if self.indexer else {})
