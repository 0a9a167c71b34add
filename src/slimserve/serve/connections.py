"""Connections that never bring a whole request are closed, whichever of its parsers uvicorn uses.

Of the two, httptools bounds nothing that is no body (a head without an end, trailers), and drops the body of a request
that offers to upgrade its connection; both are mended here.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from slimserve.serve.errors import error_object

try:
    import httptools
except ImportError:
    httptools = None  # type: ignore[assignment]  # then uvicorn takes its other parser

_MOST_FILES = 65536
_MOST_HEAD_BYTES = 64 * 2**10


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that a client may take: for a request's head, between two pieces of its body, for all of its body, and
    without reading anything of a reply that waits to be sent."""

    head: float = 30.0
    silence: float = 60.0
    body: float = 600.0
    unread: float = 120.0


def bounded_protocol(patience: Patience | None = None, base: Any = AutoHTTPProtocol) -> type[asyncio.Protocol]:
    """uvicorn's protocol `base` with bounds on how long a client may take to say what it wants.

    Uvicorn itself closes only connections that are idle between two requests. Without these bounds, silent ones use up
    the process's file descriptors one by one, a head without an end takes all memory (only one of uvicorn's parsers
    bounds it), and clients that stop reading keep their places for ever.
    """
    limits = patience or Patience()
    # The other parser bounds heads itself, never reads ahead of a reply and ignores upgrades.
    is_httptools = hasattr(base, "on_headers_complete")

    class BoundedProtocol(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if is_httptools:
                self.parser = _NoUpgrades(self)

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            # The clock starts before the first byte.
            self._head_since: float | None = self.loop.time()
            self._body_since: float | None = None
            self._heard = self._head_since
            self._in_head = True
            self._loose_bytes = self._num_pieces = 0
            self._cycles: list[Any] = []
            self._unsent = 0
            self._unsent_since = self._head_since
            self._look()

        def data_received(self, data: bytes) -> None:
            now = self._heard = self.loop.time()
            if self._awaits_head and self._head_since is None:
                self._head_since = now
            before = self._num_pieces
            super().data_received(data)
            if not self._awaits_head:
                self._head_since = None
            # Bytes that complete no head, no message and no piece of a body: half a head, trailers, names of chunks.
            self._loose_bytes = self._loose_bytes + len(data) if before == self._num_pieces else 0
            if is_httptools and self._loose_bytes > _MOST_HEAD_BYTES and not self.transport.is_closing():
                self._refuse(431, f"the request's head is longer than {_MOST_HEAD_BYTES} bytes", "head_too_large")
            self._body_since = (self._body_since or now) if self._awaits_body else None

        def on_header(self, name: bytes, value: bytes) -> None:
            if self._in_head:  # trailers, of which there may be any number, say nothing that is asked for
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            if self.parser.starts_again:
                return
            super().on_headers_complete()
            self._in_head = False
            self._num_pieces += 1
            self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
            if self.cycle is not None:
                self._cycles.append(self.cycle)

        def on_body(self, body: bytes) -> None:
            super().on_body(body)
            self._num_pieces += 1

        def on_message_complete(self) -> None:
            if self.parser.starts_again:
                return
            super().on_message_complete()
            self._in_head = True
            self._num_pieces += 1

        def connection_lost(self, exc: Exception | None) -> None:
            self._timer.cancel()
            super().connection_lost(exc)
            # uvicorn tells the request that it read last; the one that runs may be an earlier one.
            for cycle in self._cycles:
                if not cycle.response_complete:
                    cycle.disconnected = True
                    cycle.message_event.set()

        def _unsupported_upgrade_warning(self) -> None:
            """There is nothing to upgrade to, and nothing for the operator to install."""

        def send_400_response(self, msg: str) -> None:
            """uvicorn's parsers call this for what is not HTTP."""
            self._refuse(400, "this is no HTTP request that can be read", "invalid_http")

        def _refuse(self, status: int, message: str, code: str) -> None:
            """Answer in the API's words and close; the parser is not asked for anything any more."""
            if any(cycle.response_started and not cycle.response_complete for cycle in self._cycles):
                self.transport.close()  # the answer would stand in the middle of another reply
                return
            body = msgspec.json.encode(error_object(message, status=status, code=code))
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
            self.transport.close()

        @property
        def _awaits_head(self) -> bool:
            return self.cycle is None or bool(self.cycle.response_complete)

        @property
        def _awaits_body(self) -> bool:
            return not self._awaits_head and bool(self.cycle.more_body)

        def _is_late(self, now: float) -> bool:
            if self._awaits_head:
                # None = idle after a reply, which is uvicorn's to end.
                return self._head_since is not None and now - self._head_since >= limits.head
            if not self._awaits_body or self.flow.read_paused:
                return False
            since = self._heard if self._body_since is None else self._body_since
            return now - self._heard >= limits.silence or now - since >= limits.body

        def _is_unread(self, now: float) -> bool:
            """Whether a reply waits for a client that reads nothing of it."""
            # Only while nothing is added does the size tell what the client took.
            waits = self.flow.write_paused or self.transport.is_closing()
            unsent = self.transport.get_write_buffer_size() if waits else 0
            if not unsent or unsent != self._unsent:
                self._unsent, self._unsent_since = unsent, now
            return unsent > 0 and now - self._unsent_since >= limits.unread

        def _look(self) -> None:
            now = self.loop.time()
            if self._is_unread(now) or (self.flow.read_paused and _has_left(self.transport)):
                self.transport.abort()
            elif self._is_late(now):
                self.transport.close()
            self._timer = self.loop.call_later(min(limits.head, limits.silence, limits.unread) / 4, self._look)

    return BoundedProtocol


class _NoUpgrades:
    """httptools' parser for `protocol`, for which an offer to upgrade the connection is a header like any other.

    Clients of Java's standard library offer HTTP/2 with every request. A server may ignore that (RFC 9110, 7.8), but
    httptools takes all that follows the head for the other protocol: the body is lost. So such a head is read again,
    without the offer, by a fresh parser, before anything came of it.
    """

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._parser = self._fresh()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    @property
    def starts_again(self) -> bool:
        """Whether the head that was just read will be read once more."""
        return self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT"

    def feed_data(self, data: bytes) -> None:
        """Parse; raises httptools' errors."""
        rest = memoryview(data)
        while True:
            try:
                self._parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self.starts_again:
                    raise
                rest = rest[upgrade.args[0] :]
                head = self._head()
                self._parser = self._fresh()
                self._parser.feed_data(head)

    def _fresh(self) -> Any:
        parser = httptools.HttpRequestParser(self._protocol)
        # As uvicorn sets it: what follows the last request of a connection does no harm.
        with contextlib.suppress(AttributeError):
            parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _head(self) -> bytes:
        version = self._parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self._parser.get_method(), self._protocol.url, version)]
        lines += [b"%s: %s" % header for header in self._protocol.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])


def _has_left(transport: Any) -> bool:
    """Whether the client closed its end, though nobody reads what it sent before (a second request, say)."""
    connection = transport.get_extra_info("socket")
    if connection is None or connection.fileno() < 0 or not hasattr(select, "POLLRDHUP"):
        return False
    asked = select.poll()
    asked.register(connection.fileno(), select.POLLRDHUP)
    return bool(asked.poll(0))


def allow_many_connections() -> None:
    """Raise the number of open files to what the system lets this process have; each connection is one."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
