"""Wait, on the device, until every rank of a group has come to the same point of its own stream.

    epoch += 1;  flags of every rank [rank] = epoch;  wait until own flags [peer] >= epoch for every peer

What a rank wrote to its peers' memory, or to its own, before its barrier can be read by every rank after theirs. The
epoch lives on the device, so that a replayed graph counts on; a peer may be one barrier ahead, which is why flags are
compared with >=. A wait looks at most `polls` times (about a microsecond each) and then sets the bits of the ranks that
are missing in `stalled`: a peer that never comes ends as an error, not as a hang. While `stalled` is not 0, a wait ends
after PATIENCE looks.

Shapes, all int64: flags [ranks], the addresses of each rank's int64 [ranks], zeros at first; epoch [1], on the device;
stalled [1], in page-locked host memory, so that the host can look at any time. The number of ranks is a power of two,
at most 32.
"""

from __future__ import annotations

from torch import Tensor, int64

from deltagram.kernels._pointers import at, fence, wait_until
from deltagram.kernels._triton import Build, Impl, choose, jit, tl

PATIENCE = 1024  # looks between two at `stalled`, which is far away


def peer_barrier(flags: Tensor, epoch: Tensor, stalled: Tensor, rank: int, polls: int, impl: Impl = None) -> None:
    """See the file's docstring."""
    choose(impl, flags.device, _reference, _launch)(flags, epoch, stalled, rank, polls)


def _reference(flags: Tensor, epoch: Tensor, stalled: Tensor, rank: int, polls: int) -> None:
    epoch += 1
    wanted, ranks = int(epoch), len(flags)
    fence()
    for address in flags.tolist():
        at(address + 8 * rank, (1,), int64, flags.device).fill_(wanted)
    mine = at(int(flags[rank]), (ranks,), int64, flags.device)
    if not wait_until(lambda: int(mine.min()) >= wanted, polls, stalled, PATIENCE):
        stalled |= sum(1 << peer for peer, seen in enumerate(mine.tolist()) if seen < wanted)


@jit(do_not_specialize=["rank", "polls"])
def _kernel(flags, epoch, stalled, rank, polls, RANKS: tl.constexpr, PATIENCE: tl.constexpr):  # type: ignore[no-untyped-def]
    peer = tl.arange(0, RANKS)
    wanted = tl.load(epoch) + 1
    theirs = tl.load(flags + peer).to(tl.pointer_type(tl.int64))
    tl.atomic_xchg(theirs + rank, wanted, sem="release", scope="sys")
    mine = tl.load(flags + rank).to(tl.pointer_type(tl.int64)) + peer
    late = tl.load(mine, volatile=True) < wanted
    looks = 0
    while (tl.sum(late.to(tl.int32)) > 0) & (looks < polls):
        late = tl.load(mine, volatile=True) < wanted
        looks += 1
        if looks % PATIENCE == 0:
            looks = tl.where(tl.load(stalled, volatile=True) == 0, looks, polls)
    tl.atomic_add(mine, 0, sem="acquire", scope="sys")
    tl.store(epoch, wanted)
    missing = tl.sum(tl.where(late, 1, 0).to(tl.int64) << peer)
    if missing != 0:
        tl.store(stalled, tl.load(stalled) | missing)


def _launch(flags: Tensor, epoch: Tensor, stalled: Tensor, rank: int, polls: int) -> None:
    _kernel[(1,)](flags, epoch, stalled, rank, polls, len(flags), PATIENCE, num_warps=1)


def ahead_of_time() -> list[Build]:
    types = {"flags": "*i64", "epoch": "*i64", "stalled": "*i64", "rank": "i32", "polls": "i32"}
    return [Build(_kernel, types, {"RANKS": ranks, "PATIENCE": PATIENCE}, {"num_warps": 1}) for ranks in (2, 8)]
