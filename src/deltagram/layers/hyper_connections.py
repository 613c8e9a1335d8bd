"""Hyper-connections: several residual streams, mixed into a block's input and fed back by learned, token-wise
weights."""

from torch import Tensor

from deltagram.kernels.hyper_add import hyper_add
from deltagram.kernels.hyper_mix import hyper_mix
from deltagram.layers.basic import Factory, Linear, RMSNorm


class HyperConnection:
    """Around a block, with X the streams [T, streams, H] and N their grouped norm:

        input  = mean over streams of sigmoid(up(silu(down(N) / streams))) * N
        inject = 2 sigmoid(block_inject(N) / streams)                     [T, streams]
        X     += inject * block(input)

    Without `inject` it is the mixer that ends the model. Source: Qwen4-Exp; Hyper-Connections, https://arxiv.org/abs/2409.19606.
    """

    def __init__(
        self, hidden_size: int, num_streams: int, rank: int, eps: float, make: Factory, inject: bool = True
    ) -> None:
        flat = num_streams * hidden_size
        self.norm = RMSNorm(hidden_size, eps, make, groups=num_streams)
        parts = {"input_mix_weight_down": rank} | ({"block_inject_weight": num_streams} if inject else {})
        self.down = Linear(flat, parts, make)
        self.up = Linear(rank, {"input_mix_weight_up": flat}, make)

    def enter(self, streams: Tensor, inject: Tensor | None = None, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """streams [T, streams, H] -> the block's input [T, H] and its injection weights [T, streams].

        `inject` and `out` are those of the block before, if it has yet to leave.
        """
        return hyper_mix(streams, self.norm.scale, self.down.matrix, self.up.matrix, self.norm.eps, inject, out)

    @staticmethod
    def leave(streams: Tensor, inject: Tensor, out: Tensor) -> None:
        """Add a block's output [T, H] to the streams, in place."""
        hyper_add(streams, inject, out)

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        return self.norm.tensors(f"{prefix}.hc_norm") | self.down.tensors(prefix) | self.up.tensors(prefix)
