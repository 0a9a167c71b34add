"""Rates of an engine in this process: steady decode at several numbers of streams, prefill, and hashes of replies."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from slimserve.engine.loop import Engine
from slimserve.engine.request import Request, SamplingParams

SAMPLING = {"temperature": 1.0, "top_p": 0.95, "top_k": 20}
WARM_STEPS = 4


def prompt_of(number: int, length: int, vocab_size: int) -> list[int]:
    """Random token ids, other ones for every number."""
    generator = np.random.default_rng(1_000 + number)
    ids: list[int] = generator.integers(0, vocab_size, length).tolist()
    return ids


def hash_of(tokens: Sequence[int]) -> str:
    """A short name for a reply."""
    return hashlib.sha256(np.asarray(tokens, dtype=np.int64).tobytes()).hexdigest()[:12]


@dataclass(slots=True)
class DecodeRun:
    """Streams that decoded together. Seconds of each timed step; tokens of each stream from its first one on."""

    streams: int
    prefill_seconds: float
    first_token_seconds: float
    prompt_tokens: int
    cached_tokens: int
    step_seconds: list[float]
    tokens: list[list[int]] = field(default_factory=list)

    @property
    def step_median(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.step_seconds)

    @property
    def tokens_per_second(self) -> float:
        """Over all streams, all timed steps counted."""
        return self.streams * len(self.step_seconds) / sum(self.step_seconds)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        times = sorted(self.step_seconds)
        return {
            "streams": self.streams,
            "steps": len(times),
            "tokens_per_second": self.tokens_per_second,
            "step_ms_median": 1e3 * self.step_median,
            "step_ms_lowest": 1e3 * times[0],
            "step_ms_highest": 1e3 * times[-1],
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "prefill_seconds": self.prefill_seconds,
            "first_token_seconds": self.first_token_seconds,
            "hashes": [hash_of(tokens) for tokens in self.tokens],
        }


def synchronize(engine: Engine) -> None:
    """Wait for the engine's device."""
    if torch.device(engine.config.device).type == "cuda":
        torch.cuda.synchronize()


def decode_run(
    engine: Engine, streams: int, prompt_length: int, *, steps: int, seconds: float, least: int = 8, first: int = 0
) -> DecodeRun:
    """Prefill `streams` prompts, then time steps in which all decode: at most `steps`, at least `least`, and no new
    one after `seconds`. Streams are numbered from `first`; a number stands for a prompt and a seed."""
    vocab_size = engine.model.config.vocab_size
    ids = [f"stream-{number}" for number in range(first, first + streams)]
    tokens: dict[str, list[int]] = {name: [] for name in ids}
    for number, name in enumerate(ids, start=first):
        params = SamplingParams(**SAMPLING, seed=number)  # type: ignore[arg-type]
        prompt = prompt_of(number, prompt_length, vocab_size)
        engine.submit(Request(name, prompt, params, steps + 4 * WARM_STEPS + streams * 8, ignore_eos=True))
    started = time.perf_counter()
    first_token = cached = 0.0
    counted: set[str] = set()
    while not all(tokens.values()):
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            tokens[output.request_id] += output.token_ids
            if output.token_ids and output.request_id not in counted:
                counted.add(output.request_id)
                cached += output.num_cached_tokens
                first_token = first_token or time.perf_counter() - started
    prefilled = time.perf_counter() - started
    for _ in range(WARM_STEPS):
        _take(engine, tokens)
    synchronize(engine)
    times: list[float] = []
    while len(times) < steps and (sum(times) < seconds or len(times) < least):
        before = time.perf_counter()
        _take(engine, tokens)
        times.append(time.perf_counter() - before)
    for name in ids:
        engine.abort(name)
    while engine.has_work:
        engine.step()
    total = streams * prompt_length
    return DecodeRun(streams, prefilled, first_token, total, int(cached), times, [tokens[name] for name in ids])


def _take(engine: Engine, tokens: dict[str, list[int]]) -> None:
    """One step in which every stream gains a token."""
    outputs = engine.step()
    for output in outputs:
        if output.error is not None:
            raise RuntimeError(output.error)
        tokens[output.request_id] += output.token_ids
    if len(outputs) != len(tokens):
        raise RuntimeError(f"{len(outputs)} of {len(tokens)} streams decoded in a step")


def start_streams(engine: Engine, count: int, length: int, *, first: int = 0, decoding: bool = True) -> None:
    """Submit `count` prompts of `length` tokens and, where asked, step until all decode and their shape is recorded."""
    for number in range(first, first + count):
        prompt = prompt_of(number, length, engine.model.config.vocab_size)
        params = SamplingParams(**SAMPLING, seed=number)  # type: ignore[arg-type]
        most = min(512, engine.cache.max_request_tokens - length)
        engine.submit(Request(f"traced-{number}", prompt, params, most, ignore_eos=True))
    if not decoding:
        return
    while any(job.num_pending > 1 or job.sequence is None for job in engine.scheduler.jobs()):
        engine.step()
    for _ in range(WARM_STEPS):
        engine.step()


def end_all(engine: Engine) -> None:
    """End every request."""
    for job in engine.scheduler.jobs():
        engine.abort(job.request.request_id)
    while engine.has_work:
        engine.step()


def first_token_seconds(engine: Engine, prompt: list[int]) -> float:
    """Time from submit to the first token of a prompt that nothing of is cached, alone."""
    engine.cache.clear_index()
    synchronize(engine)
    started = time.perf_counter()
    engine.submit(Request("prefill", prompt, SamplingParams(**SAMPLING, seed=1), 1, ignore_eos=True))  # type: ignore[arg-type]
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(output.error)
    return time.perf_counter() - started


