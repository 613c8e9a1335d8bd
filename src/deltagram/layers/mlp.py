"""Gated MLPs: dense, and a mixture of experts with a shared one."""

from torch import Tensor

from deltagram.kernels.gated_mlp import gated_mlp, gated_mlp_onto
from deltagram.kernels.moe import moe
from deltagram.layers.basic import Factory, Linear, RMSNorm, Weight


class MLP:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int, make: Factory) -> None:
        self.gate_up = Linear(hidden_size, {"gate_proj": intermediate_size, "up_proj": intermediate_size}, make)
        self.down = Linear(intermediate_size, {"down_proj": hidden_size}, make)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        return gated_mlp(x, self.gate_up.matrix, self.down.matrix)

    def onto(self, residual: Tensor, x: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """residual [T, H], which is used up, x [T, H] -> their sum, [T, H], and `norm` of it."""
        return gated_mlp_onto(residual, x, self.gate_up.matrix, self.down.matrix, norm.fused)

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        return self.gate_up.tensors(prefix) | self.down.tensors(prefix)


class MoE:
    """The `top_k` experts a token's router likes best, weighed by its softmax, plus a shared expert behind a sigmoid
    gate."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        intermediate_size: int,
        shared_size: int,
        renormalise: bool,
        make: Factory,
    ) -> None:
        self.num_experts, self.top_k, self.renormalise = num_experts, top_k, renormalise
        self.router = Linear(hidden_size, {"gate": num_experts, "shared_expert_gate": 1}, make)
        self.gate_up = Weight(make, num_experts, 2 * intermediate_size, hidden_size)
        self.down = Weight(make, num_experts, hidden_size, intermediate_size)
        self.shared = MLP(hidden_size, shared_size, make)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [T, H] -> [T, H], added to `residual`."""
        return moe(
            x,
            self.router.matrix,
            self.gate_up.matrix,
            self.down.matrix,
            self.shared.gate_up.matrix,
            self.shared.down.matrix,
            self.top_k,
            self.renormalise,
            residual,
        )

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Names of the packed layout; `unpacked` gives the other one."""
        experts = {"gate_up_proj": self.gate_up.tensor, "down_proj": self.down.tensor}
        return self._common(prefix) | {f"{prefix}.experts.{name}": tensor for name, tensor in experts.items()}

    def unpacked(self, prefix: str) -> dict[str, Tensor]:
        """Names of the layout with one tensor an expert and projection."""
        named = self._common(prefix)
        for e in range(self.num_experts):
            gate, up = self.gate_up.tensor[e].chunk(2)
            parts = {"gate_proj": gate, "up_proj": up, "down_proj": self.down.tensor[e]}
            named |= {f"{prefix}.experts.{e}.{name}.weight": tensor for name, tensor in parts.items()}
        return named

    def _common(self, prefix: str) -> dict[str, Tensor]:
        return self.router.tensors(prefix) | self.shared.tensors(f"{prefix}.shared_expert")
