"""Gated MLPs: dense, and a mixture of experts with a shared one."""

import torch
import torch.nn.functional as F
from torch import Tensor

from deltagram.layers.basic import Factory, Linear


class MLP:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int, make: Factory) -> None:
        self.gate_up = Linear(hidden_size, {"gate_proj": intermediate_size, "up_proj": intermediate_size}, make)
        self.down = Linear(intermediate_size, {"down_proj": hidden_size}, make)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up.split(x)
        return self.down(F.silu(gate).mul_(up))

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        return self.gate_up.tensors(prefix) | self.down.tensors(prefix)


class MoE:
    """The `top_k` experts a token's router likes best, weighed by its softmax, plus a shared expert behind a sigmoid gate."""

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
        self.gate_up = make.empty(num_experts, 2 * intermediate_size, hidden_size)
        self.down = make.empty(num_experts, hidden_size, intermediate_size)
        self.shared = MLP(hidden_size, shared_size, make)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        scores, shared_gate = self.router.split(x)
        if self.renormalise:  # a softmax over the chosen ones is the renormalised softmax over all
            chosen, expert = scores.float().topk(self.top_k, -1)
            weight = chosen.softmax(-1)
        else:
            weight, expert = scores.float().softmax(-1).topk(self.top_k, -1)
        out = self.shared(x) * shared_gate.sigmoid()
        if len(x) == 1:
            return self._one_token(x, weight, expert, out)
        if self.num_experts <= expert.numel() <= 4 * self.num_experts:
            return self._all_experts(x, weight.to(x.dtype), expert, out)
        return self._by_expert(x, weight.to(x.dtype), expert, out)

    def _one_token(self, x: Tensor, weight: Tensor, expert: Tensor, out: Tensor) -> Tensor:
        """The experts of a single token, one after the other: nothing to sort."""
        for e, scale in zip(expert[0].tolist(), weight[0].tolist(), strict=True):
            gate, up = F.linear(x, self.gate_up[e]).chunk(2, -1)
            out = torch.addmm(out, F.silu(gate).mul_(up), self.down[e].t(), alpha=scale)
        return out

    def _by_expert(self, x: Tensor, weight: Tensor, expert: Tensor, out: Tensor) -> Tensor:
        """Many tokens: each expert takes its own."""
        order = expert.flatten().argsort(stable=True)
        token = order // self.top_k
        scale = weight.flatten().index_select(0, order)[:, None]
        inputs = x.index_select(0, token)
        first = 0
        for e, size in enumerate(torch.bincount(expert.flatten(), minlength=self.num_experts).tolist()):
            if size == 0:
                continue
            part = slice(first, first + size)
            gate, up = F.linear(inputs[part], self.gate_up[e]).chunk(2, -1)
            out.index_add_(0, token[part], F.linear(F.silu(gate).mul_(up).mul_(scale[part]), self.down[e]))
            first += size
        return out

    def _all_experts(self, x: Tensor, weight: Tensor, expert: Tensor, out: Tensor) -> Tensor:
        """A few tokens that choose about every expert: all through all of them, with weight zero where not chosen."""
        scale = x.new_zeros(len(x), self.num_experts).scatter_(1, expert, weight)
        gate, up = F.linear(x, self.gate_up.flatten(0, 1)).view(len(x), self.num_experts, -1).chunk(2, -1)
        hidden = F.silu(gate).mul_(up).mul_(scale[..., None])
        return out + torch.bmm(hidden.transpose(0, 1), self.down.transpose(1, 2)).sum(0)

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Names of the packed layout; `unpacked` gives the other one."""
        return self._common(prefix) | {f"{prefix}.experts.gate_up_proj": self.gate_up, f"{prefix}.experts.down_proj": self.down}

    def unpacked(self, prefix: str) -> dict[str, Tensor]:
        """Names of the layout with one tensor an expert and projection."""
        named = self._common(prefix)
        for e in range(self.num_experts):
            named[f"{prefix}.experts.{e}.gate_proj.weight"], named[f"{prefix}.experts.{e}.up_proj.weight"] = self.gate_up[e].chunk(2)
            named[f"{prefix}.experts.{e}.down_proj.weight"] = self.down[e]
        return named

    def _common(self, prefix: str) -> dict[str, Tensor]:
        return self.router.tensors(prefix) | self.shared.tensors(f"{prefix}.shared_expert")
