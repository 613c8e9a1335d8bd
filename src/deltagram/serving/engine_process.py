"""The server's side of the engine process: starts it, admits requests to it, and hands out what it brings.

The engine runs in a process of its own, so that Python work on HTTP never delays a step, and so that a crash of the
one is an answer from the other. What is admitted always ends: with its last token, or with an error.
"""

import asyncio
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from deltagram.serving import channel
from deltagram.serving.faults import describe
from deltagram.serving.limits import Limits
from deltagram.serving.metrics import Metrics

log = logging.getLogger("deltagram")
WORKER = (sys.executable, "-m", "deltagram.serving.worker")
GONE = "the engine process has ended"


class Overloaded(Exception):
    """The queue is full."""


class EngineFailed(Exception):
    """The request cannot be finished; message and HTTP status are for its client."""

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class Piece:
    """What was added to sequence `index` of a request. logprobs: (token, logprob, alternatives) for each token."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] | None = None
    finish_reason: str | None = None

    def add(self, later: "Piece") -> None:
        self.text += later.text
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        self.finish_reason = later.finish_reason


class Flight:
    """A request between its admission and its end: sequences 0 to `count` - 1, each with `tokens` prompt tokens."""

    def __init__(self, first_id: int, lengths: Sequence[int], limit: int) -> None:
        self.ids = {first_id + i: i for i in range(len(lengths))}  # of sequences that have not ended
        self.waiting = dict(enumerate(lengths))  # prompt tokens of sequences without a token yet
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.began = time.perf_counter()
        self._progress: dict[int, tuple[float, float, int]] = {}  # first time, last time, tokens
        self._pieces: dict[int, Piece] = {}
        self._unread, self._limit = 0, limit
        self._error: Exception | None = None
        self.timer: asyncio.TimerHandle
        self._news = asyncio.Event()

    @property
    def ended(self) -> bool:
        return not self.ids

    async def take(self) -> list[Piece]:
        """What came since the last call, one piece a sequence; waits for something. [] once all has been taken.

        Raises EngineFailed if the request failed; what came before is lost then.
        """
        while not self._pieces and not self.ended and self._error is None:
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            raise self._error
        pieces = [self._pieces[index] for index in sorted(self._pieces)]
        self._pieces, self._unread = {}, 0
        return pieces

    def put(self, sequence: int, piece: Piece, now: float) -> None:
        """Take what came for a sequence at time `now`."""
        self.waiting.pop(piece.index, None)
        first, _, count = self._progress.get(piece.index, (now, now, 0))
        self._progress[piece.index] = first, now, count + len(piece.token_ids)
        if piece.finish_reason is not None:
            del self.ids[sequence]
        if piece.index in self._pieces:
            self._pieces[piece.index].add(piece)
        else:
            self._pieces[piece.index] = piece
        self._unread += 1
        if self._unread > self._limit:
            self.fail(EngineFailed("the answer was not read as fast as it was written"))
        self._news.set()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def seconds_per_token(self, index: int) -> float | None:
        """Of a sequence after its first token, if there were more."""
        first, last, count = self._progress[index]
        return (last - first) / (count - 1) if count > 1 else None

    def fail(self, error: Exception) -> None:
        """End the request. A refusal reaches whoever waits for its admission."""
        self._error = error
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # it may be that nobody waits any more
        self._news.set()


class EngineProcess:
    """A running engine process. `facts` is what it said of the model when it was ready (worker.py)."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        limits: Limits,
        metrics: Metrics,
    ) -> None:
        self.process, self.limits, self.metrics = process, limits, metrics
        self._reader, self._writer = reader, writer
        self.facts: dict[str, Any] = {}
        self.alive = False
        self._listener: asyncio.Task[None] | None = None  # kept, or it could be collected
        self._flights: dict[int, Flight] = {}  # by sequence id
        self._next_id = 0
        self._reserved = 0  # places of requests that are being prepared
        self._moved = time.perf_counter()

    @staticmethod
    async def start(
        options: dict[str, Any], limits: Limits, metrics: Metrics, command: Sequence[str] = WORKER
    ) -> "EngineProcess":
        """Start a process that loads the model of `options` (the keywords of LLM), and wait until it is ready.

        Raises ValueError with what it said if it refused, RuntimeError if it ended without a word.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            process = subprocess.Popen(
                [*command, str(descriptor)],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a ctrl-C in the terminal is for the server, which then tells the engine
            )
        engine = EngineProcess(process, *await asyncio.open_connection(sock=ours), limits, metrics)
        engine._send(options)
        try:
            said = await channel.receive(engine._reader)
        except BaseException:
            await engine.stop()
            raise
        if said is None or "refused" in said:
            await engine.stop()
            if said is None:
                raise RuntimeError("the engine process ended while it loaded the model; see its messages above")
            raise ValueError(said["refused"])
        engine.facts, engine.alive = said, True
        engine._listener = asyncio.create_task(engine._listen())
        return engine

    @property
    def in_flight(self) -> int:
        """Sequences that have been admitted and have not ended."""
        return len(self._flights)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of sequences that have no token yet."""
        flights = {id(flight): flight for flight in self._flights.values()}
        return sum(sum(flight.waiting.values()) for flight in flights.values())

    @property
    def overload(self) -> str | None:
        """Why not one more sequence could be admitted now, whatever it is, or None."""
        if (queued := self.queued_tokens) >= self.limits.max_queued_tokens:
            return f"{queued} prompt tokens wait"
        return None if self._has_room(1) else f"{self.in_flight + self._reserved} sequences run or wait"

    @contextmanager
    def reserve(self, count: int) -> Iterator[None]:
        """Keep places for `count` sequences while they are prepared and admitted, so that who will find none hears so
        before any work is done for it. Raises Overloaded."""
        if not self._has_room(count):
            others = self.in_flight + self._reserved
            raise Overloaded(f"{others} sequences run or wait; there is no room for {count} more")
        self._reserved += count
        try:
            yield
        finally:
            self._reserved -= count

    def _has_room(self, count: int) -> bool:
        places = self.facts["max_num_sequences"] + self.limits.max_queued
        return self.in_flight + self._reserved + count <= places

    @property
    def stalled(self) -> bool:
        """There is work, and no step has moved lately."""
        return bool(self._flights) and time.perf_counter() - self._moved > self.limits.stall_seconds

    def admit(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]],
        params: dict[str, Any],
        grammar: dict[str, Any] | None,
        salt: str,
        deadline: float,
    ) -> Flight:
        """Queue a sequence for each seed of each prompt, within `reserve` of as many. Await `accepted`: it raises
        ValueError if the engine refuses. At `deadline` (of the event loop's clock) the request fails.

        Raises Overloaded if too many prompt tokens wait, EngineFailed if there is no engine.
        """
        if not self.alive:
            raise EngineFailed(GONE, 503)
        lengths = [len(prompt) for prompt, own in zip(prompts, seeds, strict=True) for _ in own]
        queued = self.queued_tokens
        if queued and queued + sum(lengths) > self.limits.max_queued_tokens:
            raise Overloaded(f"{queued} prompt tokens wait; there is no room for {sum(lengths)} more")
        overdue = EngineFailed(f"the answer took longer than {self.limits.max_request_seconds:g} s", 504)
        flight = Flight(self._next_id, lengths, self.limits.max_unread * len(lengths))
        self._next_id += len(lengths)
        flight.timer = asyncio.get_running_loop().call_at(deadline, flight.fail, overdue)
        if not self._flights:
            self._moved = time.perf_counter()
        self._flights |= dict.fromkeys(flight.ids, flight)
        listed = [{"tokens": list(prompt), "seeds": list(own)} for prompt, own in zip(prompts, seeds, strict=True)]
        first = next(iter(flight.ids))
        self._send({"add": first, "prompts": listed, "params": params, "grammar": grammar, "salt": salt})
        return flight

    def abort(self, flight: Flight) -> None:
        """End what is left of a request; nothing more comes of it. Every request must be given here in the end."""
        flight.timer.cancel()
        left = [sequence for sequence in flight.ids if self._flights.pop(sequence, None)]
        flight.ids.clear()
        if left and self.alive:
            self._send({"abort": left})

    async def stop(self) -> None:
        """End the process now, whatever it does."""
        self.alive = False
        self._writer.close()
        self.process.kill()
        await asyncio.to_thread(self.process.wait)

    def fail_all(self, error: Exception) -> None:
        """End every request with an error."""
        for flight in set(self._flights.values()):
            self.abort(flight)
            flight.fail(error)

    def kill(self) -> None:
        """`stop`, for whoever cannot wait."""
        self.process.kill()

    def _send(self, message: dict[str, Any]) -> None:
        self._writer.write(channel.pack(message))

    async def _listen(self) -> None:
        try:
            while (message := await channel.receive(self._reader)) is not None:
                self._moved = time.perf_counter()
                if "accepted" in message or "refused" in message:
                    self._answer(message)
                else:
                    self._deliver(message["deltas"])
                    self.metrics.step(message)
        except Exception as error:  # nobody would hear the engine any more
            log.critical("what the engine said could not be taken:\n%s", describe(error))
            self.process.kill()
        was_alive, self.alive = self.alive, False
        self.fail_all(EngineFailed(GONE, 503))
        code = await asyncio.to_thread(self.process.wait)
        if was_alive:
            log.critical("the engine process has ended, with exit code %d", code)

    def _answer(self, message: dict[str, Any]) -> None:
        flight = self._flights.get(message["request"])
        if flight is None:  # aborted meanwhile
            return
        if "accepted" in message:
            flight.accepted.set_result(None)
            return
        for sequence in flight.ids:
            del self._flights[sequence]
        flight.fail(ValueError(message["refused"]))

    def _deliver(self, deltas: Sequence[Sequence[Any]]) -> None:
        for sequence, text, token_ids, logprobs, reason, error in deltas:
            flight = self._flights.get(sequence)
            if flight is None:
                continue
            if error is not None:
                self.abort(flight)
                flight.fail(EngineFailed(error))
                continue
            index, now = flight.ids[sequence], time.perf_counter()
            if index in flight.waiting:
                self.metrics.ttft.observe(now - flight.began)
            if reason is not None:
                del self._flights[sequence]
            flight.put(sequence, Piece(index, text, token_ids, logprobs, reason), now)
            if reason is not None and (seconds := flight.seconds_per_token(index)) is not None:
                self.metrics.tpot.observe(seconds)
            if flight.failed:
                self.abort(flight)
