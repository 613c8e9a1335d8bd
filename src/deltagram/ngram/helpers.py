"""Helper threads that cannot leave the engine waiting: a dead or stuck one is a named error within seconds."""

import queue
import threading
import time
from collections.abc import Callable, Sequence

PATIENCE = 4.0  # seconds


class HelperError(RuntimeError):
    """A helper thread or process died or is stuck; what it was to bring will not come."""


class Workers:
    """`count` threads that run jobs side by side. `name` is what they do, for the error; `patience` how many seconds
    may pass without any job ending."""

    def __init__(self, count: int, name: str, patience: float | None = None) -> None:
        self.name, self.patience = name, PATIENCE if patience is None else patience
        self._jobs: queue.SimpleQueue[tuple[int, Callable[[], None]] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()
        self._turn = 0
        self._lock = threading.Lock()
        self.threads = [threading.Thread(target=self._work, name=f"{name} {i}", daemon=True) for i in range(count)]
        for thread in self.threads:
            thread.start()

    def run(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Run all jobs, in any order, to their end. Raises the first error of a job, or HelperError."""
        with self._lock:
            self._turn += 1
            self._check()
            for job in jobs:
                self._jobs.put((self._turn, job))
            left, quiet_since = len(jobs), time.monotonic()
            while left:
                try:
                    turn, error = self._done.get(timeout=0.1)
                except queue.Empty:
                    self._check()
                    if time.monotonic() - quiet_since > self.patience:
                        message = f"{self.name}: no helper thread finished anything for {self.patience:g} s"
                        raise HelperError(f"{message}; {left} of {len(jobs)} jobs are open") from None
                    continue
                quiet_since = time.monotonic()
                if turn != self._turn:
                    continue  # of an earlier call that gave up
                if error is not None:
                    raise error
                left -= 1

    def close(self) -> None:
        """Let the threads end."""
        for _ in self.threads:
            self._jobs.put(None)

    def _check(self) -> None:
        dead = [thread.name for thread in self.threads if not thread.is_alive()]
        if dead:
            raise HelperError(f"helper thread {', '.join(dead)} has died")

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            turn, job = item
            try:
                job()
            except Exception as error:
                self._done.put((turn, error))
            else:
                self._done.put((turn, None))
