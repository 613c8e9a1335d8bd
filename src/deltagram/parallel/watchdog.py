"""Who is missing, when ranks wait for each other: seconds after a hang every rank says it, and ends.

Each rank keeps, in memory that all ranks of the machine read, its step and, for each communicator, a ring of the
collectives it entered and left. A thread in every process looks at its own step's age, at whether the other processes
live, and at what any rank has reported. A stopped rank need not do anything: the others name it.
"""

import faulthandler
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

EXIT_CODE = 70  # of a process that its watchdog ended
GRACE = 3.0  # seconds for the main thread to fail its requests, from the report on
_TICK = 0.2  # seconds
_STOPPED, _GONE = 4.0, 0.6  # seconds that another process must have been so
COMMUNICATORS, RING = 16, 16
_FIELDS = (
    ("pid", np.int64, ()),
    ("closed", np.int64, ()),
    ("step", np.int64, ()),
    ("digest", "S16", ()),
    ("began", np.float64, ()),  # of the step, 0 outside of one; times are those of the machine's monotonic clock
    ("unread", np.int64, ()),  # whether it waits for who reads its stream
    ("failure", "S1024", ()),  # what a rank says of its own
    ("report", "S2048", ()),  # what it found out; the others take it over
    ("turn", np.int64, (COMMUNICATORS, RING)),  # of a communicator's collectives, from 1 on; 0: none yet
    ("name", "S64", (COMMUNICATORS, RING)),
    ("in_step", np.int64, (COMMUNICATORS, RING)),
    ("with_plan", "S16", (COMMUNICATORS, RING)),
    ("entered", np.float64, (COMMUNICATORS, RING)),
    ("left", np.float64, (COMMUNICATORS, RING)),  # 0: not yet
)  # fmt: skip


class HangError(RuntimeError):
    """A rank is missing, or failed, in a step that all run together. The process ends."""


