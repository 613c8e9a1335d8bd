"""A block's output into the residual streams, after hyper_mix.

    X[t, s] += inject[t, s] * out[t]

Shapes: streams X [T, S, H], updated in place; inject [T, S]; out [T, H] (rows may be strided).
"""

from __future__ import annotations

from torch import Tensor

from deltagram.kernels._triton import Impl, choose, on_cpu


def hyper_add(streams: Tensor, inject: Tensor, out: Tensor, impl: Impl = None) -> None:
    """See the file's docstring."""
    choose(impl, streams, _reference, _reference, _compiled)(streams, inject, out)


def _reference(streams: Tensor, inject: Tensor, out: Tensor) -> None:
    streams.addcmul_(inject[:, :, None], out[:, None])


_compiled = on_cpu("hyper_add")
