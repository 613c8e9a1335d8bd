"""Kernels in place of the memsets of a word in a captured graph.

A graph of kernels alone, one after the other, is launched at one go. A memset between two of them ends that: the host
launches what is before and what is behind apart. The library begins most products of some hundred rows and more with
one, of the counter by which its programs share out the tiles; a mixed step has dozens of them.
"""

from collections.abc import Callable
from typing import Any

import torch

try:
    from cuda.bindings import driver  # PyTorch for CUDA 13 brings it along
except ImportError:
    driver = None

WORD = 4  # bytes


class _Word:
    """A word of device memory, which is somebody else's, as `torch.as_tensor` takes it."""

    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {"shape": (1,), "typestr": "<i4", "data": (address, False), "version": 3}


def replace_small_memsets(graph: torch.cuda.CUDAGraph) -> int:
    """Have kernels write the zeros of `graph`'s memsets of one word; how many there were.

    The graph was captured with keep_graph=True, on the current stream, and is not instantiated yet. A kernel waits for
    what its memset waited for, and what waited for that waits for it. Does nothing without cuda.bindings for CUDA 13.
    """
    if driver is None or driver.CUDA_VERSION < 13000:
        return 0
    whole, memset = driver.CUgraph(graph.raw_cuda_graph()), driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET
    zeroing: dict[int, tuple[torch.cuda.CUDAGraph, Any]] = {}  # by address, a graph of such a kernel, and its node
    replaced = 0
    for node in _listed(driver.cuGraphGetNodes, whole):
        if _of(driver.cuGraphNodeGetType(node))[0] != memset:
            continue
        (to,) = _of(driver.cuGraphMemsetNodeGetParams(node))
        if to.elementSize * to.width * to.height != WORD or to.value != 0:
            continue
        address = int(to.dst)
        if address not in zeroing:
            zeroing[address] = _zeroing(address)
        like = zeroing[address][1]
        (params,) = _of(driver.cuGraphKernelNodeGetParams(like))
        before, after = (
            _listed(call, node) for call in (driver.cuGraphNodeGetDependencies, driver.cuGraphNodeGetDependentNodes)
        )
        (kernel,) = _of(driver.cuGraphAddKernelNode(whole, before, len(before), params))
        _of(driver.cuGraphKernelNodeCopyAttributes(kernel, like))  # its priority
        _of(driver.cuGraphAddDependencies(whole, [kernel] * len(after), after, None, len(after)))
        _of(driver.cuGraphDestroyNode(node))
        replaced += 1
    return replaced


def _zeroing(address: int) -> tuple[torch.cuda.CUDAGraph, Any]:
    word = torch.as_tensor(_Word(address), device="cuda")
    assert word.data_ptr() == address, "a copy"
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    graph.capture_begin(capture_error_mode="thread_local")
    word.fill_(0)
    graph.capture_end()
    (node,) = _listed(driver.cuGraphGetNodes, driver.CUgraph(graph.raw_cuda_graph()))
    return graph, node


def _of(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """What the driver answered. Raises RuntimeError if it refused."""
    status, *values = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the driver refused to change a captured graph: {status.name}")
    return tuple(values)


def _listed(call: Callable[..., tuple[Any, ...]], owner: Any) -> list[Any]:
    """All nodes that `call` names, which is asked first how many they are."""
    *_, count = _of(call(owner))
    return list(_of(call(owner, count))[0])[:count] if count else []