def nbytes(size: int) -> int:
    """Shared memory that the watchdogs of `size` ranks need."""
    return sum(size * np.dtype(kind).itemsize * int(np.prod(shape, dtype=int)) for _, kind, shape in _FIELDS)


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a rank: the `turn`-th of its communicator, and whether the rank has left it."""

    turn: int
    name: str
    step: int
    digest: str
    left: bool


@dataclass(frozen=True, slots=True)
class RankState:
    """A rank as another sees it. `latest` has, for each communicator that it used, the collective it entered last."""

    pid: int
    process: str  # "runs", "stopped" or "gone"
    step: int
    failure: str
    latest: dict[int, Collective]


class Watchdog:
    """One rank's. `memory`: zeroed, of `nbytes(size)`, shared by the ranks. deadline: seconds that a step may take.

    on_hang is called with the report, from the watchdog's thread, before the process ends.
    """

    def __init__(self, rank: int, size: int, deadline: float, memory: mmap.mmap) -> None:
        self.rank, self.size, self.deadline = rank, size, deadline
        self.on_hang: Callable[[str], None] = lambda report: None
        self.report: str | None = None
        self.fields: dict[str, np.ndarray] = {}
        at = 0
        for name, kind, shape in _FIELDS:
            array = np.frombuffer(memory, kind, size * int(np.prod(shape, dtype=int)), at).reshape(size, *shape)
            self.fields[name] = array
            at += array.nbytes
        self._turns = [0] * COMMUNICATORS
        self._unseen = [0] * size  # looks in a row at which another process did not run
        self._pending: list[tuple[Callable[[], bool], tuple[int, int, int]]] = []
        self._aborts: list[Callable[[], object]] = []
        self._stop = threading.Event()
        self.fields["step"][rank] = -1
        self.fields["pid"][rank] = os.getpid()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def step(self, step: int, digest: str) -> Iterator[None]:
        """Around a step that all ranks run. Raises HangError at its end, or within, if it cannot count."""
        fields, rank = self.fields, self.rank
        self.enter_step(step)
        fields["digest"][rank] = digest.encode()
        fields["began"][rank] = time.monotonic()
        try:
            yield
            self.check()
        finally:
            fields["began"][rank] = 0.0

    def enter_step(self, step: int) -> None:
        """Collectives from here on are those of `step`, on every rank."""
        self.fields["step"][self.rank] = step

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Steps within it may take long: kernels are compiled."""
        deadline, self.deadline = self.deadline, 60 * self.deadline
        try:
            yield
        finally:
            self.deadline = deadline

    def unread(self, waits: bool) -> None:
        """Whether what this rank made waits for who reads its stream: the others may then wait for this rank."""
        self.fields["unread"][self.rank] = waits

    @contextmanager
    def collective(self, communicator: int, name: str) -> Iterator[tuple[int, int, int]]:
        """Around one of a communicator's collectives. Raises HangError if another rank is in another one at its turn.

        Gives the place of its record, for `ends_when`.
        """
        fields, rank = self.fields, self.rank
        turn = self._turns[communicator] = self._turns[communicator] + 1
        at = rank, communicator, turn % RING
        fields["left"][at], fields["turn"][at] = 0.0, 0
        fields["name"][at], fields["in_step"][at] = name.encode(), fields["step"][rank]
        fields["with_plan"][at], fields["entered"][at] = fields["digest"][rank], time.monotonic()
        fields["turn"][at] = turn
        # Of two ranks that differ, the one that comes second sees it here, and neither is answered by the other.
        for other in range(self.size):
            there = other, communicator, turn % RING
            if fields["turn"][there] == turn and _what(fields, there) != _what(fields, at):
                raise self._skipped(at, there)
        try:
            yield at
        except HangError:
            raise
        except RuntimeError as error:  # a peer's end is seen by the collective before it is seen here
            deadline = time.monotonic() + 2.0
            while self.report is None and time.monotonic() < deadline:
                time.sleep(0.05)
            if self.report is None:
                self.fail(error)
            raise HangError(self.report or f"{name} failed: {error}") from error
        fields["left"][at] = time.monotonic()

    def ends_when(self, ended: Callable[[], bool], at: tuple[int, int, int]) -> None:
        """The collective whose record is at `at` is only enqueued; it ends when `ended()`, which must not wait."""
        self.fields["left"][at] = 0.0
        self._pending.append((ended, at))

    def abort_with(self, abort: Callable[[], object]) -> None:
        """Call `abort` when ranks hang, to free what waits for them; on a thread of its own, as it may wait itself."""
        self._aborts.append(abort)

    def fail(self, error: Exception, rank: int | None = None) -> None:
        """Tell all ranks that this one, or `rank`, failed and will be missing; but not that it heard of another."""
        if isinstance(error, HangError) and (self.report is not None or self.fields["failure"].any()):
            return
        rank = self.rank if rank is None else rank
        if not self.fields["failure"][rank]:
            self.fields["failure"][rank] = f"{type(error).__name__}: {error}".encode()[:1000]

    def check(self) -> None:
        """Raises HangError if the ranks are known to hang."""
        if self.report is not None:
            raise HangError(self.report)

    def close(self) -> None:
        """End the thread: this rank leaves in good order."""
        self.fields["closed"][self.rank] = 1
        self._stop.set()
        self._thread.join()
        self._aborts.clear()

    def states(self) -> list[RankState]:
        """All ranks, as they are now."""
        found = []
        for rank in range(self.size):
            turns = self.fields["turn"][rank]
            latest = {}
            for communicator in np.flatnonzero(turns.any(1)).tolist():
                at = rank, communicator, int(turns[communicator].argmax())
                latest[communicator] = _collective(self.fields, at)
            pid, failure = int(self.fields["pid"][rank]), bytes(self.fields["failure"][rank]).decode(errors="replace")
            process = "runs" if self.fields["closed"][rank] else process_state(pid)
            found.append(RankState(pid, process, int(self.fields["step"][rank]), failure, latest))
        return found

    def _skipped(self, at: tuple[int, int, int], there: tuple[int, int, int]) -> HangError:
        """Two ranks are in different collectives at one turn: who is further on has skipped one."""
        first, second = sorted((at, there), key=lambda place: (self.fields["in_step"][place], place[0]))
        skipped, entered = (_text(self.fields, place) for place in (first, second))
        error = HangError(f"it skipped {skipped}, which rank {first[0]} is in, and entered {entered}")
        self.fail(error, second[0])
        return error

    def _watch(self) -> None:
        while not self._stop.wait(_TICK):
            while self._pending and self._pending[0][0]():
                self.fields["left"][self._pending.pop(0)[1]] = time.monotonic()
            if self._in_trouble():
                self._give_up()
                return

    def _in_trouble(self) -> bool:
        began = [float(self.fields["began"][self.rank])]
        began += [float(self.fields["entered"][at]) for _, at in self._pending[:1]]  # on the device, after the step
        if any(each and time.monotonic() - each > self.deadline for each in began) and not self.fields["unread"].any():
            return True
        if self.fields["failure"].any() or self.fields["report"].any():
            return True
        for rank, pid in enumerate(self.fields["pid"].tolist()):
            process = "runs" if rank == self.rank or not pid or self.fields["closed"][rank] else process_state(pid)
            self._unseen[rank] = 0 if process == "runs" else self._unseen[rank] + 1
            if self._unseen[rank] * _TICK > (_GONE if process == "gone" else _STOPPED):
                return True
        return False

    def _give_up(self) -> None:
        end = threading.Timer(GRACE, os._exit, (EXIT_CODE,))
        end.daemon = True
        end.start()  # before anything that can fail: the process ends whatever comes of the rest
        known = [bytes(report).decode() for report in self.fields["report"] if report]
        self.report = known[0] if known else diagnose(self.states())
        self.fields["report"][self.rank] = self.report.encode()[:2000]
        lines = [f"rank {self.rank}: {self.report}", *(f"  {line}" for line in self._ring())]
        try:
            os.write(2, ("\n".join(lines) + "\n").encode())
            faulthandler.dump_traceback(2, all_threads=True)
        finally:  # stderr may be closed
            for abort in self._aborts:
                threading.Thread(target=abort, name="abort", daemon=True).start()
            self.on_hang(self.report)
        end.join()  # so that `close` does not let this rank leave as if in good order

    def _ring(self) -> list[str]:
        """This rank's last collectives, the oldest first."""
        fields = self.fields
        places = [(self.rank, int(c), int(i)) for c, i in np.argwhere(fields["turn"][self.rank])]
        lines = []
        for at in sorted(places, key=lambda at: float(fields["entered"][at])):
            entered, left = float(fields["entered"][at]), float(fields["left"][at])
            took = f"left after {(left - entered) * 1e3:.1f} ms" if left else "not left"
            ago = time.monotonic() - entered
            lines.append(f"{_text(fields, at)}: entered {ago:.1f} s ago, {took}")
        return lines


