"""Sustained load: requests that keep coming for a while, at a rate (open loop) or a fixed concurrency (closed loop)."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from typing import Any

from slimserve.errors import RunError, UsageError
from slimserve.measure.client import Endpoint, Reply
from slimserve.measure.exact import Abilities, ExactShape, Say, find_abilities, request_body
from slimserve.measure.figures import percentile
from slimserve.measure.prompts import PromptSource, prompt_source
from slimserve.profiles.synthetic import weights_label, weights_of


@dataclass(frozen=True, slots=True)
class Load:
    """How requests come: `rate` per second with exponential gaps, or `concurrency` streams without pause."""

    seconds: float = 60.0
    rate: float | None = None
    concurrency: int | None = None
    seed: int = 1

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.concurrency is None):
            raise UsageError("give either a rate or a concurrency, and only one of them")
        if self.seconds <= 0 or (self.rate is not None and self.rate <= 0) or (self.concurrency or 1) < 1:
            raise UsageError("seconds, rate and concurrency must be above 0")


class _Sender:
    """Sends requests on threads and keeps what came back."""

    def __init__(self, endpoint: Endpoint, source: PromptSource, shape: ExactShape, abilities: Abilities) -> None:
        self._endpoint, self._source, self._shape, self._abilities = endpoint, source, shape, abilities
        self._lock = threading.Lock()
        self._sent = 0
        self.replies: list[Reply] = []

    def send(self) -> None:
        """One request, start to end."""
        with self._lock:
            number = self._sent
            self._sent += 1
            prompt = self._source.take(self._shape.prompt_tokens)
        body = request_body(prompt, self._shape, self._abilities, number)
        started = time.perf_counter()
        try:
            send = self._endpoint.stream if self._abilities.stream_usage else self._endpoint.complete
            reply = send(body)
        except RunError as error:
            reply = Reply(error=str(error), started=started, seconds=time.perf_counter() - started)
        with self._lock:
            self.replies.append(reply)


def run_sustained(endpoint: Endpoint, shape: ExactShape, load: Load, say: Say = lambda text: None) -> dict[str, Any]:
    """Keep the load up for load.seconds, wait for the last reply, and report rates and latencies as plain data."""
    server = endpoint.named()
    source = prompt_source(server, first_offset=shape.first_offset)
    abilities = find_abilities(server, source.take(16))
    sender = _Sender(server, source, shape, abilities)
    say(f"sending for {load.seconds:g} s")
    started = time.perf_counter()
    threads = _closed(sender, load, started) if load.concurrency is not None else _open(sender, load, started)
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    good = [reply for reply in sender.replies if not reply.error]
    first = [reply.first_token_seconds for reply in good if reply.first_token_seconds is not None]
    return {
        "kind": "sustained",
        "url": server.url,
        "model": server.model,
        "weights": weights_of(server.model),
        "prompt_tokens": shape.prompt_tokens,
        "output_tokens": shape.output_tokens,
        "rate": load.rate,
        "concurrency": load.concurrency,
        "seconds": seconds,
        "requests": len(sender.replies),
        "failed": len(sender.replies) - len(good),
        "errors": sorted({reply.error for reply in sender.replies if reply.error})[:4],
        "exact": all(
            (reply.prompt_tokens, reply.output_tokens) == (shape.prompt_tokens, shape.output_tokens) for reply in good
        ),
        "output_tokens_per_second": sum(reply.output_tokens or 0 for reply in good) / seconds,
        "requests_per_second": len(good) / seconds,
        "first_token_seconds": {f"p{int(100 * p)}": percentile(first, p) for p in (0.5, 0.9, 0.99)},
        "request_seconds": {f"p{int(100 * p)}": percentile([r.seconds for r in good], p) for p in (0.5, 0.9, 0.99)},
    }


def _closed(sender: _Sender, load: Load, started: float) -> list[threading.Thread]:
    def stream() -> None:
        while time.perf_counter() - started < load.seconds:
            sender.send()

    threads = [threading.Thread(target=stream, daemon=True) for _ in range(load.concurrency or 1)]
    for thread in threads:
        thread.start()
    return threads


def _open(sender: _Sender, load: Load, started: float) -> list[threading.Thread]:
    """Arrivals do not wait for replies: what the server cannot keep up with queues there."""
    choose = random.Random(load.seed)
    threads: list[threading.Thread] = []
    arrival = 0.0
    while True:
        arrival += choose.expovariate(load.rate or 1.0)
        if arrival >= load.seconds:
            return threads
        time.sleep(max(0.0, started + arrival - time.perf_counter()))
        thread = threading.Thread(target=sender.send, daemon=True)
        thread.start()
        threads.append(thread)


def sustained_lines(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    name = report["model"] + weights_label(report["model"])
    how = f"{report['rate']:g} requests/s" if report["rate"] else f"{report['concurrency']} streams"
    lines = [
        f"{name} at {report['url']}: {how} for {report['seconds']:.0f} s, {report['requests']} requests, "
        f"{report['failed']} failed, exact {'yes' if report['exact'] else 'NO'}",
        f"{report['output_tokens_per_second']:.1f} tok/s, {report['requests_per_second']:.2f} requests/s",
    ]
    return lines + [f"error: {error}" for error in report["errors"]]
