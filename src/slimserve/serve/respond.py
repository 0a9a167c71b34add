"""The last step of both completion endpoints: a stream of chunks, or one whole reply made of the same deltas."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from slimserve.serve.choice import ChoiceDelta
from slimserve.serve.generation import Generation
from slimserve.serve.log import RequestRow
from slimserve.serve.protocol import GenerationFields
from slimserve.serve.state import ServerState
from slimserve.serve.stream import EventStream, json_response, whole


class Reply(Protocol):
    """An endpoint's own shape of a reply."""

    def add(self, index: int, delta: ChoiceDelta) -> dict[str, Any] | None:
        """Take a delta; the chunk for it, or None if there is nothing to say yet."""
        ...

    def finish_of(self, index: int) -> str | None:
        """How a choice ended, in the API's words; None while it runs."""
        ...

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The reply that is not streamed."""
        ...

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last chunk of a stream that includes usage."""
        ...


async def respond(
    state: ServerState,
    request: Request,
    row: RequestRow,
    body: GenerationFields,
    generation: Generation,
    reply: Reply,
) -> Response:
    """Answer a request whose generation has started; everything it holds is given back on every way out."""
    if body.stream:
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        events = _events(generation, reply, row, state.limits.keep_alive_seconds, include_usage)
        return EventStream(events, row, generation.close, generation.more_ready)
    try:
        return json_response(await whole(request, _collect(generation, reply, row)))
    finally:
        generation.close()


async def _collect(generation: Generation, reply: Reply, row: RequestRow) -> dict[str, Any]:
    finish = "stop"
    async for item in generation.deltas():
        if item is not None:
            reply.add(*item)
            finish = reply.finish_of(item[0]) or finish
    row.end(finish)
    return reply.whole(generation.usage.as_dict())


async def _events(
    generation: Generation, reply: Reply, row: RequestRow, patience: float, include_usage: bool
) -> AsyncGenerator[dict[str, Any] | None, None]:
    finish = "stop"
    async for item in generation.deltas(patience):
        if item is None:
            yield None
            continue
        chunk = reply.add(*item)
        finish = reply.finish_of(item[0]) or finish
        if chunk is not None:
            yield {**chunk, "usage": None} if include_usage else chunk
    if include_usage:
        yield reply.usage_chunk(generation.usage.as_dict())
    row.end(finish)
