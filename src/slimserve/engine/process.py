"""The process boundary: an engine in its own process or on a thread, behind one client API.

A client is a plain object with threads inside, so a server's event loop and a terminal's main thread can both
use it: commands go down from any thread; events come up on one receiver thread, which calls the listener.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from slimserve.engine.driver import EngineDriver, LoadedEngine, ProgressCallback
from slimserve.engine.meeting import COMMANDS, EVENTS, SPEC, MeetingFolder, remove_abandoned
from slimserve.engine.messages import (
    COMMAND_DECODER,
    ENCODER,
    EVENT_DECODER,
    Abort,
    Command,
    EngineInfo,
    EngineSpec,
    EngineStats,
    Event,
    Failed,
    Outputs,
    Progress,
    QueryStats,
    Ready,
    Rejection,
    Shutdown,
    StatsReply,
    Stopped,
    Submit,
)
from slimserve.engine.step import RequestOutput
from slimserve.errors import RefusalError, RunError, SlimServeError, UsageError

logger = logging.getLogger("slimserve.engine")

# Tied to the parent before the imports that take seconds.
_CHILD_CODE = (
    "import sys; from slimserve.engine import guard; guard.install(int(sys.argv[1])); "
    "from slimserve.engine.process import child_main; child_main()"
)
_KILL_AFTER_SECONDS = 10.0


class EngineListener(Protocol):
    """Who hears of outputs; called on the client's receiver thread, so every method must be quick."""

    def on_accepted(self, request_ids: Sequence[str]) -> None:
        """These submissions are queued or running."""
        ...

    def on_rejected(self, rejections: Sequence[Rejection]) -> None:
        """These submissions will never run."""
        ...

    def on_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        """New tokens and ends, in order."""
        ...

    def on_down(self, reason: str) -> None:
        """The engine is gone; no other call follows. Called once, also after an orderly stop."""
        ...


class EngineClient(Protocol):
    """One engine, wherever it runs."""

    info: EngineInfo

    @property
    def alive(self) -> bool:
        """Whether the engine's loop is there to answer."""
        ...

    @property
    def failure(self) -> str | None:
        """Why the engine is gone, if it is gone without being told to stop."""
        ...

    def submit(self, submission: Submit) -> None:
        """Start a request; its fate comes through the listener."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request before the next step; nothing more is heard of it."""
        ...

    def query_stats(self, callback: Callable[[EngineStats], None]) -> None:
        """Ask the loop; `callback` runs on the receiver thread, or never if the engine dies first."""
        ...

    def shutdown(self, grace: float = 0.0) -> None:
        """Finish what runs within `grace` seconds, abort the rest, and wait until the engine is gone."""
        ...


class _ClientCore:
    """Tickets, life and event routing: what both kinds of client share."""

    def __init__(self, listener: EngineListener) -> None:
        self.info: EngineInfo
        self._listener = listener
        self._tickets = itertools.count()
        self._waiting_stats: dict[int, Callable[[EngineStats], None]] = {}
        self._stopped = threading.Event()
        self._told_to_stop = False
        self._failure: str | None = None

    @property
    def alive(self) -> bool:
        return not self._stopped.is_set()

    @property
    def failure(self) -> str | None:
        return self._failure

    def submit(self, submission: Submit) -> None:
        if self._stopped.is_set():
            raise RunError(f"the engine is not running: {self._failure or 'it was stopped'}")
        self._send(submission)

    def abort(self, request_id: str) -> None:
        if not self._stopped.is_set():
            self._send(Abort(request_id))

    def query_stats(self, callback: Callable[[EngineStats], None]) -> None:
        if not self._stopped.is_set():
            ticket = next(self._tickets)
            self._waiting_stats[ticket] = callback
            self._send(QueryStats(ticket))

    def _send(self, command: Command) -> None:
        raise NotImplementedError

    def _handle(self, event: Event) -> None:
        if isinstance(event, Outputs):
            if event.accepted:
                self._listener.on_accepted(event.accepted)
            if event.rejected:
                self._listener.on_rejected(event.rejected)
            if event.outputs:
                self._listener.on_outputs(event.outputs)
        elif isinstance(event, StatsReply):
            callback = self._waiting_stats.pop(event.ticket, None)
            if callback is not None:
                callback(event.stats)
        elif isinstance(event, Failed):
            self._failure = event.message

    def _down(self, reason: str) -> None:
        """The loop has ended; told to the listener once."""
        if self._stopped.is_set():
            return
        if self._told_to_stop:
            reason = "it was told to stop"
        elif self._failure is None:
            self._failure = reason
        self._stopped.set()
        self._waiting_stats.clear()
        self._listener.on_down(self._failure or reason)


def _error_for(failed: Failed) -> SlimServeError:
    kind = {2: UsageError, 3: RefusalError}.get(failed.exit_code, RunError)
    return kind(failed.message)


