"""The exact-token harness: a fixed number of prompt and output tokens per request, against any OpenAI server.

A run counts as exact only where every request's prompt and output counts are the ones that were asked for. Prompts
differ within a run and between its passes, so no pass reads what an earlier one left in a prefix cache.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slimserve.errors import RunError, UsageError
from slimserve.measure.client import Endpoint, Reply, ServerError
from slimserve.measure.engine_counts import EngineCounts, drafting_words, total_counts
from slimserve.measure.figures import Figure, figure, percentile
from slimserve.measure.prompts import Prompt, PromptSource, prompt_source
from slimserve.profiles.synthetic import weights_label, weights_of

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ExactShape:
    """What is measured. `passes` timed passes follow one warm-up per concurrency."""

    prompt_tokens: int = 1000
    output_tokens: int = 300
    concurrency: tuple[int, ...] = (1, 8)
    passes: int = 3
    requests_per_stream: int = 1
    temperature: float = 1.0
    top_p: float = 0.95
    top_k: int = 20
    seed: int = 42
    first_offset: int = 0

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens", "passes", "requests_per_stream"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if not self.concurrency or min(self.concurrency) < 1 or max(self.concurrency) > 4096:
            raise UsageError(f"concurrency {list(self.concurrency)} must hold counts from 1 to 4096")


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a server can do, found out before the first pass.

    `min_tokens`: it takes that field. `ends_early`: it ended a reply although it took ignore_eos; min_tokens is then
    sent as well (not before: banning the end changes how a server samples).
    """

    stream_usage: bool
    ignore_eos: bool
    token_ids: bool
    top_k: bool
    min_tokens: bool = False
    ends_early: bool = False


@dataclass(slots=True)
class PassResult:
    """One pass: all requests at one concurrency. Rates in tokens per second over all streams.

    `counts`: steps and drafts by the server's own counters; None for servers without them.
    """

    concurrency: int
    replies: list[Reply]
    seconds: float
    started: float
    exact: bool
    problems: list[str] = field(default_factory=list)
    counts: EngineCounts | None = None

    @property
    def output_rate(self) -> float:
        """Output tokens of all requests over the pass's wall time, prefill included."""
        return sum(reply.output_tokens or 0 for reply in self.replies) / self.seconds

    @property
    def decode_rate(self) -> float | None:
        """Output rate while all requests decode: from the last first token to the first end; None if they never do."""
        begin = max((r.started + r.arrivals[0][0] for r in self.replies if r.arrivals), default=None)
        end = min((r.started + r.arrivals[-1][0] for r in self.replies if r.arrivals), default=None)
        if begin is None or end is None or end - begin <= 0 or len(self.replies) != self.concurrency:
            return None
        tokens = sum(count for r in self.replies for when, count in r.arrivals if begin < r.started + when <= end)
        return tokens / (end - begin)


def find_abilities(endpoint: Endpoint, prompt: Prompt) -> Abilities:
    """Ask small questions: does a stream carry usage, are ignore_eos, top_k and the like taken?"""
    base = {"prompt": prompt.body(), "max_tokens": 2, "temperature": 0.0}
    taken = {name: _accepts(endpoint, base, {name: value}) for name, value in
             (("ignore_eos", True), ("top_k", 20), ("return_token_ids", True), ("min_tokens", 2))}  # fmt: skip
    try:
        usage = endpoint.stream(base).output_tokens is not None
    except ServerError as error:
        if error.status == 0:
            raise
        usage = False
    return Abilities(usage, taken["ignore_eos"], taken["return_token_ids"], taken["top_k"], taken["min_tokens"])


def _accepts(endpoint: Endpoint, base: dict[str, Any], extra: dict[str, Any]) -> bool:
    try:
        endpoint.complete({**base, **extra})
    except ServerError as error:
        if error.status == 0:
            raise
        return False
    return True


def request_body(prompt: Prompt, shape: ExactShape, abilities: Abilities, number: int) -> dict[str, Any]:
    """The body of one request; fields that the server refuses are left out."""
    body: dict[str, Any] = {
        "prompt": prompt.body(),
        "max_tokens": shape.output_tokens,
        "temperature": shape.temperature,
        "top_p": shape.top_p,
        "seed": shape.seed + number,
    }
    if abilities.ignore_eos:
        body["ignore_eos"] = True
    if abilities.top_k and shape.top_k:
        body["top_k"] = shape.top_k
    if abilities.token_ids:
        body["return_token_ids"] = True
    if abilities.ends_early and abilities.min_tokens:
        body["min_tokens"] = shape.output_tokens
    return body


