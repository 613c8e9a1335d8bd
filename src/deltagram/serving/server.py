"""The routes: OpenAI's, and those for operators."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic_core import to_json
from starlette.exceptions import HTTPException as StarletteHTTPException

from deltagram import __version__
from deltagram.engine.tokenizer import Tokenizer
from deltagram.serving import protocol, reference
from deltagram.serving.answers import Answer, ChatAnswer, CompletionAnswer
from deltagram.serving.engine_process import GONE, EngineFailed, EngineProcess, Flight, Overloaded, Piece
from deltagram.serving.grammar import Grammars
from deltagram.serving.http import (
    ClientGone,
    EventStream,
    Guard,
    error_response,
    limited_route,
    unavailable,
    unless_gone,
)  # fmt: skip
from deltagram.serving.limits import Limits
from deltagram.serving.metrics import Metrics

GENERATES = ("/v1/completions", "/v1/chat/completions")
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Server:
    """Answers requests with one engine process. `app` is the ASGI application; `draining` closes the door."""

    def __init__(self, engine: EngineProcess, name: str, limits: Limits, keys: Sequence[str], metrics: Metrics) -> None:
        self.engine, self.name, self.limits, self.metrics = engine, name, limits, metrics
        facts = engine.facts
        self.tokenizer = Tokenizer.load(facts["folder"], model_vocab_size=facts["vocab_size"])
        ends = tuple(facts["end_token_ids"])
        longest = max(map(len, self.tokenizer.backend.get_vocab()))
        self.max_characters = facts["max_length"] * longest  # of a text whose tokens are worth counting
        self.grammars = Grammars(self.tokenizer, facts["vocab_size"], ends) if ends else None
        self.compiler = ThreadPoolExecutor(1, "compile")
        self.draining = False
        self.created = int(time.time())
        metrics.model(facts)
        metrics.in_flight.set_function(lambda: engine.in_flight)
        self.api = self._api()
        self.app = Guard(self.api, self, limits, keys, GENERATES)

    def _api(self) -> FastAPI:
        text = "An OpenAI-compatible server."
        api = FastAPI(title="deltagram", version=__version__, description=text, docs_url=None, redoc_url=None)
        router = APIRouter(route_class=limited_route(self.limits))
        answers: dict[int | str, dict[str, Any]] = {
            status: {"description": text}
            for status, text in {400: "Refused", 401: "No valid API key", 404: "No such model", 408: "Slow body",
                                 413: "Body too large", 503: "Overloaded, draining or broken", 504: "Too slow"}.items()
        }  # fmt: skip

        def route(method: str, path: str, handler: Callable[..., Any]) -> None:
            router.add_api_route(path, handler, methods=[method], response_model=None, responses=answers)

        route("GET", "/v1/models", self.models)
        route("GET", "/v1/models/{model:path}", self.model)
        route("POST", "/v1/completions", self.completions)
        route("POST", "/v1/chat/completions", self.chat_completions)
        route("POST", "/tokenize", self.tokenize)
        route("POST", "/detokenize", self.detokenize)
        route("GET", "/health", self.health)
        route("GET", "/live", self.live)
        route("GET", "/metrics", self.metrics_text)
        router.add_api_route("/", self.page, methods=["GET"], include_in_schema=False)
        router.add_api_route("/docs", self.docs, methods=["GET"], include_in_schema=False)
        api.include_router(router)
        api.add_exception_handler(RequestValidationError, _on_validation_error)
        api.add_exception_handler(StarletteHTTPException, _on_http_exception)
        return api

    def refuses_generation(self) -> str | None:
        """Why no request can be taken now, known before its body is read."""
        return self._closed() or self.engine.overload

    def has_shed(self, seconds: float) -> None:
        self.metrics.shed.observe(seconds)

    # Routes

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, model: str) -> Response:
        self._check_model(model)
        return JSONResponse(self._model())

    async def completions(self, body: protocol.CompletionRequest, request: Request) -> Response:
        deadline = asyncio.get_running_loop().time() + self.limits.max_request_seconds
        self._check_model(body.model)
        with _refusals():
            job = protocol.completion_job(body, self.limits)
            given = protocol.prompts(body, self.limits)

        async def encoded() -> Sequence[Sequence[int]]:
            return [await self._encode(each) if isinstance(each, str) else each for each in given]

        return await self._generate(request, body, job, len(given), encoded, CompletionAnswer, deadline)

    async def chat_completions(self, body: protocol.ChatRequest, request: Request) -> Response:
        deadline = asyncio.get_running_loop().time() + self.limits.max_request_seconds
        self._check_model(body.model)
        with _refusals():
            job = protocol.chat_job(body, self.limits, self.engine.facts["max_length"])
            variables = protocol.template_variables(body.chat_template_kwargs)

        async def encoded() -> Sequence[Sequence[int]]:
            return [await self._encode_chat(body.messages, variables)]

        return await self._generate(request, body, job, 1, encoded, ChatAnswer, deadline)

    async def tokenize(self, body: protocol.TokenizeRequest) -> Response:
        """Token ids of a prompt, or of messages as the chat template puts them."""
        self._check_model(body.model)
        with _refusals():
            if (body.prompt is None) == (body.messages is None):
                raise ValueError("give either prompt or messages")
            if body.messages is not None:
                generation = body.add_generation_prompt is not False
                tokens = await self._encode_chat(body.messages, {"add_generation_prompt": generation})
            else:
                assert body.prompt is not None
                tokens = await self._encode(body.prompt, body.add_special_tokens is not False)
        return JSONResponse({"count": len(tokens), "max_model_len": self.engine.facts["max_length"], "tokens": tokens})

    async def detokenize(self, body: protocol.DetokenizeRequest) -> Response:
        self._check_model(body.model)
        vocab = self.engine.facts["vocab_size"]
        with _refusals():
            if wrong := next((token for token in body.tokens if not 0 <= token < vocab), None):
                raise ValueError(f"token ids must be from 0 to {vocab - 1}, got {wrong}")
        text = await asyncio.to_thread(self.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": text})

    async def health(self) -> Response:
        """Whether requests can be answered: 503 if not."""
        problem = self._closed()
        if problem is None and self.engine.stalled:
            problem = f"there is work, and no step for {self.limits.stall_seconds:g} s"
        if problem is None:
            return JSONResponse({"status": "ok"})
        return unavailable(problem, self.limits)

    async def live(self) -> Response:
        """Whether the server runs at all."""
        return JSONResponse({"status": "ok"})

    async def metrics_text(self) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def page(self) -> Response:
        text = (files("deltagram.serving") / "page.html").read_text(encoding="utf-8")
        return HTMLResponse(text, headers={"Content-Security-Policy": PAGE_POLICY})

    async def docs(self) -> Response:
        return HTMLResponse(reference.page(self.api.openapi()), headers={"Content-Security-Policy": reference.POLICY})

    # What they share

    def _closed(self) -> str | None:
        """Why no request is taken any more, or None."""
        if not self.engine.alive:
            return GONE
        return "the server is shutting down" if self.draining else None

    def _model(self) -> dict[str, Any]:
        length = self.engine.facts["max_length"]
        own = {"id": self.name, "object": "model", "created": self.created, "owned_by": "deltagram"}
        return own | {"max_model_len": length}

    def _check_model(self, asked: str | None) -> None:
        if asked is not None and asked != self.name:
            raise HTTPException(404, f"there is no model {asked[:200]!r} here, only {self.name!r}")

    async def _encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) > self.max_characters:
            length = self.engine.facts["max_length"]
            raise ValueError(
                f"the text has {len(text)} characters; with a context of {length} tokens it may have at most "
                f"{self.max_characters}"
            )
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    async def _encode_chat(self, given: Sequence[protocol.ChatMessage], variables: dict[str, Any]) -> list[int]:
        listed = protocol.messages(given)
        text = await asyncio.to_thread(partial(self.tokenizer.apply_chat_template, listed, **variables))
        return await self._encode(text, add_special_tokens=False)

    async def _compile(self, grammar: dict[str, Any]) -> None:
        """Raises ValueError for a grammar that cannot be compiled, or not in time; the engine would wait for it."""
        if self.grammars is None:
            raise ValueError("structured output needs a model with an end token")
        work = asyncio.get_running_loop().run_in_executor(self.compiler, self.grammars.constraint, grammar)
        try:
            await asyncio.wait_for(work, self.limits.max_compile_seconds)
        except TimeoutError:
            limit = f"{self.limits.max_compile_seconds:g} s"
            raise ValueError(f"the schema or regex must compile within {limit}, it did not") from None

    async def _generate(
        self,
        request: Request,
        body: protocol.Generation,
        job: protocol.Job,
        num_prompts: int,
        encoded: Callable[[], Awaitable[Sequence[Sequence[int]]]],
        kind: type[Answer],
        deadline: float,
    ) -> Response:
        params, grammar, salt = asdict(job.params), job.grammar, request.scope["salt"]
        try:
            with self.engine.reserve(num_prompts * job.params.n):
                with _refusals():
                    if grammar is not None:
                        await self._compile(grammar)
                    prompts = await encoded()
                if why := self._closed():  # meanwhile
                    return self._ended("refused", unavailable(why, self.limits))
                seeds = [job.params.seeds() for _ in prompts]
                flight = self.engine.admit(prompts, seeds, params, grammar, salt, deadline)
        except Overloaded as error:
            return self._ended("refused", unavailable(str(error), self.limits))
        streaming = False
        answer = kind(self.name, self.tokenizer, sum(map(len, prompts)))
        try:
            await unless_gone(request.receive, asyncio.shield(flight.accepted))
            if not body.stream:
                pieces = await unless_gone(request.receive, _all(flight))
                whole = answer.body([answer.choice(piece, chunk=False) for piece in pieces])
                return self._ended("finished", JSONResponse(whole))
            streaming = True
            events = self._events(flight, answer, body.stream_options or protocol.StreamOptions())
            return EventStream(events, partial(self.engine.abort, flight), self.limits.max_send_seconds)
        except ValueError as error:
            return self._ended("refused", error_response(400, str(error)))
        except EngineFailed as error:
            return self._ended("failed", error_response(error.status, str(error)))
        except ClientGone:
            return self._ended("aborted", Response())
        finally:
            if not streaming:
                self.engine.abort(flight)

    async def _events(
        self, flight: Flight, answer: Answer, options: protocol.StreamOptions
    ) -> AsyncGenerator[bytes, None]:
        told = True if options.continuous_usage_stats else None if options.include_usage else False
        outcome = "aborted"
        try:
            if opening := answer.opening(len(flight.ids)):
                yield _event(answer.chunk(opening, told))
            while pieces := await flight.take():
                yield _event(answer.chunk([answer.choice(piece, chunk=True) for piece in pieces], told))
            outcome = "finished"
            if options.include_usage:
                yield _event(answer.chunk([], True))
            yield b"data: [DONE]\n\n"
        except EngineFailed as error:
            outcome = "failed"
            yield _event({"error": {"message": str(error), "type": "server_error", "param": None, "code": None}})
        finally:
            self.metrics.requests.labels(outcome).inc()

    def _ended(self, outcome: str, response: Response) -> Response:
        self.metrics.requests.labels(outcome).inc()
        return response


async def _all(flight: Flight) -> list[Piece]:
    gathered: dict[int, Piece] = {}
    while pieces := await flight.take():
        for piece in pieces:
            if piece.index in gathered:
                gathered[piece.index].add(piece)
            else:
                gathered[piece.index] = piece
    return [gathered[index] for index in sorted(gathered)]


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + to_json(data) + b"\n\n"


@contextmanager
def _refusals() -> Iterator[None]:
    """What is wrong with a request is a 400."""
    try:
        yield
    except ValueError as error:
        raise HTTPException(400, str(error)[: protocol.MAX_MESSAGE]) from None


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(400, protocol.describe(error))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    return error_response(error.status_code, str(error.detail), headers=dict(error.headers or {}))
