"""What a captured step reads and writes at fixed places: its packed sequence table, and its report to the host.

The host prepares a step while the device still runs the last one. So what a copy reads or writes in host memory lies in
one of several places that steps use in turn.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IN_FLIGHT = 4  # steps whose host memory must stay as it is: those launched and not retired, and two to spare


class StepBuffers:
    """Buffers for steps of up to `max_packed` packed numbers and `max_sequences` sequences.

    packed: int32 [max_packed], the table; steps: int64 [1], how many steps the device has committed;
    tokens: int32 [max_sequences, 2 + max_draft], see kernels/commit_tokens.py; times: int64 [max_chains, 2], see
    ngram/run_ahead.py. All on the device; the latter three are views of one buffer, which one copy brings to the host.
    """

    def __init__(
        self, max_packed: int, max_sequences: int, max_draft: int, max_chains: int, device: torch.device
    ) -> None:
        def host(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(IN_FLIGHT, size, dtype=dtype, pin_memory=device.type == "cuda")

        width = 2 + max_draft
        self.packed = torch.zeros(max_packed, dtype=torch.int32, device=device)
        self._given = list(host(max_packed, torch.int32))
        self._given_arrays = [turn.numpy() for turn in self._given]
        size = max_sequences * width
        self._wide = 2 * (1 + 2 * max_chains)  # int64 come first
        self._report = torch.zeros(self._wide + size, dtype=torch.int32, device=device)
        reports = host(len(self._report) + len(self._report) % 2, torch.int32)
        self._reports = [turn[: len(self._report)] for turn in reports]  # views cost a step more than what is copied
        arrays = [turn.numpy() for turn in self._reports]
        self._report_arrays = [
            (array[: self._wide].view(np.int64), array[self._wide :].reshape(max_sequences, width)) for array in arrays
        ]
        wide = self._report[: self._wide].view(torch.int64)
        self.steps, self.times = wide[:1], wide[1:].view(max_chains, 2)
        self.tokens = self._report[self._wide :].view(max_sequences, width)
        self._parts: tuple[Tensor, ...] = ()
        self._brought: list[tuple[Tensor, ...]] = []
        self.filled = 0

    def fill(self, packed: npt.NDArray[np.int32]) -> None:
        """Bring a step's packed table to the device. The host does not wait."""
        turn = self.filled % IN_FLIGHT
        self._given_arrays[turn][: len(packed)] = packed
        self.packed.copy_(self._given[turn], non_blocking=True)  # all of it: a few kilobytes, and no view to make
        self.filled += 1

    def start_over(self) -> None:
        """Count on from here: a step that was filled has not been run to its end, or graphs have been captured."""
        self.steps.fill_(self.filled)

    def will_bring(self, *parts: Tensor) -> None:
        """Make room on the host for what `bring` copies."""
        self._parts = parts
        self._brought = [
            tuple(torch.zeros(part.shape, dtype=part.dtype, pin_memory=part.is_cuda) for part in parts)
            for _ in range(IN_FLIGHT)
        ]

    def bring(self) -> tuple[Tensor, ...]:
        """Copies of the parts, as the step that was filled last leaves them, for whoever waits for them."""
        host = self._brought[(self.filled - 1) % IN_FLIGHT]
        for mine, part in zip(host, self._parts, strict=True):
            mine.copy_(part, non_blocking=True)
        return host

    def report(self) -> "Report":
        """Copy the report of the step that was filled last to the host, for whoever waits for the copy."""
        turn = (self.filled - 1) % IN_FLIGHT
        self._reports[turn].copy_(self._report, non_blocking=True)
        return Report(*self._report_arrays[turn], self.filled)


class Report:
    """A step's report in host memory, once it has come there."""

    def __init__(self, wide: npt.NDArray[np.int64], narrow: npt.NDArray[np.int32], step: int) -> None:
        self._wide, self._narrow, self._step = wide, narrow, step

    def waits(self) -> list[int]:
        """Nanoseconds that each memory layer waited for its chain; below 0, how long the chain was ready before."""
        return [ready - asked for ready, asked in self._wide[1:].reshape(-1, 2).tolist()]

    def tokens(self) -> list[list[int]]:
        """The tokens of each sequence. Raises RuntimeError for a report that is another step's: a buffer was not
        refreshed, and nothing it says can be believed."""
        done = int(self._wide[0])
        if done != self._step:
            raise RuntimeError(f"the report of step {self._step} says it is step {done}'s: a buffer is stale")
        rows: list[list[int]] = self._narrow.tolist()
        return [row[1 : 1 + row[0]] for row in rows]
