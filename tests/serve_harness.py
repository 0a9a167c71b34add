"""A server on loopback over the fake engine, for tests of serve/."""

from __future__ import annotations

import asyncio
import contextlib
import io
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from fake_text import FakeText

from slimserve.engine.messages import EngineSpec
from slimserve.engine.process import EngineClient, ProcessEngine, ThreadEngine
from slimserve.serve.app import create_app
from slimserve.serve.limits import ServerLimits
from slimserve.serve.log import RequestLog
from slimserve.serve.router import Router
from slimserve.serve.server import open_socket
from slimserve.serve.state import ServerState
from slimserve.serve.text import TextModel


class Harness:
    """One running server: its base URL, its log, its state and its engine client."""

    def __init__(
        self,
        *,
        process: bool = False,
        limits: ServerLimits | None = None,
        api_key: str | None = None,
        own_names: frozenset[str] | None = None,
        spec: EngineSpec | None = None,
        text: TextModel | None = None,
        http: Any = "auto",
        **fake: Any,
    ) -> None:
        """The fake engine with these arguments, or any other engine and text side; `http` is uvicorn's protocol."""
        self.log = io.StringIO()
        self.router = Router()
        spec = spec or EngineSpec("fake_engine:build", fake)
        kind = ProcessEngine if process else ThreadEngine
        self.client: EngineClient = kind(spec, self.router, lambda *_: None)
        self.router.client = self.client
        self.text = text or FakeText()
        self.state = ServerState(
            text=self.text,
            router=self.router,
            names=("fake", "other-name"),
            limits=limits or ServerLimits(),
            api_key=api_key,
            own_names=own_names,
            log=RequestLog(stream=self.log),
        )
        self._socket = open_socket("127.0.0.1", 0)
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(create_app(self.state), log_level="warning", access_log=False, http=http, ws="none")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve(sockets=[self._socket])), daemon=True
        )
        self._thread.start()
        deadline = time.monotonic() + 60
        while not self._server.started:
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)

    @property
    def connections(self) -> int:
        """Open connections."""
        return len(self._server.server_state.connections)

    def stats(self) -> Any:
        """The engine's counters, asked of its loop."""
        found: list[Any] = []
        answered = threading.Event()
        self.client.query_stats(lambda stats: (found.append(stats), answered.set()))
        assert answered.wait(60), "the engine did not answer"
        return found[0]

    def wait_for(self, condition: Callable[[Any], bool], seconds: float = 60.0) -> None:
        """Wait until the engine's counters fulfil a condition."""
        deadline = time.monotonic() + seconds
        while not condition(stats := self.stats()):
            assert time.monotonic() < deadline, f"waited in vain: {stats}"
            time.sleep(0.01)

    def wait_idle(self, seconds: float = 60.0) -> None:
        """Wait until the engine holds nothing and the server has given every place back."""
        deadline = time.monotonic() + seconds
        while True:
            stats = self.stats()
            if (stats.num_waiting, stats.num_running, self.state.num_inside, self.router.num_open) == (0, 0, 0, 0):
                return
            assert time.monotonic() < deadline, f"still busy: {stats} {self.state.num_inside} {self.router.num_open}"
            time.sleep(0.01)

    def close(self) -> None:
        """Stop everything."""
        self._server.should_exit = True
        self._thread.join(60)
        self.client.shutdown(0.0)


@contextlib.contextmanager
def harness(**options: Any) -> Iterator[Harness]:
    """A Harness that is closed at the end."""
    running = Harness(**options)
    try:
        yield running
    finally:
        running.close()
