"""The one place where a step on the device waits for the host: until flags in page-locked memory have come to an epoch.

    wait until every flag >= epoch;  then failed = 1 if one of them is not

It looks at the flags at most `polls` times without seeing another one come. A look at host memory takes a device a
microsecond or two, so that `polls` bounds the wait: a helper of the host that has died ends it as an error, never as a
hang, while one that is slow is waited for. Once failed is 1 nothing is waited for. What the host wrote before a flag
can be read by everything after this op.

Shapes, all int64: flag [n] in page-locked host memory, epoch [1] on the device, failed [1] in page-locked host memory
(left as it is on success). On CPU tensors the wait is the calling thread's.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from deltagram.kernels._triton import Build, Impl, choose, jit, power_of_two, tl

_WARPS = 4


def flag_wait(flag: Tensor, epoch: Tensor, failed: Tensor, polls: int, impl: Impl = None) -> None:
    """See the file's docstring."""
    assert flag.dtype == epoch.dtype == failed.dtype == torch.int64
    choose(impl, epoch.device, _reference, _launch)(flag, epoch, failed, polls)


def _reference(flag: Tensor, epoch: Tensor, failed: Tensor, polls: int) -> None:
    flags, wanted = flag.numpy(), int(epoch)
    left, came = 0 if int(failed) else polls, 0
    while (now := int((flags >= wanted).sum())) < len(flags) and left > 0:
        left, came = left - 1 if now == came else polls, now
        time.sleep(1e-6)
    if now < len(flags):
        failed.fill_(1)


@jit(do_not_specialize=["count", "polls"])
def _kernel(flag, epoch, failed, count, polls, FLAGS: tl.constexpr):  # type: ignore[no-untyped-def]
    wanted = tl.load(epoch)
    i = tl.arange(0, FLAGS)
    came = tl.sum((tl.load(flag + i, mask=i < count, other=0, volatile=True) >= wanted).to(tl.int32), 0)
    left = tl.where(tl.load(failed, volatile=True) == 0, polls, 0)
    while (came < count) & (left > 0):
        now = tl.sum((tl.load(flag + i, mask=i < count, other=0, volatile=True) >= wanted).to(tl.int32), 0)
        left = tl.where(now == came, left - 1, polls)
        came = now
    if came < count:
        tl.store(failed, 1)


def _launch(flag: Tensor, epoch: Tensor, failed: Tensor, polls: int) -> None:
    _kernel[(1,)](flag, epoch, failed, len(flag), polls, power_of_two(len(flag), 128), num_warps=_WARPS)


def ahead_of_time() -> list[Build]:
    types = {"flag": "*i64", "epoch": "*i64", "failed": "*i64", "count": "i32", "polls": "i32"}
    return [Build(_kernel, types, {"FLAGS": flags}, {"num_warps": _WARPS}) for flags in (128, 512)]
