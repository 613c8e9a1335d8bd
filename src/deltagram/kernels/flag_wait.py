"""The one place where a step on the device waits for the host: until a flag in page-locked memory has come to an epoch.

    wait until flag >= epoch, looking at most `polls` times;  then failed = 1 if it has not

A look at host memory takes a device about a microsecond, so that `polls` bounds the wait: a helper of the host that
has died ends it as an error, never as a hang. What the host wrote before the flag can be read by everything after
this op.

Shapes, all int64 [1]: flag in page-locked host memory, epoch on the device, failed in page-locked host memory (left
as it is on success). On CPU tensors the wait is the calling thread's.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from deltagram.kernels._triton import Build, Impl, choose, jit, tl


def flag_wait(flag: Tensor, epoch: Tensor, failed: Tensor, polls: int, impl: Impl = None) -> None:
    """See the file's docstring."""
    assert flag.dtype == epoch.dtype == failed.dtype == torch.int64
    choose(impl, epoch.device, _reference, _launch)(flag, epoch, failed, polls)


def _reference(flag: Tensor, epoch: Tensor, failed: Tensor, polls: int) -> None:
    wanted = int(epoch)
    for _ in range(polls):
        if int(flag) >= wanted:
            return
        time.sleep(1e-6)
    if int(flag) < wanted:
        failed.fill_(1)


@jit(do_not_specialize=["polls"])
def _kernel(flag, epoch, failed, polls):  # type: ignore[no-untyped-def]
    wanted = tl.load(epoch)
    seen = tl.load(flag, volatile=True)
    left = polls
    while (seen < wanted) & (left > 0):
        seen = tl.load(flag, volatile=True)
        left -= 1
    if seen < wanted:
        tl.store(failed, 1)


def _launch(flag: Tensor, epoch: Tensor, failed: Tensor, polls: int) -> None:
    _kernel[(1,)](flag, epoch, failed, polls, num_warps=1)


def ahead_of_time() -> list[Build]:
    types = {"flag": "*i64", "epoch": "*i64", "failed": "*i64", "polls": "i32"}
    return [Build(_kernel, types, {}, {"num_warps": 1})]
