"""Linear maps and RMS norms. Weights are plain tensors; `tensors(prefix)` names them as checkpoints do.

A layer's `tensors` maps each checkpoint name to where its values go: several names may be parts of one tensor, so
that what is applied together is one matrix product. Once they are loaded, `Factory.pack` brings them into the form
that ops read on a CPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deltagram.kernels._norm import Norm
from deltagram.kernels._packed import LANES, Matrix, Packed, between
from deltagram.kernels.linear import linear, linear_onto
from deltagram.kernels.rms_norm import rms_norm


@dataclass(frozen=True, slots=True)
class Factory:
    """Makes the tensors of a model: on `device`, in `dtype` unless said.

    `loaded_dtype` is what matrices are loaded in, where they are packed afterwards: the checkpoint's, so that a model
    in bf16 never lies in memory in fp32. None for `dtype`.
    """

    device: torch.device
    dtype: torch.dtype
    loaded_dtype: torch.dtype | None = None
    packers: list[Callable[[], None]] = field(default_factory=list)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=dtype or self.dtype)

    @property
    def packs(self) -> bool:
        """Whether `pack` does anything: for a model that computes in fp32 on a CPU."""
        return self.device.type == "cpu" and self.dtype == torch.float32

    def pack(self) -> None:
        """Of a model that computes in fp32 on a CPU, pack the weights, one after the other, and compile the kernels
        that read them. The weights are loaded, and stay as they are from here on."""
        if self.packs:
            from deltagram.kernels._compiled import compile_kernels  # only now: numba takes its time to import

            compile_kernels()
            for packer in self.packers:
                packer()


class Weight:
    """A matrix, or a stack of them: a `tensor` [..., outputs, inputs] to load into, until it is packed."""

    def __init__(self, make: Factory, *shape: int) -> None:
        self._matrix: Matrix = make.empty(*shape, dtype=make.loaded_dtype if make.packs else None)
        make.packers.append(self._pack)

    @property
    def tensor(self) -> Tensor:
        assert isinstance(self._matrix, Tensor), "the weight is packed"
        return self._matrix

    @property
    def matrix(self) -> Matrix:
        """What ops take."""
        return self._matrix

    def _pack(self) -> None:
        self._matrix = Packed.of(self.tensor)


class Linear:
    """One product for one or more projections of the same input, without bias.

    `parts` maps each projection's name to its number of outputs; their weights are consecutive rows of `weight`.
    """

    def __init__(self, num_inputs: int, parts: dict[str, int], make: Factory) -> None:
        self.parts = parts
        self.sizes = list(parts.values())
        self._weight = Weight(make, sum(self.sizes), num_inputs)

    @property
    def weight(self) -> Tensor:
        return self._weight.tensor

    @property
    def matrix(self) -> Matrix:
        return self._weight.matrix

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, inputs] -> [T, outputs], the parts side by side; rows may be strided."""
        return linear(x, self._weight.matrix)

    def onto(self, residual: Tensor, x: Tensor, norm: "RMSNorm") -> tuple[Tensor, Tensor]:
        """residual [T, outputs], which is used up, x [T, inputs] -> their sum, [T, outputs], and `norm` of it."""
        return linear_onto(residual, x, self._weight.matrix, norm.fused)

    def split(self, x: Tensor) -> Sequence[Tensor]:
        """x [T, inputs] -> one [T, outputs] view a part."""
        return self(x).split_with_sizes(self.sizes, -1)

    def outputs(self, x: Tensor, first: int, last: int) -> Tensor:
        """x [T, inputs] -> outputs first .. last - 1 alone, [T, last - first]."""
        whole = first // LANES * LANES
        return linear(x, between(self._weight.matrix, whole, last))[:, first - whole :]

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        weights = self.weight.split(self.sizes)
        return {f"{prefix}.{name}.weight": weight for name, weight in zip(self.parts, weights, strict=True)}


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * (1 + weight) over the last dimension, in fp32.

    With `groups`, x is [..., groups, size] and each group has its own weights; the checkpoint holds them in one vector.
    """

    def __init__(self, size: int, eps: float, make: Factory, groups: int = 1) -> None:
        self.size, self.groups, self.eps = size, groups, eps
        self.weight = make.empty(groups * size, dtype=torch.float32)
        self._scale: Tensor | None = None

    @property
    def scale(self) -> Tensor:
        """1 + weight: [size], or [groups, size]."""
        if self._scale is None:  # made once, after loading
            self._scale = (1 + self.weight).view(self.groups, self.size) if self.groups > 1 else 1 + self.weight
        return self._scale

    @property
    def fused(self) -> Norm:
        """The norm for a product to apply to its sum with the residual."""
        return Norm(self.scale, self.eps)

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.scale, self.eps)

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        return {f"{prefix}.weight": self.weight}
