"""The endpoints."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from time import perf_counter, time
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from outpace.core.special_tokens import special_tokens
from outpace.errors import ConfigError, ProcessLost
from outpace.llm import LLM
from outpace.serve.bodies import Bodies, BodyParser
from outpace.serve.engine_thread import EngineThread, Job, QueueFull, ShuttingDown, TooManyRequests
from outpace.serve.guards import OPEN, Failures, Hosts, Keys, RequestLog, client_of, failure
from outpace.serve.observers import ServerMetrics, Tracer
from outpace.serve.open_calls import Deliver, Events, OpenCall, answer_to, disconnected
from outpace.serve.openai import openapi
from outpace.serve.openai.answers import Answer, TokenTexts
from outpace.serve.openai.calls import Call, Reader
from outpace.serve.openai.errors import ApiError
from outpace.serve.settings import Settings

log = logging.getLogger("outpace.serve")

PAGE = Path(__file__).parent / "playground"
PAGE_PARTS = ("playground.js", "pane.js", "pictures.js", "verdict.js", "playground.css")
PAGE_FILES = {"/": "index.html", **{f"/{name}": name for name in PAGE_PARTS}}
PAGE_HEADERS = {
    # Nothing but our own files: no script in the page, and no other host.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Server:
    """The endpoints over one `LLM`, whose engine it runs in a thread of its own.

    ``app`` is an ASGI application. Nobody else may run the LLM's engine while it runs.
    """

    def __init__(self, llm: LLM, settings: Settings) -> None:
        self._llm = llm
        self._settings = settings
        self._reader = Reader(llm, settings)
        self._body = Bodies(settings.max_body_bytes, settings.request_seconds)
        room = llm.engine.target.max_rows + settings.max_waiting
        self._parser = BodyParser(settings.request_seconds, room)
        self._texts = TokenTexts(llm.input_processor.decoder)
        self._tracer = Tracer(self._decode, special_tokens(llm.tokenizer))
        self.thread = EngineThread(
            llm.engine, settings.max_waiting, self._note_end, settings.max_per_client
        )
        self._metrics = ServerMetrics(
            settings.model_name,
            lambda: self.thread.running,
            lambda: self.thread.waiting,
            llm.engine.target.max_rows,
        )
        self._created = int(time())
        self.app = self._application()

    def drain(self) -> None:
        """Takes no more requests, and ends those that are open when their time is over. May be
        called by a signal handler."""
        self.thread.refuse()
        timer = threading.Timer(self._settings.drain_seconds, self.thread.end_all)
        timer.daemon = True
        timer.start()

    # -- the application ---------------------------------------------------------------------------

    def _application(self) -> Starlette:
        settings = self._settings
        open_paths = OPEN | (set(PAGE_FILES) if settings.playground else set())
        middleware = [Middleware(RequestLog)]
        if settings.hosts != ("*",):
            middleware.append(Middleware(Hosts, hosts=settings.hosts))
        if settings.allowed_origins:
            middleware.append(
                Middleware(
                    CORSMiddleware,
                    allow_origins=list(settings.allowed_origins),
                    allow_methods=["GET", "POST"],
                    allow_headers=["*"],  # OpenAI's package for browsers sends many of its own
                    expose_headers=["x-request-id"],
                )
            )
        middleware.append(Middleware(Failures))
        middleware.append(
            Middleware(Keys, keys=settings.api_keys, open_paths=frozenset(open_paths))
        )
        app = Starlette(
            routes=self._routes(),
            middleware=middleware,
            lifespan=self._lifespan,
            exception_handlers={
                ApiError: _api_error,
                HTTPException: _http_error,
                ClientDisconnect: _gone,
            },
        )
        # A redirection has no body, and many clients do not follow one with theirs.
        app.router.redirect_slashes = False
        return app

    def _routes(self) -> list[BaseRoute]:
        posts = {
            "/v1/completions": self._answered(self._reader.completion),
            "/v1/chat/completions": self._answered(self._reader.chat),
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }
        if self._settings.allow_forget:
            posts["/forget"] = self._forget
        gets = {
            "/v1/models": self._models,
            "/v1/models/{name:path}": self._model,
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._prometheus,
            "/openapi.json": self._openapi,
            "/docs": _docs,
        }
        routes: list[BaseRoute] = [Route(path, do, methods=["POST"]) for path, do in posts.items()]
        routes += [Route(path, do, methods=["GET"]) for path, do in gets.items()]
        if self._settings.playground:
            routes += [
                Route(path, _file(name), methods=["GET"]) for path, name in PAGE_FILES.items()
            ]
            routes.append(Route("/playground.json", self._about, methods=["GET"]))
        return routes

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        observing = self._llm.engine.observing
        with observing(self._metrics.observe_round), observing(self._tracer):
            self.thread.start()
            try:
                yield
            finally:
                await run_in_threadpool(self.thread.close, self._settings.drain_seconds)

    # -- texts -------------------------------------------------------------------------------------

    def _answered(self, read: Callable[[Any], Call]) -> Callable[[Request], Awaitable[Response]]:
        async def respond(request: Request) -> Response:
            body = await self._body(request)
            arrived = perf_counter()
            call = await self._parser(read, body, partial(disconnected, request))
            notes = request.state.log
            if self._settings.log_prompts:
                notes["body"] = body.content
            answer = Answer(call, self._settings.model_name, self._texts, self._tracer.take)
            client = client_of(request, call.user)
            open_call = OpenCall(answer, partial(self._submit, call, client, arrived))
            end = partial(self._end, call, open_call.job, notes)
            if call.stream:
                return Events(open_call, end)
            try:
                # In another thread: log-probabilities of long texts take seconds to write down.
                return await run_in_threadpool(JSONResponse, await open_call.whole(request))
            finally:
                end()

        return respond

    def _submit(
        self, call: Call, client: str | bytes | None, arrived: float, deliver: Deliver
    ) -> Job:
        """Hands a call to the engine; ``ApiError`` where there is no room. The time in which its
        body was read is a part of what it may take."""
        job = Job(call.requests, deliver, self._settings.request_seconds, client, arrived)
        if call.trace:
            self._tracer.follow(call.requests)
        try:
            self.thread.submit(job)
        except (QueueFull, ShuttingDown, TooManyRequests) as error:
            self._tracer.leave(call.requests)
            raise answer_to(error) from error
        return job

    def _end(self, call: Call, job: Job, notes: dict[str, Any]) -> None:
        """Gives back what a call holds, and notes for the log what it has cost."""
        self.thread.cancel(job)
        self._tracer.leave(call.requests)
        notes["prompt_tokens"] = call.prompt_tokens
        notes["completion_tokens"] = sum(len(one.output_ids) for one in call.requests)
        # A text that is not finished is the engine's still, which ends it before its next round.
        notes["finish_reasons"] = [one.finish_reason or "abort" for one in call.requests]
        if self._settings.log_prompts:
            notes["texts"] = [one.text if one.finished else None for one in call.requests]

    def _note_end(self, job: Job) -> None:
        self._metrics.observe_job(job)
        for request in job.requests:
            error = request.error
            if error is not None and answer_to(error).status == 500:
                log.error("a text ended with an error", exc_info=error)

    def _decode(self, token: int) -> str:
        decoder = self._llm.input_processor.decoder
        return "" if decoder is None else decoder.token(token)

    # -- everything else ---------------------------------------------------------------------------

    async def _tokenize(self, request: Request) -> Response:
        body = await self._body(request)
        tokens = await self._parser(self._reader.tokens, body, partial(disconnected, request))
        most = self._llm.max_model_len
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": most})

    async def _detokenize(self, request: Request) -> Response:
        body = await self._body(request)
        text = await self._parser(self._reader.text, body, partial(disconnected, request))
        return JSONResponse({"prompt": text})

    async def _forget(self, request: Request) -> Response:
        if (await self._body(request)).content != {}:
            raise ApiError(400, "the body of /forget is an empty object: {}.")
        try:
            await asyncio.wrap_future(self.thread.run_between_rounds(self._llm.forget_texts))
        except ShuttingDown as error:
            raise answer_to(error) from error
        except ConfigError as error:  # a drafter that learns cannot forget
            raise ApiError(400, str(error)) from error
        return JSONResponse({})

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._settings.model_name:
            raise ApiError(404, f"there is no model {name!r} here.", "model", "model_not_found")
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._settings.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "outpace",
            "max_model_len": self._llm.max_model_len,
        }

    async def _health(self, request: Request) -> Response:
        if not self.thread.alive:
            raise ApiError(503, "the engine's thread has ended.", code="engine_dead")
        return JSONResponse({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        reason = self._llm.engine.target.failure_reason
        if reason is not None:
            raise answer_to(ProcessLost(reason))
        if not self.thread.accepts:
            raise ApiError(503, "the server is shutting down.", code="shutting_down")
        return JSONResponse(
            {"status": "ready", "running": self.thread.running, "waiting": self.thread.waiting}
        )

    async def _prometheus(self, request: Request) -> Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self._metrics.exposition(), headers={"Content-Type": kind})

    async def _openapi(self, request: Request) -> Response:
        return JSONResponse(openapi.description())

    async def _about(self, request: Request) -> Response:
        llm, rule = self._llm, self._llm.engine.verifier.rule
        # In another thread: it waits for the tokenizer, which may be reading a long prompt.
        description = await run_in_threadpool(lambda: str(llm.describe()))
        return JSONResponse(
            {
                "model": self._settings.model_name,
                "method": llm.config.method,
                "rule": rule.name,
                "coupled": rule.coupled,
                "lossless": rule.lossless,
                "chat": bool(llm.input_processor.ends.template()),
                "ends": [self._decode(token) for token in llm.target.eos_ids],
                "max_model_len": llm.max_model_len,
                "description": self._reader.without_paths(description),
            }
        )


def _file(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def send(request: Request) -> Response:
        return FileResponse(PAGE / name, headers=PAGE_HEADERS)

    return send


async def _docs(request: Request) -> Response:
    return RedirectResponse("openapi.json")  # relative: a proxy may have put a path before it


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return failure(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {
        404: "there is nothing at this path: /openapi.json lists what there is.",
        405: "this path takes another method: /openapi.json says which.",
    }
    answer = failure(ApiError(error.status_code, words.get(error.status_code, error.detail)))
    answer.headers.update(error.headers or {})
    return answer


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # for the log alone: nobody reads it
