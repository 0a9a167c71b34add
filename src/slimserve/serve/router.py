"""From the engine's receiver thread to the HTTP tasks that wait: one mailbox per HTTP request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from slimserve.engine.messages import EngineInfo, EngineStats, Rejection, Submit
from slimserve.engine.process import EngineClient
from slimserve.engine.step import RequestOutput
from slimserve.errors import RequestError, RunError


class Job:
    """The engine requests of one HTTP request, one per choice; yields (choice, output) until all have ended."""

    def __init__(self, router: Router, submissions: Sequence[Submit]) -> None:
        self._router = router
        self._submissions = list(submissions)
        self._choice = {submission.request_id: index for index, submission in enumerate(submissions)}
        self._unanswered = set(self._choice)
        self._open = set(self._choice)
        self._mail: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()
        self._answered = asyncio.Event()
        self._refusal: Exception | None = None

    @property
    def request_ids(self) -> frozenset[str]:
        """Ids of the requests that have not ended."""
        return frozenset(self._open)

    @property
    def more_ready(self) -> bool:
        """Whether the next output is there without waiting."""
        return self._mail.qsize() > 0

    async def start(self) -> None:
        """Submit all choices and wait until the engine has taken them; RequestError or RunError if it did not."""
        self._router.attach(self)
        try:
            for submission in self._submissions:
                self._router.client.submit(submission)
            await self._answered.wait()
            if self._refusal is not None:
                raise self._refusal
        except BaseException:
            self.close()
            raise

    async def outputs(self, patience: float | None = None) -> AsyncIterator[tuple[int, RequestOutput] | None]:
        """(choice, output) pairs in order; None after each `patience` seconds of silence."""
        while self._open or not self._mail.empty():
            try:
                item = self._mail.get_nowait() if self._mail.qsize() else await self._next(patience)
            except TimeoutError:
                yield None
                continue
            if isinstance(item, Exception):
                raise item
            if item.request_id not in self._open:
                continue
            index = self._choice[item.request_id]
            if item.finish_reason is not None:
                self._forget(item.request_id)
            yield index, item

    def end(self, index: int) -> None:
        """Stop one choice now: it needs no more tokens."""
        request_id = self._submissions[index].request_id
        if request_id in self._open:
            self._router.client.abort(request_id)
            self._forget(request_id)

    def close(self) -> None:
        """Abort whatever has not ended; idempotent."""
        for index in range(len(self._submissions)):
            self.end(index)

    def accept(self, request_id: str) -> None:
        """The engine took this choice."""
        self._unanswered.discard(request_id)
        if not self._unanswered:
            self._answered.set()

    def fail(self, error: Exception) -> None:
        """No more output will come."""
        self._refusal = self._refusal or error
        self._answered.set()
        self._mail.put_nowait(error)

    def deliver(self, output: RequestOutput) -> None:
        """One output of one choice."""
        self._mail.put_nowait(output)

    async def _next(self, patience: float | None) -> RequestOutput | Exception:
        # Not wait_for: before Python 3.12 it may swallow a cancellation that meets a result, and a request whose
        # client has gone would run on.
        async with asyncio.timeout(patience):
            return await self._mail.get()

    def _forget(self, request_id: str) -> None:
        self._open.discard(request_id)
        self._router.detach(request_id)


class Router:
    """The server's EngineListener: hands every event to the job that waits for it, on the server's event loop."""

    def __init__(self) -> None:
        self.client: EngineClient
        self._loop: asyncio.AbstractEventLoop | None = None
        self._jobs: dict[str, Job] = {}
        self.down_reason: str | None = None
        self.went_down = asyncio.Event()

    @property
    def info(self) -> EngineInfo:
        """What the engine said of itself when it was ready."""
        return self.client.info

    @property
    def num_open(self) -> int:
        """Engine requests that have not ended."""
        return len(self._jobs)

    @property
    def alive(self) -> bool:
        """Whether the engine is there."""
        return self.down_reason is None and self.client.alive

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Serve this event loop; called once, when it runs."""
        self._loop = loop
        if not self.client.alive:
            self._down(self.client.failure or "the engine stopped")

    def attach(self, job: Job) -> None:
        """Start routing to a job."""
        if not self.alive:
            raise RunError(f"the engine is not running: {self.down_reason or self.client.failure}")
        for request_id in job.request_ids:
            self._jobs[request_id] = job

    def detach(self, request_id: str) -> None:
        """Stop routing a request; late outputs are dropped."""
        self._jobs.pop(request_id, None)

    async def stats(self, timeout: float) -> EngineStats | None:
        """The engine's counters; None if its loop does not answer within `timeout` seconds."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def settle(stats: EngineStats) -> None:
            if not answer.done():
                answer.set_result(stats)

        self.client.query_stats(lambda stats: self._call(settle, stats))
        down: asyncio.Future[Any] = asyncio.ensure_future(self.went_down.wait())
        try:
            await asyncio.wait([answer, down], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            down.cancel()
        return answer.result() if answer.done() else None

    def fail_all(self, error: RequestError) -> None:
        """End every open request with an error and abort it in the engine."""
        for job in set(self._jobs.values()):
            job.fail(error)
            job.close()

    # EngineListener: called on the client's receiver thread.

    def on_accepted(self, request_ids: Sequence[str]) -> None:
        """Pass on to the event loop."""
        self._call(self._accepted, request_ids)

    def on_rejected(self, rejections: Sequence[Rejection]) -> None:
        """Pass on to the event loop."""
        self._call(self._rejected, rejections)

    def on_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        """Pass on to the event loop."""
        self._call(self._outputs, outputs)

    def on_down(self, reason: str) -> None:
        """Pass on to the event loop."""
        self._call(self._down, reason)

    def _call(self, function: Callable[[Any], None], argument: Any) -> None:
        loop = self._loop
        if loop is not None:
            # The loop may close between any check and this call: then nobody waits any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(function, argument)

    def _accepted(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if (job := self._jobs.get(request_id)) is not None:
                job.accept(request_id)

    def _rejected(self, rejections: Sequence[Rejection]) -> None:
        for rejection in rejections:
            if (job := self._jobs.get(rejection.request_id)) is not None:
                self.detach(rejection.request_id)
                error = RequestError(
                    rejection.message, param=rejection.param, code=rejection.code, status=rejection.status
                )
                job.fail(error)

    def _outputs(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            if (job := self._jobs.get(output.request_id)) is not None:
                job.deliver(output)

    def _down(self, reason: str) -> None:
        self.down_reason = reason
        self.went_down.set()
        for job in set(self._jobs.values()):
            job.fail(RequestError(f"the engine stopped: {reason}", code="engine_down", status=503))
        self._jobs.clear()
