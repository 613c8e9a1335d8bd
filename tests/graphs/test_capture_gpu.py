"""What may go on while a step is captured."""

import gc

import pytest
import torch

from deltagram.graphs.capture import StepGraphs
from deltagram.step.plan import Bucket

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


class Dropped:
    """A graph in a ring of references, as in an engine that nobody holds any more: only a collection frees it."""

    def __init__(self) -> None:
        self.me, self.graph = self, torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            torch.zeros(8, device=CUDA)


def test_garbage_of_another_engine_breaks_no_capture() -> None:
    out = torch.zeros(1, device=CUDA)

    def run(bucket: Bucket) -> None:
        if torch.cuda.is_current_stream_capturing():
            held.clear()
        kept = [[i] for i in range(5000)]  # more new objects than any threshold: a collection would come here
        out.fill_(len(kept))

    held = [Dropped() for _ in range(4)]
    graphs = StepGraphs(run, lambda bucket: None, CUDA)
    threshold = gc.get_threshold()
    gc.set_threshold(50, 1, 1)
    try:
        with torch.cuda.stream(torch.cuda.Stream(CUDA)):
            graphs.capture([Bucket(8, 8, False)], None, lambda done, of: None)
            out.zero_()
            graphs.replay(Bucket(8, 8, False))
    finally:
        gc.set_threshold(*threshold)
    torch.cuda.synchronize()
    assert gc.isenabled() and out.item() == 5000
