"""What crosses the boundary between a server and its engine: commands down, events up (msgspec, msgpack).

The same messages travel over ZeroMQ to an engine process and over a queue to an engine thread.
"""

from __future__ import annotations

from typing import Any

import msgspec

from slimserve.engine.request import Request, SamplingParams
from slimserve.engine.step import RequestOutput


class EngineSpec(msgspec.Struct, frozen=True):
    """How to build an engine in another process: an importable `module:function` and its JSON-like arguments.

    The function is called as `factory(arguments, progress)`, where `progress(stage, done, total)` reports
    loading in units of its own; it returns a `slimserve.engine.process.EngineLike`.
    """

    factory: str
    arguments: dict[str, Any] = {}


class EngineInfo(msgspec.Struct, frozen=True):
    """What the door must know about a loaded engine.

    vocab_size bounds token ids. max_request_tokens is the longest prompt + output of one request that the
    context and the cache can hold. min_reusable_prefix is the shortest prefix, in tokens, that a later request
    can reuse (0 = prefix caching off). `facts` is shown at start and by /v1/models. `memory` holds measured bytes by
    the names of the memory plan's groups.
    """

    vocab_size: int
    max_request_tokens: int
    max_sequences: int
    max_queue: int
    min_reusable_prefix: int = 64
    facts: dict[str, str] = {}
    memory: dict[str, int] = {}


class EngineStats(msgspec.Struct, frozen=True):
    """Counters and gauges of an engine at one moment.

    cache_used and cache_total are in bytes. prefix_query_tokens counts prompt tokens looked up,
    prefix_hit_tokens those reused; num_drafted counts drafted tokens, num_accepted those that held; cut_by counts
    requests whose hit was shortened, by the group that cut it.

    drafted_at and accepted_at count drafts by their position in the draft. decode_tokens of decode_rows are what one
    step brought one request. draft_lengths (0 = off) and draft_gains (tokens per second with drafts over those
    without) are the control's by batch size, named by the largest of a range; draft_switches counts its decisions to
    turn on or off, draft_length_changes those to draft more or less.
    """

    num_waiting: int = 0
    num_running: int = 0
    cache_used: int = 0
    cache_total: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    cut_by: dict[str, int] = {}
    num_preemptions: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafter: str = "none"
    drafted_at: list[int] = []
    accepted_at: list[int] = []
    decode_rows: int = 0
    decode_tokens: int = 0
    draft_lengths: dict[int, int] = {}
    draft_gains: dict[int, float] = {}
    draft_switches: int = 0
    draft_length_changes: int = 0


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Start a request; answered by its id in `Outputs.accepted` or by a `Rejection`."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    priority: int = 0
    cache_salt: str = ""
    speculate: bool = True

    def to_request(self, arrival: float) -> Request:
        """The scheduler's own object for this submission; `arrival` in seconds of time.monotonic()."""
        return Request(
            request_id=self.request_id,
            prompt_token_ids=list(self.prompt_token_ids),
            sampling=self.sampling,
            max_tokens=self.max_tokens,
            stop_token_ids=frozenset(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            priority=self.priority,
            cache_salt=self.cache_salt,
            speculate=self.speculate,
            arrival=arrival,
        )


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request before the next step; unknown ids are ignored."""

    request_id: str


class QueryStats(msgspec.Struct, frozen=True, tag=True):
    """Ask for one `StatsReply` with the same ticket; answered between two steps, so it proves a live loop."""

    ticket: int


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Admit nothing more, finish what runs within `grace` seconds, abort the rest, then stop."""

    grace: float


Command = Submit | Abort | QueryStats | Shutdown


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Loading advanced: `done` of `total` units of a named stage (total 0 = unknown)."""

    stage: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Loading ended well; commands are served from here on."""

    info: EngineInfo


class Rejection(msgspec.Struct, frozen=True):
    """A submission that the engine will not run, in the terms of slimserve.errors.RequestError."""

    request_id: str
    message: str
    param: str | None = None
    code: str | None = None
    status: int = 400


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """Everything that one turn of the loop has to tell about requests."""

    outputs: list[RequestOutput] = []
    accepted: list[str] = []
    rejected: list[Rejection] = []


class StatsReply(msgspec.Struct, frozen=True, tag=True):
    """Answer to QueryStats."""

    ticket: int
    stats: EngineStats


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Loading or a step failed for good; the engine stops after this. `exit_code` as in slimserve.errors."""

    message: str
    exit_code: int = 1


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """The engine stopped as it was told to."""


Event = Progress | Ready | Outputs | StatsReply | Failed | Stopped

COMMAND_DECODER = msgspec.msgpack.Decoder(Command)
EVENT_DECODER: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
ENCODER = msgspec.msgpack.Encoder()
