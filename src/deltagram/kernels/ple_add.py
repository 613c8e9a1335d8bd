"""What a memory layer adds to the residual streams, in place.

    X += gated + mixed

Shapes: streams X, gated and mixed [T, S, H], contiguous; gated may be overwritten.
"""

from __future__ import annotations

from torch import Tensor

from deltagram.kernels._triton import Impl, choose, on_cpu


def ple_add(streams: Tensor, gated: Tensor, mixed: Tensor, impl: Impl = None) -> None:
    """See the file's docstring."""
    choose(impl, streams, _reference, _reference, _compiled)(streams, gated, mixed)


def _reference(streams: Tensor, gated: Tensor, mixed: Tensor) -> None:
    streams += gated.add_(mixed)


_compiled = on_cpu("ple_add")
