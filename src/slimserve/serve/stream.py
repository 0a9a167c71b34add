"""Replies that can end early: server-sent events, and whole replies that stop when their client goes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from slimserve.errors import RequestError, SlimServeError
from slimserve.serve.errors import error_object, from_request_error
from slimserve.serve.log import RequestRow

logger = logging.getLogger("slimserve.serve")

ENCODER = msgspec.json.Encoder()
_DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": still working\n\n"
_CLOSED_BY_CLIENT = 499
_MOST_HELD = 32 * 2**10
"""Bytes of events that may wait for each other in one write."""

Result = TypeVar("Result")


class ClientGoneError(Exception):
    """The client closed the connection."""


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _race(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """Run `work`; cancel it, wait for its clean-up and raise ClientGoneError as soon as the client is gone."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for pending in (task, watch):
            if not pending.done():
                pending.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await pending


async def whole(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """A whole reply's work, given up when its client goes."""
    return await _race(work, request.receive)


def describe(error: Exception) -> tuple[int, dict[str, Any], str]:
    """HTTP status, error object and short code of any exception; unexpected ones are logged with their trace."""
    if isinstance(error, RequestError):
        return error.status, from_request_error(error), error.code or "invalid_value"
    if isinstance(error, SlimServeError):
        return 503, error_object(str(error), status=503, code="engine_down"), "engine_down"
    logger.error("a request failed unexpectedly", exc_info=error)
    return 500, error_object("the server failed on this request", status=500, code="internal_error"), "internal_error"


class EventStream(Response):
    """Server-sent events of JSON objects (None = a keep-alive comment), ended by [DONE] or by one error event.

    The row is ended here for errors and disconnects; the source ends it itself when all went well.
    """

    def __init__(
        self,
        source: AsyncGenerator[dict[str, Any] | None, None],
        row: RequestRow,
        close: Callable[[], None],
        more: Callable[[], bool],
    ) -> None:
        """`close` frees what the source holds; called on every way out, also if the source never ran.

        `more` says that the source has its next event ready: such events leave in one write.
        """
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        # A stream's length is not known.
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        self._source = source
        self._row = row
        self._close = close
        self._more = more

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _race(self._pump(send), receive)
        except ClientGoneError:
            self._row.end("disconnect", status=_CLOSED_BY_CLIENT)
        except OSError as error:
            self._row.end("disconnect", status=_CLOSED_BY_CLIENT, reason=str(error))
        finally:
            self._close()
            await self._source.aclose()

    async def _pump(self, send: Send) -> None:
        last = _DONE
        held = bytearray()
        try:
            async for event in self._source:
                held += _KEEP_ALIVE if event is None else b"data: " + ENCODER.encode(event) + b"\n\n"
                if len(held) < _MOST_HELD and self._more():
                    continue
                await send({"type": "http.response.body", "body": bytes(held), "more_body": True})
                held.clear()
        except OSError:
            raise
        except Exception as error:
            status, body, code = describe(error)
            self._row.end(code, status=status, reason=body["error"]["message"])
            last = b"data: " + ENCODER.encode(body) + b"\n\n"
        await send({"type": "http.response.body", "body": bytes(held) + last, "more_body": False})


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON reply."""
    return Response(ENCODER.encode(value), status_code=status, media_type="application/json", headers=headers)
