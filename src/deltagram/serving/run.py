"""`deltagram serve`: from the command to a running server, and its orderly end."""

import asyncio
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn

from deltagram.serving.engine_process import WORKER, EngineFailed, EngineProcess
from deltagram.serving.limits import Limits
from deltagram.serving.metrics import Metrics
from deltagram.serving.server import Server

log = logging.getLogger("deltagram")
OTHER_FILES = 256  # those that are no connections
LAST_WORDS_SECONDS = 2.0  # for error events to be written once the grace time is over


class _Http(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are `serve`'s."""
        yield


async def serve(
    options: dict[str, Any],
    *,
    name: str,
    host: str,
    port: int,
    limits: Limits,
    keys: Sequence[str] = (),
    command: Sequence[str] = WORKER,
    ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve the model of `options` (the keywords of LLM) until SIGTERM or SIGINT; the second of them ends at once.

    `ready` gets the server's address. Raises ValueError or OSError for what the user can put right.
    """
    _allow_files(2 * limits.max_connections + OTHER_FILES)
    with _listen(host, port, limits.max_send_seconds) as listener:
        metrics = Metrics()
        engine = await EngineProcess.start(options, limits, metrics, command)
        try:
            for note in engine.facts["notes"]:
                log.warning("note: %s", note)
            server = Server(engine, name, limits, keys, metrics)
            http = _Http(
                uvicorn.Config(
                    server.app, ws="none", lifespan="off", access_log=False, log_config=None, log_level="warning",
                    server_header=False, timeout_graceful_shutdown=int(LAST_WORDS_SECONDS),
                )
            )  # fmt: skip
            _handle_signals(engine, server, http)
            ready(_url(listener))
            await http.serve(sockets=[listener])
        finally:
            await engine.stop()


def _handle_signals(engine: EngineProcess, server: Server, http: uvicorn.Server) -> None:
    loop = asyncio.get_running_loop()
    draining: list[asyncio.Task[None]] = []

    def handle(number: int) -> None:
        if draining:
            engine.kill()
            os._exit(128 + number)
        draining.append(loop.create_task(_drain(engine, server, http)))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle, number)


async def _drain(engine: EngineProcess, server: Server, http: uvicorn.Server) -> None:
    """Take nothing new, let what runs finish, and tell what does not."""
    server.draining = True
    log.warning("shutting down: %d sequences have %g s to finish", engine.in_flight, server.limits.grace_seconds)
    if not await _idle(server, server.limits.grace_seconds):
        engine.fail_all(EngineFailed("the server is shutting down", 503))
        await _idle(server, LAST_WORDS_SECONDS)
    http.should_exit = True


async def _idle(server: Server, seconds: float) -> bool:
    """Whether no request that generates is open before `seconds` have passed."""
    deadline = asyncio.get_running_loop().time() + seconds
    while server.app.generating:
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True


def _listen(host: str, port: int, max_send_seconds: float) -> socket.socket:
    """A listening socket. Where the system can, connections whose other side takes nothing are cut by it, once the
    server has given them up."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol by its name, or asyncio leaves Nagle's algorithm on, which holds small writes back for 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(max_send_seconds * 1000))
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    return listener


def _allow_files(count: int) -> None:
    """Have the system allow as many open files, or what it allows at most: a connection is one, and whose connection
    cannot be taken would hear nothing at all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
