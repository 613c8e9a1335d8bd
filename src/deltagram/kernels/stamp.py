"""The time on the device when its stream comes here: what says, afterwards, who waited for whom.

    out = nanoseconds of the device's clock

Shapes: out int64 [1]. Times of one device compare, whatever stream they are from. On a CPU it is the host's clock.
"""

from __future__ import annotations

import time

from torch import Tensor

from deltagram.kernels._triton import Build, Impl, choose, jit, tl


def stamp(out: Tensor, impl: Impl = None) -> None:
    """See the file's docstring."""
    choose(impl, out, _reference, _launch)(out)


def _reference(out: Tensor) -> None:
    out.fill_(time.perf_counter_ns())


@jit
def _kernel(out):  # type: ignore[no-untyped-def]
    now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    tl.store(out, now)


def _launch(out: Tensor) -> None:
    _kernel[(1,)](out, num_warps=1)


def ahead_of_time() -> list[Build]:
    return [Build(_kernel, {"out": "*i64"}, {}, {"num_warps": 1})]