def resolve_factory(name: str) -> Callable[[dict[str, Any], ProgressCallback], LoadedEngine]:
    """The engine factory named `module:function`; UsageError if there is none."""
    module_name, _, function_name = name.partition(":")
    try:
        factory: Callable[[dict[str, Any], ProgressCallback], LoadedEngine] = getattr(
            importlib.import_module(module_name), function_name
        )
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"no engine factory {name!r}: {error}") from error
    return factory


# ---------------------------------------------------------------------------------------------------------------
# The engine on a thread


class _QueueChannel:
    def __init__(self, events: Callable[[Event], None]) -> None:
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._events = events

    def receive(self, timeout: float | None) -> list[Command]:
        found: list[Command] = []
        with contextlib.suppress(queue.Empty):
            found.append(self.commands.get(block=timeout != 0.0, timeout=timeout))
            while True:
                found.append(self.commands.get_nowait())
        return found

    def send(self, event: Event) -> None:
        self._events(event)


class ThreadEngine(_ClientCore):
    """An engine in this process, its loop on one daemon thread; for `-p` and chat."""

    def __init__(self, spec: EngineSpec, listener: EngineListener, progress: ProgressCallback) -> None:
        """Build the engine on the calling thread; raises what the factory raises."""
        super().__init__(listener)
        loaded = resolve_factory(spec.factory)(spec.arguments, progress)
        self.info = loaded.info
        self._channel = _QueueChannel(self._handle)
        self._driver = EngineDriver(loaded, self._channel)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._driver.run()
        finally:
            self._down("the engine thread ended")

    def _send(self, command: Command) -> None:
        self._channel.commands.put(command)

    def shutdown(self, grace: float = 0.0) -> None:
        self._told_to_stop = True
        self._send(Shutdown(grace))
        self._thread.join(grace + _KILL_AFTER_SECONDS)


# ---------------------------------------------------------------------------------------------------------------
# The engine in its own process: the parent's side


class ProcessEngine(_ClientCore):
    """An engine in a spawned process, reached over ZeroMQ sockets in a private temporary folder.

    Create it on a thread that lives as long as the process (Linux ties the child to that thread).
    """

    def __init__(
        self,
        spec: EngineSpec,
        listener: EngineListener,
        progress: ProgressCallback,
        *,
        load_timeout: float | None = None,
    ) -> None:
        """Spawn and wait for readiness; raises the child's own loading error, or RunError if it died."""
        super().__init__(listener)
        self._context = zmq.Context()
        self._send_lock = threading.Lock()
        remove_abandoned()
        self._folder, self._commands, self._events = self._meeting_place()
        self._exit_pipe = os.pipe()
        self._waiter = threading.Thread(target=self._wait_exit, name="engine-exit", daemon=True)
        try:
            # One block without gaps: Ctrl-C may come between any two lines.
            self._process = self._spawn(spec)
            self._waiter.start()
            self.info = self._await_ready(progress, load_timeout)
        except BaseException:
            self._give_up()
            raise
        self._receiver = threading.Thread(target=self._receive_loop, name="engine-events", daemon=True)
        self._receiver.start()

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    def shutdown(self, grace: float = 0.0) -> None:
        self._told_to_stop = True
        if not self._stopped.is_set():
            self._send(Shutdown(grace))
        self._waiter.join(grace + _KILL_AFTER_SECONDS)
        if self._waiter.is_alive():
            self._process.kill()
            self._waiter.join()
        self._receiver.join()
        self._close()

    def _give_up(self) -> None:
        """Loading failed: end the child, if there is one, and leave nothing behind."""
        self._stopped.set()
        process = getattr(self, "_process", None)
        if process is not None:
            process.kill()
            process.wait()
        if self._waiter.ident is not None:
            self._waiter.join()
        self._close()

    def _meeting_place(self) -> tuple[MeetingFolder, zmq.Socket[bytes], zmq.Socket[bytes]]:
        """A folder and the two sockets in it; RunError where none can be made."""
        folder = None
        try:
            folder = MeetingFolder()
            commands = self._bind(zmq.PUSH, f"{folder.path}/{COMMANDS}")
            return folder, commands, self._bind(zmq.PULL, f"{folder.path}/{EVENTS}")
        except (OSError, zmq.ZMQError) as error:
            # Also paths that are too long for a socket: a hundred characters are.
            self._context.destroy(linger=0)
            if folder is not None:
                folder.remove()
            place = "a folder for temporary files" if folder is None else folder.path
            raise RunError(f"no socket for the engine can be made in {place}: {error}; set TMPDIR") from error

    def _bind(self, kind: int, path: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.linger = 0
        socket.bind(f"ipc://{path}")
        return socket

    def _spawn(self, spec: EngineSpec) -> subprocess.Popen[bytes]:
        (Path(self._folder.path) / SPEC).write_bytes(ENCODER.encode(spec))
        environment = dict(os.environ)
        # The child must find what this interpreter found, also where sys.path was set up in the process.
        environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _CHILD_CODE, str(os.getpid()), self._folder.path],
            stdin=subprocess.PIPE,  # the lifeline: closes when this process dies
            stdout=2,  # standard output belongs to the model's text
            start_new_session=True,  # Ctrl-C in the terminal is the parent's to handle
            env=environment,
        )

    def _send(self, command: Command) -> None:
        data = ENCODER.encode(command)
        with self._send_lock:
            if not self._commands.closed:
                self._commands.send(data)

    def _wait_exit(self) -> None:
        self._process.wait()
        os.write(self._exit_pipe[1], b"x")

    def _await_ready(self, progress: ProgressCallback, timeout: float | None) -> EngineInfo:
        deadline = None if timeout is None else time.monotonic() + timeout
        poller = self._poller()
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = dict(poller.poll(None if left is None else int(left * 1000)))
            if not ready:
                raise RunError(f"the engine was not ready within {timeout:.0f} s")
            while (event := self._next_event()) is not None:
                if isinstance(event, Progress):
                    progress(event.stage, event.done, event.total)
                elif isinstance(event, Ready):
                    return event.info
                elif isinstance(event, Failed):
                    raise _error_for(event)
            if self._exit_pipe[0] in ready:
                raise RunError(f"the engine process died while loading ({self._exit_words()})")

    def _receive_loop(self) -> None:
        poller = self._poller()
        exited = False
        while not exited:
            exited = self._exit_pipe[0] in dict(poller.poll())
            while (event := self._next_event()) is not None:
                try:
                    self._handle(event)
                except Exception:
                    logger.exception("an engine event was not handled")
        self._down(f"the engine process died ({self._exit_words()})")

    def _next_event(self) -> Event | None:
        try:
            return EVENT_DECODER.decode(self._events.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def _poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self._events, zmq.POLLIN)
        poller.register(self._exit_pipe[0], zmq.POLLIN)
        return poller

    def _exit_words(self) -> str:
        code = self._process.poll()
        if code is None:
            return "still exiting"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"signal {signal.Signals(-code).name}"
        return f"exit code {code}"

    def _close(self) -> None:
        with self._send_lock:
            for socket in (self._commands, self._events):
                socket.close()
        self._context.term()
        for descriptor in self._exit_pipe:
            os.close(descriptor)
        process = getattr(self, "_process", None)
        if process is not None and process.stdin is not None:
            process.stdin.close()
        self._folder.remove()