def longest_requests(engine: Engine, count: int, context: int) -> dict[str, Any]:
    """`count` requests that fill `context` tokens at the same time; raises RuntimeError where one does not complete, or
    where fewer run together.

    Replies are so long that the first request still decodes when the last one's prompt is done.
    """
    scheduler = engine.config.scheduler
    # The first reply decodes while the other prompts are computed: such steps take fewer prompt tokens.
    budget = min(scheduler.token_budget - count, scheduler.mixed_prefill_budget)
    reply = -(-count * context // max(1, budget)) + count + 8
    if reply >= context:
        raise RuntimeError(f"{count} prompts of {context} tokens take too many steps of {budget} to run at once")
    vocab_size = engine.model.config.vocab_size
    engine.cache.clear_index()
    for number in range(count):
        prompt = prompt_of(10_000 + number, context - reply, vocab_size)
        params = SamplingParams(**SAMPLING, seed=number)  # type: ignore[arg-type]
        engine.submit(Request(f"long-{number}", prompt, params, reply, ignore_eos=True))
    produced: dict[str, int] = {}
    started = time.perf_counter()
    together = 0
    while engine.has_work:
        outputs = engine.step()
        together = max(together, engine.scheduler.num_running)
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
            produced[output.request_id] = produced.get(output.request_id, 0) + len(output.token_ids)
    if len(produced) != count or set(produced.values()) != {reply}:
        raise RuntimeError(f"of {count} requests of {context} tokens, {len(produced)} completed")
    if together < count:
        raise RuntimeError(f"of {count} requests of {context} tokens, at most {together} ran at once")
    preempted = engine.scheduler.counters.num_preemptions
    return {
        "requests": count, "context": context, "seconds": time.perf_counter() - started,
        "at_once": together, "preemptions": preempted,
    }  # fmt: skip


class ForcedDrafts:
    """A drafter with a fixed pattern: of `length` tokens 0, 1, .. `length` and again 0 are the reply's own, the others
    are not. `reply` is what plain decoding says; empty: nothing is drafted."""

    def __init__(self, length: int, vocab_size: int) -> None:
        self.reply: list[int] = []
        self._length, self._vocab_size, self._turn = length, vocab_size, 0

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[tuple[int, ...]]:
        """See Drafter."""
        return [self._propose(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def _propose(self, request: Request, limit: int) -> tuple[int, ...]:
        done = len(request.output_token_ids)
        coming = self.reply[done : done + min(self._length, limit)]
        right = self._turn % (self._length + 1)
        self._turn += 1
        return tuple(token if place < right else (token + 1) % self._vocab_size for place, token in enumerate(coming))

    def release(self, request_id: str) -> None:
        """Nothing is kept."""


@dataclass(slots=True)
class VerifyRun:
    """Seconds of plain steps (before and after) and of steps that verify drafts, of one stream; whether all three
    replies are equal, and how many drafted tokens were accepted."""

    plain: list[float]
    verifying: list[float]
    equal: bool
    drafted: int
    accepted: int

    @property
    def ratio(self) -> float:
        """Median of verifying steps over the median of plain ones."""
        return statistics.median(self.verifying) / statistics.median(self.plain)


def verify_run(engine: Engine, drafter: ForcedDrafts, prompt_length: int, tokens: int) -> VerifyRun:
    """One stream's reply of `tokens`, plainly, with forced drafts, and plainly again, on an engine with `drafter`."""
    counters = engine.scheduler.counters

    def reply() -> tuple[list[int], list[float], list[float]]:
        said: list[int] = []
        plain: list[float] = []
        verifying: list[float] = []
        params = SamplingParams(**SAMPLING, seed=0)  # type: ignore[arg-type]
        prompt = prompt_of(0, prompt_length, engine.model.config.vocab_size)
        engine.submit(Request("verified", prompt, params, tokens, ignore_eos=True))
        while engine.has_work:
            drafted, begun = counters.drafted_tokens, bool(said)
            synchronize(engine)
            before = time.perf_counter()
            outputs = engine.step()
            seconds = time.perf_counter() - before
            for output in outputs:
                if output.error is not None:
                    raise RuntimeError(output.error)
                said += output.token_ids
            if begun:
                (plain if counters.drafted_tokens == drafted else verifying).append(seconds)
        return said, plain, verifying

    drafter.reply = []
    expected, before, _ = reply()
    drafter.reply = expected
    reply()  # records the shape
    drafted, accepted = counters.drafted_tokens, counters.accepted_tokens
    found, _, verifying = reply()
    drafted, accepted = counters.drafted_tokens - drafted, counters.accepted_tokens - accepted
    drafter.reply = []
    again, after, _ = reply()
    equal = expected == found == again
    # The last drafts of a reply are shorter, and the first plain steps record their shape.
    return VerifyRun(before[WARM_STEPS:] + after[WARM_STEPS:], verifying[WARM_STEPS:-2], equal, drafted, accepted)


def same_beginnings(runs: Sequence[DecodeRun]) -> list[str]:
    """Streams that said something else in another run: a stream's tokens depend on its prompt and seed alone."""
    seen: dict[int, list[int]] = {}
    differing = []
    for run in runs:
        for number, tokens in enumerate(run.tokens):
            known = seen.setdefault(number, tokens)
            shared = min(len(known), len(tokens))
            if known[:shared] != tokens[:shared]:
                at = next(i for i in range(shared) if known[i] != tokens[i])
                differing.append(f"stream {number} of {run.streams} from token {at}")
            if len(tokens) > len(known):
                seen[number] = tokens
    return differing