def diagnose(states: list[RankState]) -> str:
    """One line that names the missing rank, and the collective that waits for it."""
    waiting = [
        (communicator, entered, rank)
        for rank, state in enumerate(states)
        for communicator, entered in state.latest.items()
        if not entered.left
    ]

    def missing(rank: int, why: str) -> str:
        waits = [entered for _, entered, other in waiting if other != rank]
        line = f"rank {rank} is missing: {why}"
        if waits:
            line += f"; {waits[0].name} of step {waits[0].step} (plan {waits[0].digest or 'none'}) waits for it"
        return line

    for rank, state in enumerate(states):
        if state.process != "runs":
            return missing(rank, f"its process {state.pid} is {state.process}")
    for rank, state in enumerate(states):
        if state.failure:
            return missing(rank, f"in step {state.step}, {state.failure}")
    for communicator, entered, _ in waiting:
        for rank, state in enumerate(states):
            last = state.latest.get(communicator)
            if last is None or last.turn < entered.turn:
                where = f"last in {last.name} of step {last.step}" if last else "in none yet"
                return missing(rank, f"it has not entered {entered.name} of step {entered.step}, {where}")
    steps = ", ".join(f"rank {rank} in step {state.step}" for rank, state in enumerate(states))
    return f"a step took too long, and no rank waits for another: {steps}"


def process_state(pid: int) -> str:
    """Of a process of this machine: "runs", "stopped" or "gone"."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    return {"T": "stopped", "Z": "gone", "X": "gone"}.get(state, "runs")


def _collective(fields: dict[str, np.ndarray], at: tuple[int, int, int]) -> Collective:
    name, digest = bytes(fields["name"][at]).decode(), bytes(fields["with_plan"][at]).decode()
    return Collective(int(fields["turn"][at]), name, int(fields["in_step"][at]), digest, bool(fields["left"][at]))


def _what(fields: dict[str, np.ndarray], at: tuple[int, int, int]) -> tuple[bytes, int]:
    return bytes(fields["name"][at]), int(fields["in_step"][at])


def _text(fields: dict[str, np.ndarray], at: tuple[int, int, int]) -> str:
    entry = _collective(fields, at)
    return f"{entry.name} of step {entry.step} (plan {entry.digest or 'none'})"