# ---------------------------------------------------------------------------------------------------------------
# The engine in its own process: the child's side


class _SocketChannel:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: str) -> None:
        self._commands = context.socket(zmq.PULL)
        self._events = context.socket(zmq.PUSH)
        for socket, name in ((self._commands, COMMANDS), (self._events, EVENTS)):
            socket.set_hwm(0)
            # Last words (why it failed) must reach the parent before this process ends.
            socket.linger = 2000
            socket.connect(f"ipc://{folder}/{name}")

    def receive(self, timeout: float | None) -> list[Command]:
        found: list[Command] = []
        if self._commands.poll(None if timeout is None else int(timeout * 1000)):
            with contextlib.suppress(zmq.Again):
                while True:
                    found.append(COMMAND_DECODER.decode(self._commands.recv(zmq.NOBLOCK)))
        return found

    def send(self, event: Event) -> None:
        self._events.send(ENCODER.encode(event))

    def close(self) -> None:
        self._commands.close()
        self._events.close()


def child_main() -> None:
    """Entry of the engine process: parent's process id and socket folder are the arguments."""
    folder = sys.argv[2]
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    spec = msgspec.msgpack.decode((Path(folder) / SPEC).read_bytes(), type=EngineSpec)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    channel = _SocketChannel(context, folder)
    code = _serve(spec, channel)
    channel.close()
    context.term()
    os._exit(code)


def _serve(spec: EngineSpec, channel: _SocketChannel) -> int:
    def progress(stage: str, done: int, total: int) -> None:
        channel.send(Progress(stage, done, total))

    try:
        loaded = resolve_factory(spec.factory)(spec.arguments, progress)
    except SlimServeError as error:
        channel.send(Failed(str(error), error.exit_code))
        return error.exit_code
    except BaseException as error:
        if os.environ.get("SLIMSERVE_DEBUG"):
            traceback.print_exc()
        channel.send(Failed(f"loading failed: {type(error).__name__}: {error}", 1))
        return 1
    channel.send(Ready(loaded.info))
    return 0 if EngineDriver(loaded, channel).run() else 1


__all__ = [
    "EngineClient",
    "EngineListener",
    "ProcessEngine",
    "Stopped",
    "ThreadEngine",
    "child_main",
    "resolve_factory",
]
