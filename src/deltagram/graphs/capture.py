"""Capture and replay: one graph a bucket, made before the first request.

A step is `run(bucket)`: it reads its inputs at fixed places and leaves its results at fixed places. It is run once as
it is, which compiles and allocates what it needs, and then recorded. All graphs share one pool of memory, since one
step runs at a time; the largest comes first, and the others fit in what it took.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from deltagram.graphs.small_memsets import replace_small_memsets
from deltagram.step.plan import Bucket
from deltagram.step.segments import recording


class Piecewise:
    """A recorded step: pieces of graph and, between them, what no graph can hold (step/segments.py).

    num_eager: pieces that are run anew by every replay.
    """

    def __init__(self, pool: Any) -> None:
        self.pool, self.num_eager = pool, 0
        self.pieces: list[torch.cuda.CUDAGraph | Callable[[], None]] = []

    def record(self, run: Callable[[], None]) -> None:
        """Record `run`, on the current stream."""
        with recording(self):
            self._begin()
            try:
                run()
            finally:
                self._end()

    def eagerly(self, call: Callable[[], None]) -> None:
        """See step/segments.py."""
        self._end()
        call()
        self.pieces.append(call)
        self.num_eager += 1
        self._begin()

    def replay(self) -> None:
        """Run the step again, on the current stream."""
        for piece in self.pieces:
            if isinstance(piece, torch.cuda.CUDAGraph):
                piece.replay()
            else:
                piece()

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        # Helper threads may use the device meanwhile: what they do is theirs.
        graph.capture_begin(self.pool, capture_error_mode="thread_local")
        self.pieces.append(graph)

    def _end(self) -> None:
        graph = self.pieces[-1]
        assert isinstance(graph, torch.cuda.CUDAGraph)
        graph.capture_end()
        replace_small_memsets(graph)
        graph.instantiate()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage may hold graphs or pinned memory, of an engine that was dropped, and freeing these breaks a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class StepGraphs:
    """The captured steps of every bucket there is: `run` on the inputs that `fill` brings to their places.

    bytes: device memory that the graphs took.
    """

    def __init__(self, run: Callable[[Bucket], None], fill: Callable[[Bucket], None], device: torch.device) -> None:
        self.run, self.fill, self.device = run, fill, device
        self.graphs: dict[Bucket, Piecewise] = {}
        self.bytes = 0

    def capture(self, buckets: Sequence[Bucket], budget: int | None, progress: Callable[[int, int], None]) -> None:
        """Capture the buckets, given in falling size, on the current stream. `fill` must bring inputs of nothing but
        padding. `progress` is told how many of how many are done.

        Raises ValueError if the graphs take more than `budget` bytes of device memory.
        """
        pool = torch.cuda.graph_pool_handle()
        for done, bucket in enumerate(buckets):
            progress(done, len(buckets))
            self.fill(bucket)
            self.run(bucket)
            torch.cuda.synchronize(self.device)
            free = torch.cuda.mem_get_info(self.device)[0]
            step = Piecewise(pool)
            with _no_collection():
                step.record(lambda bucket=bucket: self.run(bucket))  # type: ignore[misc]
            torch.cuda.synchronize(self.device)
            self.bytes += max(free - torch.cuda.mem_get_info(self.device)[0], 0)
            if budget is not None and self.bytes > budget:
                raise ValueError(
                    f"the graphs of {done + 1} of {len(buckets)} step sizes take {self.bytes} bytes of device memory, "
                    f"graph_bytes is {budget}: allow more, or make max_num_tokens or max_num_sequences smaller"
                )
            self.graphs[bucket] = step
        progress(len(buckets), len(buckets))

    def replay(self, bucket: Bucket) -> int:
        """Run the step again on what its inputs now hold; the number of pieces that are not of a graph."""
        graph = self.graphs[bucket]
        graph.replay()
        return graph.num_eager
