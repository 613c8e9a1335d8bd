"""A step's row ids into this rank's part of memory that its peers can read.

    ids[layer, t, c] = hashes[layer, t, c] for t < T, -1 for T <= t < slot

Shapes: hashes int64 [layers, T, columns], contiguous, T <= slot, each value -1 or in [0, 2^31); buffers int64 [ranks],
the addresses of every rank's ids, int32 [layers, slot, columns]. Writes this rank's.
"""

from __future__ import annotations

from torch import Tensor, int32

from deltagram.kernels._pointers import at
from deltagram.kernels._triton import Build, Impl, choose, jit, tl

_IDS, _WARPS = 256, 4  # a program's


def peer_publish(hashes: Tensor, buffers: Tensor, rank: int, slot: int, impl: Impl = None) -> None:
    """See the file's docstring."""
    assert hashes.shape[1] <= slot
    choose(impl, buffers.device, _reference, _launch)(hashes, buffers, rank, slot)


def _reference(hashes: Tensor, buffers: Tensor, rank: int, slot: int) -> None:
    layers, tokens, columns = hashes.shape
    ids = at(int(buffers[rank]), (layers, slot, columns), int32, buffers.device)
    ids[:, :tokens].copy_(hashes)
    ids[:, tokens:] = -1


@jit(do_not_specialize=["layer_hashes", "layer_ids", "rank"])
def _kernel(hashes, buffers, layer_hashes, layer_ids, rank, IDS: tl.constexpr):  # type: ignore[no-untyped-def]
    layer = tl.program_id(1)
    at = tl.program_id(0) * IDS + tl.arange(0, IDS)
    ids = tl.load(buffers + rank).to(tl.pointer_type(tl.int32))
    value = tl.load(hashes + layer.to(tl.int64) * layer_hashes + at, mask=at < layer_hashes, other=-1)
    tl.store(ids + layer.to(tl.int64) * layer_ids + at, value.to(tl.int32), mask=at < layer_ids)


def _launch(hashes: Tensor, buffers: Tensor, rank: int, slot: int) -> None:
    layers, tokens, columns = hashes.shape
    assert hashes.is_contiguous()
    grid = (-(-slot * columns // _IDS), layers)
    if slot:
        _kernel[grid](hashes, buffers, tokens * columns, slot * columns, rank, _IDS, num_warps=_WARPS)


def ahead_of_time() -> list[Build]:
    types = {"hashes": "*i64", "buffers": "*i64", "layer_hashes": "i32", "layer_ids": "i32", "rank": "i32"}
    return [Build(_kernel, types, {"IDS": _IDS}, {"num_warps": _WARPS})]
