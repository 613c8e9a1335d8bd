"""HTTP around the routes: who may ask, how bodies are read, how answers are streamed, and what errors look like."""

import asyncio
import hashlib
import hmac
import logging
import time
from base64 import b64decode
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from fastapi import HTTPException, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deltagram.serving.faults import describe
from deltagram.serving.limits import Limits

log = logging.getLogger("deltagram")
T = TypeVar("T")
TYPES = {401: "authentication_error", 404: "not_found_error", 503: "overloaded_error"}
CLOSE = {"Connection": "close"}  # the rest of the body is not read
DISCARDED = 16  # times max_body_bytes: what is read of a body that is too large, so that its sender hears why


def error_response(
    status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None
) -> Response:
    """An error as OpenAI's clients read it."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    error = {"message": message, "type": kind, "param": None, "code": code}
    return JSONResponse({"error": error}, status, headers)


def unavailable(message: str, limits: Limits) -> Response:
    return error_response(503, message, headers={"Retry-After": str(limits.retry_after_seconds)})


class Gate(Protocol):
    """What the guard asks of the server, and tells it."""

    def refuses_generation(self) -> str | None:
        """Why not, or None."""

    def has_shed(self, seconds: float) -> None:
        """A request that generates was answered with 503, `seconds` after it had been read."""


class Guard:
    """The outermost layer: the API key, on every route but /live; the bound on open requests; the last word on faults.

    `generating` counts open requests to the paths of `generates`.
    keys: any of them opens, sent as a bearer token or, for browsers, as the password of basic authentication. The salt
    of a request, in its scope, is a hash of its key.
    """

    def __init__(self, app: ASGIApp, gate: Gate, limits: Limits, keys: Sequence[str], generates: Sequence[str]) -> None:
        self.app, self.gate, self.limits, self.generates = app, gate, limits, frozenset(generates)
        self.digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self.open = self.generating = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/live":
            await self.app(scope, receive, send)
            return
        generating = scope["path"] in self.generates
        scope["read"] = time.perf_counter()

        async def watched(message: Message) -> None:
            if generating and message["type"] == "http.response.start" and message["status"] == 503:
                self.gate.has_shed(time.perf_counter() - scope["read"])
            await send(message)

        self.open += 1
        self.generating += generating
        try:
            refusal = self._refusal(scope)
            await (self._run(scope, receive, watched) if refusal is None else refusal(scope, receive, watched))
        finally:
            self.open -= 1
            self.generating -= generating

    def _refusal(self, scope: Scope) -> Response | None:
        if self.open > self.limits.max_connections:
            return unavailable(f"{self.open - 1} requests are open", self.limits)
        salt = self._salt(scope)
        if salt is None:
            headers = {"WWW-Authenticate": 'Basic realm="deltagram: the API key is the password", charset="UTF-8"'}
            return error_response(401, "the API key is missing or wrong", "invalid_api_key", headers)
        scope["salt"] = salt
        if scope["path"] in self.generates and (why := self.gate.refuses_generation()):
            return unavailable(why, self.limits)
        return None

    def _salt(self, scope: Scope) -> str | None:
        """The identity of who asks, "" if anyone may, or None if it is not known."""
        if not self.digests:
            return ""
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, value = header.partition(b" ")
        if scheme.lower() == b"basic":
            try:
                value = b64decode(value, validate=True).partition(b":")[2]
            except ValueError:
                value = b""
        elif scheme.lower() != b"bearer":
            value = b""
        digest = hashlib.sha256(value.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self.digests]  # all of them, whichever fits
        return digest.hex() if any(matches) else None

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception as error:  # its message may quote a prompt: neither the log nor the client gets it
            log.error("%s %s failed:\n%s", scope["method"], scope["path"], describe(error))
            if not started:
                await error_response(500, f"internal error ({type(error).__name__})")(scope, receive, send)


class LimitedRequest(Request):
    """Reads a body within its limits, and JSON without what JSON does not have: NaN, infinities, lone surrogates,
    endless nesting."""

    limits: Limits

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            try:
                async with asyncio.timeout(self.limits.max_body_seconds):
                    self._body = await self._read()
            except TimeoutError:
                message = f"the body took longer than {self.limits.max_body_seconds:g} s"
                raise HTTPException(408, message, CLOSE) from None
            self.scope["read"] = time.perf_counter()
        return self._body

    async def _read(self) -> bytes:
        limit = self.limits.max_body_bytes
        pieces, size = [], 0
        async for piece in self.stream():
            size += len(piece)
            if size <= limit:
                pieces.append(piece)
            elif size > DISCARDED * limit:
                break
        if size > limit:
            raise HTTPException(413, f"the body must have at most {limit} bytes", CLOSE)
        return b"".join(pieces)

    async def json(self) -> Any:
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise HTTPException(400, f"the body is not valid JSON: {str(error)[:200]}") from None


def limited_route(limits: Limits) -> type[APIRoute]:
    """A route whose requests are LimitedRequests."""

    class LimitedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()

            async def limited(request: Request) -> Response:
                inner = LimitedRequest(request.scope, request.receive)
                inner.limits = limits
                return await handler(inner)

            return limited

    return LimitedRoute


class ClientGone(Exception):
    """The client hung up; there is nobody to answer."""


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled, with ClientGone, when the client hangs up. The body has been read."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for each in (task, watch):
            each.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await each


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. `ended` is called however it ends: all sent, client gone, or a reader that takes nothing."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], ended: Callable[[], None], max_send_seconds: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.events, self.ended, self.max_send_seconds = events, ended, max_send_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientGone, TimeoutError):  # the connection is closed then
                await unless_gone(receive, self._send(send))
        finally:
            self.ended()

    async def _send(self, send: Send) -> None:
        async def bounded(message: Message) -> None:
            async with asyncio.timeout(self.max_send_seconds):
                await send(message)

        await bounded({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for event in self.events:
                await bounded({"type": "http.response.body", "body": event, "more_body": True})
        finally:
            await self.events.aclose()
        await bounded({"type": "http.response.body", "body": b""})
