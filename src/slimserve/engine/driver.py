"""The engine's own loop: commands in, steps, events out. The same loop runs in a process and on a thread."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from slimserve.engine.messages import (
    Abort,
    Command,
    EngineInfo,
    EngineStats,
    Event,
    Failed,
    Outputs,
    QueryStats,
    Rejection,
    Shutdown,
    StatsReply,
    Stopped,
    Submit,
)
from slimserve.engine.request import FinishReason, Request
from slimserve.engine.step import RequestOutput
from slimserve.errors import RequestError, SlimServeError

logger = logging.getLogger("slimserve.engine")

ProgressCallback = Callable[[str, int, int], None]


class EngineLike(Protocol):
    """What the loop needs of an engine (slimserve.engine.loop.Engine, or a fake in tests)."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    def submit(self, request: Request) -> None:
        """Queue a request; raises RequestError if it can never run or the queue is full."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request and free all that it holds; unknown ids are ignored."""
        ...

    def step(self) -> Sequence[RequestOutput]:
        """Run one step."""
        ...

    def read_stats(self) -> EngineStats:
        """Counters and gauges."""
        ...


@dataclass(slots=True)
class LoadedEngine:
    """What an engine factory returns."""

    engine: EngineLike
    info: EngineInfo


class Channel(Protocol):
    """Where commands come from and events go."""

    def receive(self, timeout: float | None) -> list[Command]:
        """All commands that are there; waits up to `timeout` seconds (None = for ever) for the first one."""
        ...

    def send(self, event: Event) -> None:
        """Pass an event on; never blocks."""
        ...


class EngineDriver:
    """Runs an engine until it is told to stop or fails; every accepted request gets exactly one finish."""

    def __init__(self, loaded: LoadedEngine, channel: Channel) -> None:
        self._engine = loaded.engine
        self._channel = channel
        self._open: set[str] = set()
        self._accepted: list[str] = []
        self._rejected: list[Rejection] = []
        self._stop_at: float | None = None

    def run(self) -> bool:
        """Serve until Shutdown; False after a fatal fault (already reported as Failed)."""
        try:
            while not self._finished():
                self._turn()
        except SlimServeError as error:
            self._fail(str(error), error.exit_code)
            return False
        except Exception as error:
            logger.error("the engine failed:\n%s", traceback.format_exc())
            self._fail(f"the engine failed: {type(error).__name__}: {error}", 1)
            return False
        self._abort_rest()
        self._channel.send(Stopped())
        return True

    def _finished(self) -> bool:
        if self._stop_at is None:
            return False
        return not self._open or time.monotonic() >= self._stop_at

    def _turn(self) -> None:
        """Commands first, so that an abort frees its request before the next step; then one step."""
        timeout = 0.0 if self._engine.has_work else None
        if self._stop_at is not None and timeout is None:
            timeout = max(0.0, self._stop_at - time.monotonic())
        for command in self._channel.receive(timeout):
            self._obey(command)
        outputs = list(self._engine.step()) if self._engine.has_work else []
        outputs = [output for output in outputs if output.request_id in self._open]
        for output in outputs:
            if output.finish_reason is not None:
                self._open.discard(output.request_id)
        if outputs or self._accepted or self._rejected:
            self._channel.send(Outputs(outputs=outputs, accepted=self._accepted, rejected=self._rejected))
            self._accepted, self._rejected = [], []

    def _obey(self, command: Command) -> None:
        if isinstance(command, Submit):
            self._submit(command)
        elif isinstance(command, Abort):
            if command.request_id in self._open:
                self._open.discard(command.request_id)
                self._engine.abort(command.request_id)
        elif isinstance(command, QueryStats):
            self._channel.send(StatsReply(ticket=command.ticket, stats=self._engine.read_stats()))
        elif isinstance(command, Shutdown) and self._stop_at is None:
            self._stop_at = time.monotonic() + command.grace

    def _submit(self, command: Submit) -> None:
        try:
            if self._stop_at is not None:
                raise RequestError("the server is shutting down", code="shutting_down", status=503)
            if command.request_id in self._open:
                raise RequestError(f"request id {command.request_id!r} is already running", code="duplicate_request_id")
            self._engine.submit(command.to_request(time.monotonic()))
        except RequestError as error:
            rejection = Rejection(command.request_id, str(error), error.param, error.code, error.status)
            self._rejected.append(rejection)
        else:
            self._open.add(command.request_id)
            self._accepted.append(command.request_id)

    def _abort_rest(self) -> None:
        for request_id in sorted(self._open):
            self._engine.abort(request_id)
        if self._open:
            ends = [RequestOutput(request_id, finish_reason=FinishReason.ABORT) for request_id in sorted(self._open)]
            self._channel.send(Outputs(outputs=ends))
            self._open.clear()

    def _fail(self, message: str, exit_code: int) -> None:
        if self._open:
            ends = [
                RequestOutput(request_id, finish_reason=FinishReason.ERROR, error=message)
                for request_id in sorted(self._open)
            ]
            self._channel.send(Outputs(outputs=ends))
            self._open.clear()
        self._channel.send(Failed(message=message, exit_code=exit_code))
