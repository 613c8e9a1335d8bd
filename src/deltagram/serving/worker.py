"""The engine process: reads requests from the server's socket, runs steps, writes what they bring.

Messages of the server (channel.py): first the keywords of LLM; then
    {"add": first id, "prompts": [{"tokens", "seeds"}], "params", "grammar", "salt"}, a sequence for each seed, and
    {"abort": [id]}.
Messages to it: first {"model", ...}, what the server must know, or {"refused": why}; then
    {"request": first id, "accepted": true} or {"request": first id, "refused": why}, and after each step
    {"deltas": [[id, text, token ids, logprobs, finish reason, error]], "step": ..., "counts": ..., "gauges": ...}.
It ends when the server is gone, however that came about.
"""

import logging
import os
import queue
import signal
import socket
import sys
import threading
from typing import Any

from deltagram.engine.engine import Delta
from deltagram.engine.params import SamplingParams
from deltagram.engine.request import Request
from deltagram.llm import LLM
from deltagram.models.base import Model
from deltagram.ngram.cached import CachedStore
from deltagram.serving import channel
from deltagram.serving.faults import describe
from deltagram.serving.grammar import GrammarConstraint, GrammarError, Grammars

log = logging.getLogger("deltagram")
COUNTS = (
    "prefill_tokens",
    "decode_tokens",
    "drafted_tokens",
    "accepted_tokens",
    "padding_tokens",
    "memory_rows",
    "preemptions",
    "eager_segments",
    "run_ahead_hits",
    "run_ahead_stalls",
    "run_ahead_stall_seconds",
    "prefix_hits",
    "prefix_tokens",
    "prefix_evictions",
    "num_steps",
)
CACHE_STEPS = 256  # from one look at the counts of cached rows to the next: the device is waited for


Made = list[GrammarConstraint | None] | GrammarError


class Worker:
    """Serves one engine to one server. `inbox` holds messages with what reading them has made already."""

    def __init__(self, llm: LLM, connection: socket.socket) -> None:
        self.engine, self.connection = llm.engine, connection
        stores = getattr(llm.engine.model, "stores", ())
        self._caches, self._next_look = [store for store in stores if isinstance(store, CachedStore)], 1
        ends = llm.engine.end_token_ids
        self.grammars = Grammars(llm.tokenizer, llm.config.vocab_size, ends) if ends else None
        self.inbox: queue.SimpleQueue[tuple[dict[str, Any], Made]] = queue.SimpleQueue()
        self.requests: dict[int, Request] = {}  # by the server's ids
        self.ids: dict[int, int] = {}  # of the server, by request id

    def read(self, file: Any) -> None:
        """Read messages until the server is gone, then end the process. Grammars are compiled here, beside steps."""
        while (message := channel.read(file)) is not None:
            try:
                self.inbox.put((message, self._constraints(message)))
            except GrammarError as error:
                self.inbox.put((message, error))
        os._exit(0)  # in the middle of a step, if need be

    def _constraints(self, message: dict[str, Any]) -> list[GrammarConstraint | None]:
        """One for each sequence of a message."""
        if "add" not in message:
            return []
        count = sum(len(prompt["seeds"]) for prompt in message["prompts"])
        if message["grammar"] is None:
            return [None] * count
        if self.grammars is None:
            raise GrammarError("structured output needs a model with an end token")
        return [self.grammars.constraint(message["grammar"]) for _ in range(count)]

    def run(self) -> None:
        """Run steps for ever."""
        while True:
            self._take(wait=not self.engine.has_work)
            while not self.inbox.empty():
                self._take(wait=False)
            before = self.engine.stats.num_steps
            deltas = self.engine.step()
            self._tell(deltas, stepped=self.engine.stats.num_steps > before)

    def _take(self, wait: bool) -> None:
        try:
            message, made = self.inbox.get(block=wait)
        except queue.Empty:
            return
        if "add" in message:
            self._add(message, made)
        else:
            for sequence in message["abort"]:
                if (request := self.requests.pop(sequence, None)) is not None:
                    del self.ids[request.id]
                    self.engine.abort(request)

    def _add(self, message: dict[str, Any], made: Made) -> None:
        first = message["add"]
        try:
            if isinstance(made, GrammarError):
                raise made
            requests = self._make(message, made)
        except ValueError as error:
            self._send({"request": first, "refused": str(error)})
            return
        for sequence, request in enumerate(requests, first):
            self.requests[sequence], self.ids[request.id] = request, sequence
            self.engine.add(request)
        self._send({"request": first, "accepted": True})

    def _make(self, message: dict[str, Any], constraints: list[GrammarConstraint | None]) -> list[Request]:
        values = message["params"]
        if values["logit_bias"] is not None:
            values["logit_bias"] = {int(token): bias for token, bias in values["logit_bias"].items()}
        params = SamplingParams(**values)
        wanted = [(prompt["tokens"], seed) for prompt in message["prompts"] for seed in prompt["seeds"]]
        return [
            self.engine.make_request(tokens, params, seed, constraint=constraint, salt=message["salt"])
            for (tokens, seed), constraint in zip(wanted, constraints, strict=True)
        ]

    def _tell(self, deltas: list[Delta], stepped: bool) -> None:
        engine, stats, pages = self.engine, self.engine.stats, self.engine.scheduler.pages
        errors = [delta.error for delta in deltas if delta.error and not isinstance(delta.error, GrammarError)]
        for error in errors[:1]:
            log.error("a step failed:\n%s", describe(error))
        self._send(
            {
                "deltas": [self._plain(delta) for delta in deltas],
                "step": stats.steps[-1] if stepped else None,
                "counts": {name: getattr(stats, name) for name in COUNTS},
                "prefix_misses": _public(stats.prefix_misses),
                "cached_rows": self._cached_rows(),
                "gauges": {
                    "running": len(engine.scheduler.running),
                    "waiting": len(engine.scheduler.waiting),
                    "pages_used": pages.num_pages - pages.num_free - pages.num_idle,
                    "prefix_pages": pages.num_idle,
                    "slots_used": engine.scheduler.slots.num_slots - engine.scheduler.slots.num_free,
                    "prefix_checkpoints": stats.prefix_checkpoints,
                },
            }
        )

    def _cached_rows(self) -> tuple[int, int] | None:
        """Rows that caches of n-gram rows had, and rows that were asked of them; None where it is not yet time."""
        steps = self.engine.stats.num_steps
        if self._caches and steps >= self._next_look:
            self._next_look = steps + CACHE_STEPS
            return sum(int(c.hits) for c in self._caches), sum(int(c.lookups) for c in self._caches)
        return None

    def _plain(self, delta: Delta) -> list[Any]:
        sequence = self.ids[delta.request.id]
        if delta.finish_reason is not None:
            del self.requests[sequence], self.ids[delta.request.id]
        logprobs = [[entry.token_id, entry.logprob, entry.top] for entry in delta.logprobs]
        logprobs_or_none = logprobs if delta.request.params.logprobs is not None else None
        return [sequence, delta.text, delta.token_ids, logprobs_or_none, delta.finish_reason, _told(delta.error)]

    def _send(self, message: dict[str, Any]) -> None:
        self.connection.sendall(channel.pack(message))


