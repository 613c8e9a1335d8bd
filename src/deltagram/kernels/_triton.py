"""The one place that knows whether Triton is there, and how an op chooses between its reference and its kernel."""

from collections.abc import Callable
from typing import Literal, TypeVar

import torch

try:
    import triton
    import triton.language as tl

    TRITON_ERROR = None
except ImportError as error:
    triton = tl = None
    TRITON_ERROR = error

Impl = Literal["reference", "triton"] | None
Op = TypeVar("Op", bound=Callable[..., object])


def choose(impl: Impl, device: torch.device, reference: Op, launch: Op) -> Op:
    """The body an op runs: `impl` if given, else the reference for CPU tensors and the kernel for CUDA tensors.

    Raises ValueError for an unknown `impl`, RuntimeError where the kernel is asked for and cannot be had: never the other one.
    """
    if impl not in (None, "reference", "triton"):
        raise ValueError(f"impl must be 'reference', 'triton' or None, got {impl!r}")
    if impl == "reference" or (impl is None and device.type == "cpu"):
        return reference
    if triton is None:
        raise RuntimeError(f"tensors on {device} need Triton, which did not import ({TRITON_ERROR}): pip install 'deltagram[gpu]'")
    return launch
