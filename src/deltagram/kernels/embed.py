"""Words' vectors, as often as a model has residual streams.

    y[t, c] = words[token[t]]     for every copy c

Shapes: token int32 or int64 [T], of the vocabulary (the kernel does not look), words [vocab, H]. Returns [T, H], or
[T, copies, H] if `copies` is given, in words' dtype.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from deltagram.kernels._triton import Build, Impl, choose, jit, on_cpu, power_of_two, tl

_BLOCK = 1024


def embed(token: Tensor, words: Tensor, copies: int | None = None, impl: Impl = None) -> Tensor:
    """See the file's docstring."""
    return choose(impl, words, _reference, _launch, _compiled)(token, words, copies)


def _reference(token: Tensor, words: Tensor, copies: int | None = None) -> Tensor:
    once = F.embedding(token, words)
    return once if copies is None else once[:, None].expand(-1, copies, -1).contiguous()


_compiled = on_cpu("embed")


@jit
def _kernel(token, words, y, size, COPIES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    t, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(token + t).to(tl.int64)
    value = tl.load(words + word * size + i, mask=i < size, other=0)
    for c in tl.static_range(COPIES):
        tl.store(y + (t * COPIES + c) * size + i, value, mask=i < size)


def _launch(token: Tensor, words: Tensor, copies: int | None = None) -> Tensor:
    rows, size, times = len(token), words.shape[1], copies or 1
    assert words.is_contiguous() and token.is_contiguous()
    y = words.new_empty((rows, size) if copies is None else (rows, times, size))
    if rows:
        block = min(power_of_two(size), _BLOCK)
        _kernel[(rows, -(-size // block))](token, words, y, size, times, block, num_warps=4)
    return y


def ahead_of_time() -> list[Build]:
    return [
        Build(_kernel, {"token": token, "words": dtype, "y": dtype, "size": "i32"}, {"COPIES": copies, "BLOCK": _BLOCK})
        for token, dtype, copies in (("*i32", "*bf16", 1), ("*i64", "*fp32", 4))
    ]