def run_pass(
    endpoint: Endpoint, source: PromptSource, shape: ExactShape, abilities: Abilities, count: int
) -> PassResult:
    """Run `count` streams at once, each with shape.requests_per_stream requests one after another."""
    total = count * shape.requests_per_stream
    prompts = [source.take(shape.prompt_tokens) for _ in range(total)]
    bodies = [request_body(prompt, shape, abilities, number) for number, prompt in enumerate(prompts)]
    replies = [Reply() for _ in bodies]
    barrier = threading.Barrier(count + 1)

    def stream(first: int) -> None:
        barrier.wait()
        for number in range(first, total, count):
            try:
                send = endpoint.stream if abilities.stream_usage else endpoint.complete
                replies[number] = send(bodies[number])
            except RunError as error:
                replies[number] = Reply(error=str(error))

    threads = [threading.Thread(target=stream, args=(first,), daemon=True) for first in range(count)]
    before = EngineCounts.read(endpoint)
    for thread in threads:
        thread.start()
    barrier.wait()
    started = time.perf_counter()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    after = EngineCounts.read(endpoint) if before is not None else None
    counts = after.since(before) if after is not None and before is not None else None
    problems = [problem for reply in replies if (problem := _problem(reply, shape))]
    return PassResult(count, replies, seconds, started, not problems, problems, counts)


def _problem(reply: Reply, shape: ExactShape) -> str:
    """Why a reply is not exact, or nothing."""
    if reply.error:
        return reply.error
    if reply.prompt_tokens != shape.prompt_tokens:
        return f"prompt of {reply.prompt_tokens} tokens instead of {shape.prompt_tokens}"
    if reply.output_tokens != shape.output_tokens:
        return f"{reply.output_tokens} output tokens instead of {shape.output_tokens} (finish {reply.finish_reason})"
    if reply.token_ids and len(reply.token_ids) != shape.output_tokens:
        return f"{len(reply.token_ids)} token ids instead of {shape.output_tokens}"
    return ""


