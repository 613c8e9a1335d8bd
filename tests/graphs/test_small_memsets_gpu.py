"""Kernels in place of a graph's small memsets: what a replay leaves, and what waits for what."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deltagram.graphs.capture import Piecewise
from deltagram.graphs.small_memsets import replace_small_memsets

pytestmark = pytest.mark.gpu
driver = pytest.importorskip("cuda.bindings.driver")
CUDA = torch.device("cuda")
SLOW = 1 << 22  # elements: what is to be waited for takes longer than a launch


def memsets(graph: torch.cuda.CUDAGraph) -> int:
    raw = driver.CUgraph(graph.raw_cuda_graph())
    *_, count = driver.cuGraphGetNodes(raw)
    nodes = driver.cuGraphGetNodes(raw, count)[1]
    memset = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET
    return sum(driver.cuGraphNodeGetType(node)[1] == memset for node in nodes)


def clear(tensor: Tensor) -> None:
    stream = torch.cuda.current_stream().cuda_stream
    (status,) = driver.cuMemsetD32Async(tensor.data_ptr(), 0, tensor.numel(), stream)
    assert status == driver.CUresult.CUDA_SUCCESS


def test_a_kernel_waits_for_what_its_memset_waited_for_and_is_waited_for_like_it() -> None:
    slow = torch.ones(2, SLOW, device=CUDA)
    word, wide = (torch.full((size,), 7, dtype=torch.int32, device=CUDA) for size in (1, 64))
    seen = torch.zeros(3, dtype=torch.int32, device=CUDA)
    main, side = torch.cuda.Stream(CUDA), torch.cuda.Stream(CUDA)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.stream(main):
        graph.capture_begin(capture_error_mode="thread_local")
        side.wait_stream(main)
        for n, stream in enumerate((main, side)):  # both end with a write to the word, long after they began
            with torch.cuda.stream(stream):
                for _ in range(4):
                    slow[n] += 1
                word.copy_(slow[n, :1])
        main.wait_stream(side)
        clear(word)
        clear(wide)
        side.wait_stream(main)
        for n, stream in enumerate((main, side)):
            with torch.cuda.stream(stream):
                seen[n : n + 1] += word + 1
        main.wait_stream(side)
        word.fill_(9)
        clear(word)
        seen[2:] += word + 1
        graph.capture_end()
        assert memsets(graph) == 3
        assert replace_small_memsets(graph) == 2
        assert memsets(graph) == 1, "the one of many words is not ours to replace"
        graph.instantiate()
        for _ in range(5):
            graph.replay()
    torch.cuda.synchronize()
    assert seen.tolist() == [5, 5, 5] and not wide.any()


def test_a_product_of_many_rows_keeps_its_bits_and_needs_no_memset() -> None:
    torch.manual_seed(0)
    x = torch.randn(2120, 2560, device=CUDA, dtype=torch.bfloat16)
    weight = torch.randn(12352, 2560, device=CUDA, dtype=torch.bfloat16)
    out, step = torch.empty(2120, 12352, device=CUDA, dtype=torch.bfloat16), Piecewise(torch.cuda.graph_pool_handle())

    def run() -> None:
        for _ in range(3):  # the second finds the counter where the first left it
            torch.mm(x, weight.t(), out=out)

    with torch.cuda.stream(torch.cuda.Stream(CUDA)):
        expected = F.linear(x, weight)
        step.record(run)
        for _ in range(3):
            out.zero_()
            step.replay()
    torch.cuda.synchronize()
    (graph,) = step.pieces
    assert isinstance(graph, torch.cuda.CUDAGraph) and memsets(graph) == 0
    assert torch.equal(out, expected)
