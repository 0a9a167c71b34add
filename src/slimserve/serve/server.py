"""One server process: socket, engine, HTTP, and an orderly end with the right exit code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType

import uvicorn

from slimserve.engine.driver import ProgressCallback
from slimserve.engine.messages import EngineInfo, EngineSpec
from slimserve.engine.process import ProcessEngine
from slimserve.errors import RequestError, RunError, UsageError
from slimserve.serve.app import create_app
from slimserve.serve.connections import allow_many_connections, bounded_protocol
from slimserve.serve.hosts import own_names
from slimserve.serve.limits import ServerLimits
from slimserve.serve.log import RequestLog
from slimserve.serve.router import Router
from slimserve.serve.state import ServerState
from slimserve.serve.text import TextModel

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()))

_LAST_WORDS_SECONDS = 5
"""After the grace period: time for error events to reach their clients."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How to serve. grace_seconds: how long running requests may go on after a stop signal.

    planned_memory: bytes by group of the memory plan, shown in the metrics beside what the engine measured.
    """

    names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    quiet: bool = False
    grace_seconds: float = 30.0
    limits: ServerLimits = field(default_factory=ServerLimits)
    planned_memory: Mapping[str, int] = field(default_factory=dict)


def open_socket(host: str, port: int) -> socket.socket:
    """A bound socket, before anything is loaded; UsageError if the address cannot be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # Named TCP, because event loops turn Nagle's delay off only on sockets that say so.
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise _cannot_listen(host, port, error) from error
    return bound


def _cannot_listen(host: str, port: int, error: Exception) -> UsageError:
    words = getattr(error, "strerror", None) or error
    return UsageError(f"cannot listen on {host}:{port}: {words}; choose another --host or --port")


class _Uvicorn(uvicorn.Server):
    """Uvicorn that lets requests finish for a while, then ends the rest with an error instead of a cut."""

    def __init__(self, config: uvicorn.Config, state: ServerState, grace_seconds: float) -> None:
        super().__init__(config)
        self._state = state
        self._grace = grace_seconds
        self._tasks: list[asyncio.Task[None]] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop signals end the server in order; unlike uvicorn's own, they are not raised again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with _handled(self.handle_exit):
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A stop signal: admit nothing more. A second one ends without waiting."""
        if self.should_exit:
            # Requests that are cut off now are meant to be: their traces say nothing.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._state.draining = True
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Also watch the engine from now on."""
        await super().startup(sockets)
        self._tasks.append(asyncio.create_task(self._watch_engine()))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for running requests, at most the grace period; then they get an error event."""
        self._state.draining = True
        self._tasks.append(asyncio.create_task(self._end_rest()))
        await super().shutdown(sockets)
        for task in self._tasks:
            task.cancel()

    async def _watch_engine(self) -> None:
        await self._state.router.went_down.wait()
        # Every open request has its error by now; leave a moment for it to be sent, then end the process.
        self.should_exit = True

    async def _end_rest(self) -> None:
        await asyncio.sleep(self._grace)
        error = RequestError("the server is shutting down", code="shutting_down", status=503)
        self._state.router.fail_all(error)


def serve(
    spec: EngineSpec,
    text: TextModel,
    options: ServerOptions,
    progress: ProgressCallback,
    on_ready: Callable[[EngineInfo, str], None],
) -> None:
    """Serve until a stop signal; RunError if the engine died. Call from the main thread.

    `on_ready` hears what was loaded and the URL, before the first request is taken.
    """
    allow_many_connections()
    with contextlib.closing(open_socket(options.host, options.port)) as listener:
        router = Router()
        with _stoppable():
            client = ProcessEngine(spec, router, progress)
        router.client = client
        state = ServerState(
            text=text,
            router=router,
            names=options.names,
            limits=options.limits,
            api_key=options.api_key,
            own_names=own_names(listener.getsockname()[0], options.host),
            log=RequestLog(quiet=options.quiet),
        )
        state.metrics.show_memory(options.planned_memory, client.info.memory)
        try:
            server = _http_server(state, options)
            with server.capture_signals():
                # Whoever hears of the URL may connect at once (the system holds connections until they are taken) and
                # may tell the server to stop.
                listener.listen(2048)
                host, port = listener.getsockname()[:2]
                on_ready(client.info, f"http://{f'[{host}]' if ':' in host else host}:{port}")
                with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                    runner.run(server.serve(sockets=[listener]))
        finally:
            client.shutdown(0.0)
        if client.failure is not None:
            raise RunError(f"the engine stopped: {client.failure}")


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """While loading, SIGTERM ends like Ctrl-C does, so that the engine process and its folder are cleaned up."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handled(stop):
        yield


@contextlib.contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """`handler` takes the stop signals, except those that are ignored on purpose (nohup)."""
    wanted = [number for number in _STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def _http_server(state: ServerState, options: ServerOptions) -> _Uvicorn:
    config = uvicorn.Config(
        create_app(state),
        log_level="warning",
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=int(options.grace_seconds) + _LAST_WORDS_SECONDS,
        timeout_keep_alive=30,
        server_header=False,
        http=bounded_protocol(),
        ws="none",
    )
    return _Uvicorn(config, state, options.grace_seconds)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not on every platform
        return None
    return uvloop.new_event_loop
