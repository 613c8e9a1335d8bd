"""Words' vectors, as often as a model has residual streams.

    y[t, c] = words[token[t]]     for every copy c

Shapes: token int32 or int64 [T], words [vocab, H]. Returns [T, H], or [T, copies, H] if `copies` is given, in words'
dtype.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from deltagram.kernels._triton import Impl, choose, on_cpu


def embed(token: Tensor, words: Tensor, copies: int | None = None, impl: Impl = None) -> Tensor:
    """See the file's docstring."""
    return choose(impl, words, _reference, _reference, _compiled)(token, words, copies)


def _reference(token: Tensor, words: Tensor, copies: int | None = None) -> Tensor:
    once = F.embedding(token, words)
    return once if copies is None else once[:, None].expand(-1, copies, -1).contiguous()


_compiled = on_cpu("embed")
