"""A block's output into the residual streams, after hyper_mix.

    X[t, s] += inject[t, s] * out[t]

Shapes: streams X [T, S, H], updated in place; inject [T, S]; out [T, H] (rows may be strided).
"""

from __future__ import annotations

from torch import Tensor

from deltagram.kernels._triton import Build, Impl, choose, jit, on_cpu, power_of_two, tl


def hyper_add(streams: Tensor, inject: Tensor, out: Tensor, impl: Impl = None) -> None:
    """See the file's docstring."""
    choose(impl, streams, _reference, _launch, _compiled)(streams, inject, out)


def _reference(streams: Tensor, inject: Tensor, out: Tensor) -> None:
    streams.addcmul_(inject[:, :, None], out[:, None])


_compiled = on_cpu("hyper_add")


@jit
def _kernel(  # type: ignore[no-untyped-def]
    streams, inject, out, out_stride, S: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64) // S
    h = tl.arange(0, BLOCK)
    at = streams + tl.program_id(0).to(tl.int64) * H + h
    x = tl.load(at, mask=h < H, other=0).to(tl.float32)
    y = tl.load(out + token * out_stride + h, mask=h < H, other=0).to(tl.float32)
    x += tl.load(inject + tl.program_id(0)).to(tl.float32) * y
    tl.store(at, x.to(streams.dtype.element_ty), mask=h < H)


def _launch(streams: Tensor, inject: Tensor, out: Tensor) -> None:
    num_tokens, count, hidden = streams.shape
    assert streams.is_contiguous() and inject.is_contiguous() and out.stride(1) == 1
    if num_tokens:
        _kernel[(num_tokens * count,)](
            streams, inject, out, out.stride(0), count, hidden, power_of_two(hidden), num_warps=4
        )


def ahead_of_time() -> list[Build]:
    return [
        Build(
            _kernel,
            {"streams": dtype, "inject": dtype, "out": dtype, "out_stride": "i32"},
            {"S": 4, "H": 2560, "BLOCK": 4096},
        )
        for dtype in ("*bf16", "*fp32")
    ]