def run_exact(endpoint: Endpoint, shape: ExactShape, say: Say = lambda text: None) -> dict[str, Any]:
    """Measure every concurrency: a warm-up, then the timed passes; the report as plain data (see `exact_lines`)."""
    server = endpoint.named()
    source = prompt_source(server, first_offset=shape.first_offset)
    abilities = find_abilities(server, source.take(8 if source.ids else 16))
    notes = list(source.notes)
    if not abilities.stream_usage:
        notes.append("streams carry no usage: requests are not streamed, so there are no times to first token")
    if not abilities.ignore_eos:
        notes.append("ignore_eos is refused: a reply that ends early makes its pass inexact")
    rows = []
    for count in shape.concurrency:
        passes = _passes(server, source, shape, abilities, count, say)
        if abilities.min_tokens and not abilities.ends_early and any(_ended_early(p, shape) for p in passes):
            abilities = replace(abilities, ends_early=True)
            notes.append("a reply ended early in spite of ignore_eos: from there on min_tokens is sent as well")
            say(f"{count} streams: {notes[-1]}")
            passes = _passes(server, source, shape, abilities, count, say)
        rows.append(_row(count, passes))
    return {
        "kind": "exact",
        "url": server.url,
        "model": server.model,
        "weights": weights_of(server.model),
        "prompt_tokens": shape.prompt_tokens,
        "output_tokens": shape.output_tokens,
        "passes": shape.passes,
        "sampling": {"temperature": shape.temperature, "top_p": shape.top_p, "top_k": shape.top_k, "seed": shape.seed},
        "prompts": "token ids" if source.ids else "text",
        "offsets": [shape.first_offset, source.next_offset],
        "exact": all(row["exact"] for row in rows),
        "rows": rows,
        "notes": notes,
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _passes(
    server: Endpoint, source: PromptSource, shape: ExactShape, abilities: Abilities, count: int, say: Say
) -> list[PassResult]:
    """The timed passes of one concurrency, after a warm-up; they stop at a reply that min_tokens would mend."""
    say(f"{count} streams: warm-up")
    passes: list[PassResult] = []
    for number in range(shape.passes + 1):
        result = run_pass(server, source, shape, abilities, count)
        if number:
            say(f"{count} streams, pass {number}: {result.output_rate:.1f} tok/s" + _inexact(result))
        if _ended_early(result, shape) and abilities.min_tokens and not abilities.ends_early:
            return [result]
        passes += [result] if number else []
    return passes


def _ended_early(result: PassResult, shape: ExactShape) -> bool:
    return any(
        reply.finish_reason == "stop" and (reply.output_tokens or 0) < shape.output_tokens for reply in result.replies
    )


def _inexact(result: PassResult) -> str:
    return f" (not exact: {result.problems[0]})" if result.problems else ""


def _row(count: int, passes: Sequence[PassResult]) -> dict[str, Any]:
    replies = [reply for result in passes for reply in result.replies]
    firsts = [r.first_token_seconds for r in replies if r.first_token_seconds is not None]
    gaps = [gap for reply in replies for gap in _gaps(reply)]
    decode = [rate for result in passes if (rate := result.decode_rate) is not None]
    counts = [result.counts for result in passes if result.counts is not None]
    steps = [result.counts.steps / result.seconds for result in passes if result.counts is not None]
    return {
        "concurrency": count,
        "exact": all(result.exact for result in passes),
        "problems": sorted({problem for result in passes for problem in result.problems})[:8],
        "output_tokens_per_second": _json(figure([result.output_rate for result in passes])),
        "decode_tokens_per_second": _json(figure(decode)),
        "first_token_seconds": {"median": percentile(firsts, 0.5), "p99": percentile(firsts, 0.99)},
        "inter_token_seconds": {f"p{int(100 * p)}": percentile(gaps, p) for p in (0.5, 0.9, 0.99)},
        "cached_tokens": sum(reply.cached_tokens or 0 for reply in replies),
        "steps_per_second": _json(figure(steps)),
        "drafting": total_counts(counts).as_json() if counts else None,
        "requests": [_request(reply, number) for number, result in enumerate(passes) for reply in result.replies],
    }


def _request(reply: Reply, number: int) -> dict[str, Any]:
    content = ",".join(map(str, reply.token_ids)) if reply.token_ids else reply.text
    return {
        "pass": number,
        "prompt_tokens": reply.prompt_tokens,
        "output_tokens": reply.output_tokens,
        "cached_tokens": reply.cached_tokens,
        "finish_reason": reply.finish_reason,
        "first_token_seconds": reply.first_token_seconds,
        "seconds": reply.seconds,
        "sha256": hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest(),
        "error": reply.error,
    }


def _gaps(reply: Reply) -> list[float]:
    """Seconds per token between pieces; a piece of several tokens counts as that many equal gaps."""
    gaps = []
    for (before, _), (when, count) in zip(reply.arrivals, reply.arrivals[1:], strict=False):
        gaps += [(when - before) / count] * count
    return gaps


def _json(value: Figure | None) -> dict[str, float] | None:
    return None if value is None else value.as_json()


def exact_lines(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    name = report["model"] + weights_label(report["model"])
    lines = [f"{name} at {report['url']}: {report['prompt_tokens']} prompt and {report['output_tokens']} "
             f"output tokens, {report['passes']} passes, prompts as {report['prompts']}"]  # fmt: skip
    lines.append(
        f"{'streams':>7} {'tok/s (range)':>24} {'decode tok/s':>24} {'first token':>12} {'token p50/p99':>18} exact"
    )
    for row in report["rows"]:
        first, inter = row["first_token_seconds"]["median"], row["inter_token_seconds"]
        lines.append(
            f"{row['concurrency']:>7} {_shown(row['output_tokens_per_second']):>24} "
            f"{_shown(row['decode_tokens_per_second']):>24} {_milliseconds(first):>12} "
            f"{_milliseconds(inter['p50']) + ' / ' + _milliseconds(inter['p99']):>18} {'yes' if row['exact'] else 'NO'}"
        )
        if row["drafting"] is not None:
            lines.append(f"        {_shown(row['steps_per_second'])} steps/s, {drafting_words(row['drafting'])}")
        lines += [f"        {problem}" for problem in row["problems"][:2]]
    return lines + [f"note: {note}" for note in report["notes"]]


def _shown(value: dict[str, float] | None) -> str:
    if value is None:
        return "-"
    return f"{value['median']:.1f} ({value['lowest']:.1f}-{value['highest']:.1f})"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f} ms"
