"""Linear maps and RMS norms. Weights are plain tensors; `tensors(prefix)` names them as checkpoints do.

A layer's `tensors` maps each checkpoint name to where its values go: several names may be parts of one tensor, so that what
is applied together is one matrix product.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Factory:
    """Makes the tensors of a model: on `device`, in `dtype` unless said."""

    device: torch.device
    dtype: torch.dtype

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=dtype or self.dtype)


class Linear:
    """One product for one or more projections of the same input, without bias.

    `parts` maps each projection's name to its number of outputs; their weights are consecutive rows of `weight`.
    """

    def __init__(self, num_inputs: int, parts: dict[str, int], make: Factory) -> None:
        self.parts = parts
        self.sizes = list(parts.values())
        self.weight = make.empty(sum(self.sizes), num_inputs)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, inputs] -> [T, outputs], the parts side by side."""
        return F.linear(x, self.weight)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [T, inputs] -> one [T, outputs] view a part."""
        return F.linear(x, self.weight).split(self.sizes, -1)

    def scaled(self, x: Tensor, factor: float) -> Tensor:
        """The same times `factor`, in one op."""
        nothing = self.weight.new_empty(1)  # beta = 0: not read
        return torch.addmm(nothing, x, self.weight.t(), beta=0, alpha=factor)

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        weights = self.weight.split(self.sizes)
        return {f"{prefix}.{name}.weight": weight for name, weight in zip(self.parts, weights, strict=True)}


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * (1 + weight) over the last dimension, in fp32.

    With `groups`, x is [..., groups, size] and each group has its own weights; the checkpoint holds them in one vector.
    """

    def __init__(self, size: int, eps: float, make: Factory, groups: int = 1) -> None:
        self.size, self.groups = size, groups
        self.eps = torch.full((), eps, device=make.device)
        self.weight = make.empty(groups * size, dtype=torch.float32)
        self._scale: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._scale is None:  # made once, after loading
            self._scale = (1 + self.weight).view(self.groups, self.size) if self.groups > 1 else 1 + self.weight
        wide = x.float()
        # torch's rms_norm takes twice as long for the few rows of a decode step
        norm = torch.linalg.vector_norm(wide, 2, -1, True)
        inverse = torch.addcmul(self.eps, norm, norm, value=1 / self.size).rsqrt_()
        return (wide * inverse).mul_(self._scale).to(x.dtype)

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        return {f"{prefix}.weight": self.weight}
