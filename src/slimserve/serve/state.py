"""What one server holds: model, engine, limits, names, and how many requests are inside."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

from slimserve.errors import RequestError
from slimserve.serve.body import BodyBudget
from slimserve.serve.limits import ServerLimits
from slimserve.serve.log import RequestLog, RequestRow
from slimserve.serve.metrics import Metrics
from slimserve.serve.router import Router
from slimserve.serve.text import TextModel


@dataclass(slots=True)
class ServerState:
    """Everything that endpoints share. `names` are the ids under which the model is served, the first is shown.

    own_names: what the server may be called beside names of this machine (see hosts.own_names); None = anything.
    """

    text: TextModel
    router: Router
    names: tuple[str, ...]
    limits: ServerLimits = field(default_factory=ServerLimits)
    api_key: str | None = None
    own_names: frozenset[str] | None = None
    log: RequestLog = field(default_factory=RequestLog)
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    num_inside: int = 0
    bodies: BodyBudget = field(init=False)

    def __post_init__(self) -> None:
        self.bodies = BodyBudget(self.limits.max_bodies_bytes)

    def row(self, endpoint: str) -> RequestRow:
        """Start the row of a request."""
        return RequestRow(endpoint, self.metrics, self.log)

    def check_model(self, name: str | None) -> None:
        """A request may leave the model out, but may not ask for another one."""
        if name is not None and name not in self.names:
            served = ", ".join(self.names)
            raise RequestError(
                f"model {name[:200]!r} is not served here; served: {served}",
                param="model",
                code="model_not_found",
                status=404,
            )

    def enter(self, count: int) -> Place:
        """Take `count` places before any costly work; RequestError 429 when the house is full, 503 when closing."""
        if self.draining:
            raise RequestError("the server is shutting down", code="shutting_down", status=503)
        if not self.router.alive:
            reason = self.router.down_reason or "not ready"
            raise RequestError(f"the engine is not running: {reason}", code="engine_down", status=503)
        info = self.router.info
        most = min(self.limits.max_open, info.max_sequences + info.max_queue)
        if self.num_inside + count > most:
            raise RequestError(
                f"{self.num_inside} of at most {most} requests are waiting or running, and this one needs {count} "
                "places; try again later",
                code="queue_full",
                status=429,
            )
        self.num_inside += count
        return Place(self, count)

    @property
    def fingerprint(self) -> str:
        """A short id for one reply."""
        return secrets.token_hex(12)


class Place:
    """Places taken by one request; given back once."""

    def __init__(self, state: ServerState, count: int) -> None:
        self._state = state
        self._count = count

    def leave(self) -> None:
        """Give the places back; idempotent."""
        self._state.num_inside -= self._count
        self._count = 0
