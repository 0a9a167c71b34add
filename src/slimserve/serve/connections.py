"""Connections that never bring a whole request are closed, whichever of its parsers uvicorn uses."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

_MOST_FILES = 65536


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that a client may take: for a request's head, between two pieces of its body, for all of its body."""

    head: float = 30.0
    silence: float = 60.0
    body: float = 600.0


def bounded_protocol(patience: Patience | None = None, base: Any = AutoHTTPProtocol) -> type[asyncio.Protocol]:
    """uvicorn's protocol `base` with bounds on how long a client may take to say what it wants.

    Uvicorn itself closes only connections that are idle between two requests. Without these bounds, silent ones use up
    the process's file descriptors one by one.
    """
    limits = patience or Patience()

    class BoundedProtocol(base):  # type: ignore[misc]
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            # The clock starts before the first byte.
            self._head_since: float | None = self.loop.time()
            self._body_since: float | None = None
            self._heard = self._head_since
            self._look()

        def data_received(self, data: bytes) -> None:
            now = self._heard = self.loop.time()
            if self._awaits_head and self._head_since is None:
                self._head_since = now
            super().data_received(data)
            if not self._awaits_head:
                self._head_since = None
            self._body_since = (self._body_since or now) if self._awaits_body else None

        def connection_lost(self, exc: Exception | None) -> None:
            self._timer.cancel()
            super().connection_lost(exc)

        def _unsupported_upgrade_warning(self) -> None:
            """There is nothing to upgrade to, and nothing for the operator to install."""

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

        def _look(self) -> None:
            if self._is_late(self.loop.time()):
                self.transport.close()
            self._timer = self.loop.call_later(min(limits.head, limits.silence) / 4, self._look)

    return BoundedProtocol


def allow_many_connections() -> None:
    """Raise the number of open files to what the system lets this process have; each connection is one."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
