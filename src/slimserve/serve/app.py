"""The HTTP application: routes, key, and OpenAI error objects for everything that goes wrong."""

from __future__ import annotations

import asyncio
import hmac
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slimserve.serve.body import HeldBody
from slimserve.serve.chat import chat_completions
from slimserve.serve.completions import completions
from slimserve.serve.errors import error_object
from slimserve.serve.hosts import is_foreign_page, names_us
from slimserve.serve.log import RequestRow
from slimserve.serve.metrics import CONTENT_TYPE
from slimserve.serve.state import ServerState
from slimserve.serve.stream import ClientGoneError, describe, json_response
from slimserve.serve.texts import detokenize, tokenize

_STATS_SECONDS = 5.0
_HEALTH_SECONDS = 30.0
_OPEN_PATHS = frozenset({"/health"})
"""Paths that need no key: a supervisor must be able to ask."""

_MOST_SHOWN = 80

Endpoint = Callable[[ServerState, Request, RequestRow, HeldBody], Awaitable[Response]]


def create_app(state: ServerState) -> FastAPI:
    """The application for one model and engine."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        state.router.bind(asyncio.get_running_loop())
        yield

    app = FastAPI(title="SlimServe", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    _add_posts(app, state)
    _add_gets(app, state)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _any_error)
    app.add_middleware(_Door, state=state)
    return app


def _add_posts(app: FastAPI, state: ServerState) -> None:
    posts: dict[str, tuple[str, Endpoint]] = {
        "/v1/chat/completions": ("chat", chat_completions),
        "/v1/completions": ("completions", completions),
        "/tokenize": ("tokenize", tokenize),
        "/detokenize": ("detokenize", detokenize),
    }
    for path, (name, endpoint) in posts.items():
        app.add_route(path, _guarded(state, name, endpoint), methods=["POST"])


def _guarded(state: ServerState, name: str, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint whose every failure is an error object and a row with its reason."""

    async def call(request: Request) -> Response:
        row = state.row(name)
        held = state.bodies.hold()
        try:
            return await endpoint(state, request, row, held)
        except ClientGoneError:
            row.end("disconnect", status=499)
            return Response(status_code=499)
        except asyncio.CancelledError:
            row.end("cancelled", status=499)
            raise
        except Exception as error:
            status, body, code = describe(error)
            row.end(code, status=status, reason=body["error"]["message"])
            headers = {"retry-after": "1"} if status in (429, 503) else None
            return json_response(body, status, headers)
        finally:
            held.release()

    return call


def _add_gets(app: FastAPI, state: ServerState) -> None:
    def card(name: str) -> dict[str, Any]:
        info = state.router.info
        return {
            "id": name,
            "object": "model",
            "created": state.created,
            "owned_by": "slimserve",
            "max_model_len": info.max_request_tokens,
            "facts": info.facts,
        }

    async def models(_: Request) -> Response:
        return json_response({"object": "list", "data": [card(name) for name in state.names]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in state.names:
            body = error_object(
                f"model {name[:200]!r} is not served here", status=404, param="model", code="model_not_found"
            )
            return json_response(body, 404)
        return json_response(card(name))

    async def health(_: Request) -> Response:
        return await _health(state)

    async def metrics(_: Request) -> Response:
        stats = await state.router.stats(_STATS_SECONDS) if state.router.alive else None
        return Response(state.metrics.render(stats), headers={"content-type": CONTENT_TYPE})

    app.add_route("/v1/models", models, methods=["GET"])
    app.add_route("/v1/models/{name:path}", model, methods=["GET"])
    app.add_route("/health", health, methods=["GET"])
    app.add_route("/metrics", metrics, methods=["GET"])


async def _health(state: ServerState) -> Response:
    """200 only if the engine's loop answers between two steps: then the next step can run."""
    if state.draining:
        return json_response({"status": "shutting down"}, 503)
    if not state.router.alive:
        return json_response({"status": "engine down", "reason": state.router.down_reason}, 503)
    if await state.router.stats(_HEALTH_SECONDS) is None:
        reason = state.router.down_reason or f"no answer within {_HEALTH_SECONDS:.0f} s"
        return json_response({"status": "engine down", "reason": reason}, 503)
    return json_response({"status": "ok"})


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {404: "there is no such path", 405: "this path does not take this method"}
    message = words.get(error.status_code, str(error.detail))
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    headers = dict(error.headers) if error.headers else None
    return json_response(error_object(message, status=error.status_code, code=code), error.status_code, headers)


async def _any_error(_: Request, error: Exception) -> Response:
    status, body, _code = describe(error)
    return json_response(body, status)


class _Door:
    """Outermost layer: key, host, origin, and an id on every reply (the client's own, if it sent a decent one)."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = self._request_id(headers.get(b"x-request-id", b""))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        reply = self._refusal(scope, headers) or self._app
        await reply(scope, receive, send_with_id)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> Response | None:
        if not self._may_enter(scope["path"], headers.get(b"authorization", b"")):
            body = error_object("a valid API key is needed", status=401, code="invalid_api_key")
            return json_response(body, 401, {"www-authenticate": "Bearer"})
        if self._state.api_key is not None:
            return None
        names = self._state.own_names
        hosts = [value for name, value in scope["headers"] if name == b"host" and value]  # HTTP/1.0 may have none
        if names is not None and not all(names_us(host, names) for host in hosts):
            shown = b", ".join(hosts)[:_MOST_SHOWN].decode("latin-1")
            message = (
                f"this server answers only to names of its own machine, not to {shown!r}; start it with --api-key, or "
                "with --host at an address that others reach"
            )
            return json_response(error_object(message, status=403, code="foreign_host"), 403)
        if scope["method"] == "POST" and is_foreign_page(headers, names or frozenset()):
            message = "a web page of another origin may not use a server without a key"
            return json_response(error_object(message, status=403, code="foreign_origin"), 403)
        return None

    def _may_enter(self, path: str, authorization: bytes) -> bool:
        key = self._state.api_key
        if key is None or path in _OPEN_PATHS:
            return True
        scheme, _, given = authorization.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), key.encode())

    @staticmethod
    def _request_id(given: bytes) -> bytes:
        if 0 < len(given) <= 128 and given.isascii() and given.decode("ascii").isprintable():
            return given
        return uuid.uuid4().hex.encode()
