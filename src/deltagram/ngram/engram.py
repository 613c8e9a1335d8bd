"""DeepSeek-V4.1's memory layer, usable on its own: rows, their projection to keys and a value, and the gate."""

import torch
from torch import Tensor

from deltagram.kernels.engram_fuse import engram_fuse
from deltagram.layers.basic import Factory, Linear
from deltagram.ngram.stores import RowStore

BLOCK = 32  # side of the squares of an fp8 weight that share a scale


class EngramProjection:
    """Rows to one key a residual stream and one value: the part of the layer that runs ahead."""

    def __init__(self, num_inputs: int, hidden_size: int, num_streams: int, make: Factory) -> None:
        self.num_streams, self.hidden_size, self.dtype = num_streams, hidden_size, make.dtype
        self.wkv = Linear(num_inputs, {"wkv": (num_streams + 1) * hidden_size}, make)

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """rows [T, columns, dim] -> keys [T, streams, H], value [T, H]: views of one tensor."""
        projected = self.wkv(rows.flatten(1))
        keys = self.num_streams * self.hidden_size
        return projected[:, :keys].unflatten(1, (self.num_streams, self.hidden_size)), projected[:, keys:]


class EngramLayer:
    """Lets each token's memory into its residual streams as far as it agrees with them: kernels/engram_fuse.py.

    store: the layer's table, of whose rows a token reads `num_columns`. The tables' hash is ngram/spec.py's.
    """

    def __init__(
        self, hidden_size: int, num_streams: int, num_columns: int, eps: float, make: Factory, store: RowStore
    ) -> None:
        self.eps, self.store = eps, store
        self.projection = EngramProjection(num_columns * store.format.dim, hidden_size, num_streams, make)
        self.q_weight = make.empty(num_streams, hidden_size, dtype=torch.float32)
        self.k_weight = make.empty(num_streams, hidden_size, dtype=torch.float32)
        self._weight: Tensor | None = None

    def __call__(self, hidden: Tensor, hashes: Tensor, live: Tensor | None = None) -> Tensor:
        """hidden [T, streams, H], hashes int64 [T, columns] -> [T, streams, H]. live: bool [T], False for tokens that
        take no memory (image spans, padding)."""
        rows = self.store.lookup(hashes, self.projection.dtype)
        return self.fuse(hidden, *self.projection(rows), live)

    def fuse(self, hidden: Tensor, key: Tensor, value: Tensor, live: Tensor | None = None) -> Tensor:
        """The layer after its projection, which needs the hidden states."""
        if self._weight is None:  # made once, after loading
            self._weight = self.q_weight * self.k_weight
        return engram_fuse(hidden, key, value, self._weight, self.eps, live)

    def load(self, wkv: Tensor, wkv_scale: Tensor | None, q_weight: Tensor, k_weight: Tensor) -> None:
        """Take the checkpoint's weights. An fp8 `wkv` needs its scales, one a square of BLOCK; see `dequantize`."""
        if (wkv_scale is not None) != (wkv.dtype == torch.float8_e4m3fn):
            raise ValueError(f"wkv is {wkv.dtype} and its scales are {'missing' if wkv_scale is None else 'there'}")
        weight = self.projection.wkv.weight
        weight.copy_(wkv if wkv_scale is None else dequantize(wkv, wkv_scale, weight.dtype))
        self.q_weight.copy_(q_weight)
        self.k_weight.copy_(k_weight)
        self._weight = None

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Where an unquantised checkpoint's weights go."""
        return {
            f"{prefix}.wkv.weight": self.projection.wkv.weight,
            f"{prefix}.q_weight": self.q_weight,
            f"{prefix}.k_weight": self.k_weight,
        }


def dequantize(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """An fp8 weight [N, K] times its scales [N / BLOCK, K / BLOCK], of ue8m0 or fp32, as `dtype`.

    Exact in bf16 for ue8m0 scales but for underflow: an e4m3 number has four significant bits, and a power of two adds
    none.
    Raises ValueError for scales of another shape and for scales that are none.
    """
    expected = [-(-size // BLOCK) for size in weight.shape]
    if list(scale.shape) != expected:
        raise ValueError(f"the scales of a weight {list(weight.shape)} are {list(scale.shape)}; expected {expected}")
    factors = scale.float()
    if not bool(factors.isfinite().all()):
        raise ValueError(f"{int((~factors.isfinite()).sum())} of {factors.numel()} scales are not finite")
    spread = factors.repeat_interleave(BLOCK, 0)[: weight.shape[0]].repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
    return (weight.float() * spread).to(dtype)
