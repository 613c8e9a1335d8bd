"""What tests and benchmarks of compiled CPU kernels share: poisoned inputs, packed weights, the comparison, the
clock."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deltagram.kernels._packed import Packed

LENGTHS = (*range(1, 20), 31, 32, 33, 63, 64, 65, 127, 128, 130)  # of rows: every tile, and what is left over


def among_nan(x: Tensor, before: int = 3, after: int = 5) -> Tensor:
    """The same values as rows of a wider tensor, NaN left and right of them and in a row above and below."""
    flat = x.flatten(1)
    wide = x.new_full((len(x) + 2, before + flat.shape[1] + after), float("nan"))
    inside = wide[1:-1, before : before + flat.shape[1]]
    inside.copy_(flat)
    return inside.unflatten(1, x.shape[1:]) if x.dim() > 2 else inside


def weight(*shape: int, bf16: bool = True) -> Packed:
    """A packed random weight [..., outputs, inputs], kept as bf16 or as fp32."""
    values = torch.randn(shape) / shape[-1] ** 0.5
    packed = Packed.of(values.bfloat16().float() if bf16 else values)
    assert packed.brief == bf16
    return packed


def exact(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same arguments, fp32 tensors in float64."""
    double = [x.double() if isinstance(x, Tensor) and x.dtype == torch.float32 else x for x in arguments]
    return tuple(double)


def assert_close(ours: Tensor, expected: Tensor, tolerance: float = 3e-6) -> None:
    """Every error within `tolerance` of the largest value expected; no NaN."""
    assert ours.shape == expected.shape and ours.dtype == torch.float32
    error = (ours.double() - expected).abs().max() if ours.numel() else 0
    assert error <= tolerance * expected.abs().max() + 1e-30 if ours.numel() else True, error


def microseconds(call: Callable[[], object], at_least: float = 0.2) -> float:
    """The shortest time of a call, which other work on the machine disturbs least."""
    call()
    best, end = float("inf"), time.perf_counter() + at_least
    while time.perf_counter() < end:
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best * 1e6


def print_times(op: Callable[..., object], cases: Mapping[str, tuple[Any, ...]]) -> None:
    """Time the compiled body and the reference of `op` on each case's arguments."""
    for name, arguments in cases.items():
        ours, plain = (microseconds(partial(op, *arguments, impl=impl)) for impl in ("compiled", "reference"))
        print(f"{name:24} compiled {ours:10.1f} us   reference {plain:10.1f} us")
