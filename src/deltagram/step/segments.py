"""Work that a captured step cannot hold: it runs between two pieces of the step's graph.

`eagerly(call)` runs `call` at once, outside a capture. While a step is recorded (graphs/capture.py), the recorder ends
the piece of the graph that it is at, runs and remembers `call`, and begins the next piece; a replay does the same. So
`call` must find its inputs, and leave its results, in tensors that were made before it, and returns nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Recorder(Protocol):
    """What records a step in pieces."""

    def eagerly(self, call: Callable[[], None]) -> None: ...


_recorders: list[Recorder] = []
_forks: list[Callable[[], None]] = []


def eagerly(call: Callable[[], None]) -> None:
    """Run work that cannot be captured: see the file's docstring."""
    if not _recorders:
        call()
        return
    for join in _forks:  # a piece of a graph ends with nothing left running beside it
        join()
    _recorders[-1].eagerly(call)


def forked(join: Callable[[], None]) -> None:
    """Work has begun on another stream, which `join` makes the current one wait for, as often as it is called."""
    _forks.append(join)


def joined(join: Callable[[], None]) -> None:
    """That work has been joined for good."""
    _forks.remove(join)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Within it, `eagerly` goes to `recorder`."""
    _recorders.append(recorder)
    try:
        yield
    finally:
        _recorders.pop()
