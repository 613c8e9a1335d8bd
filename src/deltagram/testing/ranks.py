"""Groups of processes on this machine's CPU, to try on them what ranks do together."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from deltagram.parallel.groups import Group, join
from deltagram.parallel.launch import environment, free_port


class Ranks:
    """`size` processes that joined one group and run, together, what they are given. Close it, or use `with`."""

    def __init__(self, size: int, device: str = "cpu", deadline: float = 60.0) -> None:
        context, port = multiprocessing.get_context("spawn"), free_port()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = theirs, environment(rank, size, port), device, deadline
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 120.0) -> list[Any]:
        """`function(group, *arguments)` on every rank; what each returned. Raises the first error there."""
        self.start(function, *arguments)
        return self.results(timeout)

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Begin `run`."""
        for pipe in self.pipes:
            pipe.send((function, arguments))

    def results(self, timeout: float = 120.0) -> list[Any]:
        """End `run`."""
        found = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(timeout):
                raise TimeoutError(f"rank {rank} did not answer within {timeout:g} s")
            found.append(pipe.recv())
        for rank, (error, text, _) in enumerate(found):
            if error is not None:
                error.add_note(f"on rank {rank}:\n{text}")
                raise error
        return [value for _, _, value in found]

    def close(self) -> None:
        """End the processes."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)
            if process.exitcode is None:
                process.kill()
                process.join()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _work(pipe: Connection, variables: dict[str, str], device: str, deadline: float) -> None:
    import torch

    os.environ.update(variables)
    torch.set_num_threads(1)
    group: Group = join(device, deadline)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            break
        try:
            answer = None, "", function(group, *arguments)
        except Exception as error:
            answer = error, traceback.format_exc(), None  # type: ignore[assignment]
        pipe.send(answer)
    group.close()