def _told(error: Exception | None) -> str | None:
    """What a client is told of an error: of a step that it shared with others, the kind alone."""
    if error is None:
        return None
    if isinstance(error, GrammarError):
        return str(error)
    return f"the step that ran this request failed ({type(error).__name__})"


def _public(misses: dict[str, int]) -> dict[str, int]:
    """Misses of the prefix cache as anybody with a key may read them: whether another key has asked for the same shall
    not be told."""
    public = {reason: count for reason, count in misses.items() if reason != "salt"}
    if "salt" in misses:
        public["no_entry"] = public.get("no_entry", 0) + misses["salt"]
    return public


def facts(llm: LLM) -> dict[str, Any]:
    """What the server must know of the model."""
    engine = llm.engine
    return {
        "folder": str(llm.folder),
        "vocab_size": llm.config.vocab_size,
        "max_length": engine.max_length,
        "max_num_sequences": engine.settings.max_num_sequences,
        "end_token_ids": engine.end_token_ids,
        "num_pages": engine.stats.num_pages,
        "tables": _tables(engine.model),
        "device": str(engine.settings.device),
        "notes": llm.notes,
    }


def _tables(model: Model) -> list[tuple[str, int, int]]:
    """(tier, rows, bytes of rows) of every table of n-gram rows, and of every cache of one."""
    found = []
    for store in getattr(model, "stores", ()):
        if isinstance(store, CachedStore):
            found.append(("cached", store.num_slots, store.num_slots * store.format.row_bytes))
            store = store.below
        tier = type(store).__name__.removesuffix("Store").lower()
        found.append((tier, store.num_rows, store.num_rows * store.format.row_bytes))
    return found


def serve(descriptor: int) -> None:
    """Load the model that the server at this socket asks for, and run it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server says when it is time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(format="%(levelname)s engine: %(message)s")
    connection = socket.socket(fileno=descriptor)
    file = connection.makefile("rb")
    options = channel.read(file)
    if options is None:
        return
    try:
        llm = LLM(**options)
        worker = Worker(llm, connection)
    except (ValueError, OSError) as error:
        connection.sendall(channel.pack({"refused": str(error)}))
        return
    connection.sendall(channel.pack(facts(llm)))
    threading.Thread(target=worker.read, args=(file,), daemon=True).start()
    try:
        worker.run()
    except BaseException as error:  # the device has failed, or the engine may be in any state
        log.critical("the engine failed:\n%s", describe(error))
        os._exit(1)  # at once: an orderly end might wait for the device


if __name__ == "__main__":
    serve(int(sys.argv[1]))
