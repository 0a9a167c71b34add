"""Gates under load: more requests than rows, exact rates, a soak with requests broken off, memory beside its plan."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slimserve.errors import RunError
from slimserve.measure.client import Endpoint, ServerError
from slimserve.measure.exact import ExactShape, run_exact
from slimserve.measure.gates import GateResult, Trial, digest
from slimserve.plan.compare import TERM_LEAST, TERM_MARGIN, TOTAL_MARGIN
from slimserve.plan.memory import MemoryPlan

_WATCH_SECONDS = 0.02


def concurrency(trial: Trial) -> GateResult:
    """Twice as many requests as the profile runs at once: all are admitted, as many as promised run together, every
    count is exact, and nothing is held afterwards."""
    rows = int(trial.profile.value("max_sequences"))
    choose = random.Random(2 * rows)
    shapes = [(choose.randint(24, 360), choose.randint(24, 64)) for _ in range(2 * rows)]
    prompts = [trial.source.take(length).body() for length, _ in shapes]
    replies: list[Any] = [None] * len(shapes)
    problems: list[str] = []

    def run(number: int) -> None:
        body = {"prompt": prompts[number], "max_tokens": shapes[number][1], "temperature": 1.0, "seed": number,
                "ignore_eos": True, "return_token_ids": True}  # fmt: skip
        try:
            replies[number] = trial.endpoint.stream(body)
        except RunError as error:
            problems.append(str(error))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(shapes))]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    running, waiting = 0, 0
    while any(thread.is_alive() for thread in threads):
        now = metrics(trial.endpoint)
        running = max(running, int(now["slimserve_requests_running"]))
        waiting = max(waiting, int(now["slimserve_requests_waiting"]))
        time.sleep(_WATCH_SECONDS)
    seconds = time.monotonic() - started
    for (length, count), reply in zip(shapes, replies, strict=True):
        if reply is not None and (reply.prompt_tokens, len(reply.token_ids)) != (length, count):
            problems.append(f"{reply.prompt_tokens} + {len(reply.token_ids)} tokens instead of {length} + {count}")
    idle = wait_idle(trial.endpoint)
    passed = not problems and running == rows and idle
    return GateResult(
        "concurrency", passed,
        f"{len(shapes)} requests at once: {len(shapes) - len(problems)} exact; at most {running} of {rows} ran "
        f"together, at most {waiting} waited; {'nothing' if idle else 'SOMETHING'} is held afterwards"
        + (f"; {problems[0]}" if problems else ""),
        {"requests": len(shapes), "running": running, "waiting": waiting, "seconds": seconds},
        {"replies": digest([reply.token_ids if reply else None for reply in replies])},
    )  # fmt: skip


def bench(trial: Trial) -> GateResult:
    """The exact harness at the record's concurrencies; more streams must not be slower together than one."""
    record = trial.record
    counts = record.concurrency[:2] if trial.quick else record.concurrency
    shape = ExactShape(
        record.prompt_tokens, record.output_tokens, counts, passes=1 if trial.quick else 3,
        first_offset=trial.source.next_offset,
    )  # fmt: skip
    report = run_exact(trial.endpoint, shape)
    trial.source.next_offset = report["offsets"][1]
    by_count = {str(row["concurrency"]): row for row in report["rows"]}
    rates = {count: row["output_tokens_per_second"] for count, row in by_count.items()}
    medians = [rate["median"] for rate in rates.values()]
    figures = {
        "tokens_per_second": rates,
        "decode": {count: row["decode_tokens_per_second"] for count, row in by_count.items()},
        "first_token_seconds": {count: row["first_token_seconds"]["median"] for count, row in by_count.items()},
        "inter_token_seconds": {count: row["inter_token_seconds"] for count, row in by_count.items()},
    }
    shown = ", ".join(
        f"c{count} {rate['median']:.1f} ({rate['lowest']:.1f}-{rate['highest']:.1f})" for count, rate in rates.items()
    )
    return GateResult(
        "bench-exact", report["exact"] and max(medians) >= medians[0],
        f"{record.prompt_tokens}/{record.output_tokens} tokens: {shown} tok/s; counts exact: {report['exact']}",
        figures, {"replies": digest([request["sha256"] for row in report["rows"] for request in row["requests"]])},
    )  # fmt: skip


def soak(trial: Trial) -> GateResult:
    """Requests of all lengths, a third broken off; afterwards nothing runs or is held, and the first answer stands."""
    prompt = trial.source.take(80).body()
    assert isinstance(prompt, list)
    before = trial.generate(prompt, 16, cache_salt="before")[:2]
    seconds = 5.0 if trial.quick else float(trial.record.soak_seconds)
    counts = {"finished": 0, "aborted": 0, "failed": 0}
    lock, end = threading.Lock(), time.monotonic() + seconds

    def worker(seed: int) -> None:
        choose = random.Random(seed)
        while time.monotonic() < end:
            with lock:
                body = {"prompt": trial.source.take(choose.randint(8, 400)).body(),
                        "max_tokens": choose.randint(1, 48), "temperature": choose.choice((0.0, 1.0))}  # fmt: skip
            outcome = _abort(trial.endpoint, body, choose) if choose.random() < 0.34 else _finish(trial.endpoint, body)
            with lock:
                counts[outcome] += 1

    threads = [threading.Thread(target=worker, args=(seed,)) for seed in range(_soak_streams(trial))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    idle = wait_idle(trial.endpoint)
    after = trial.generate(prompt, 16, cache_salt="after")[:2]
    passed = idle and before == after and trial.booted.alive
    passed = passed and counts["failed"] == 0 and min(counts["finished"], counts["aborted"]) > 0
    return GateResult(
        "soak", passed,
        f"{seconds:.0f} s: {counts['finished']} requests finished, {counts['aborted']} broken off, {counts['failed']} "
        f"failed; {'nothing runs or is held' if idle else 'SOMETHING runs or is held'} afterwards, the first reply "
        f"{'unchanged' if before == after else 'CHANGED'}", dict(counts), {"reply": digest(before)},
    )  # fmt: skip


def _soak_streams(trial: Trial) -> int:
    """A quarter more clients than rows, so that requests are also broken off while they wait."""
    rows = int(trial.profile.value("max_sequences"))
    return rows + max(1, rows // 4)


def _finish(endpoint: Endpoint, body: Mapping[str, Any]) -> str:
    try:
        endpoint.stream(body)
    except RunError:
        return "failed"
    return "finished"


def _abort(endpoint: Endpoint, body: Mapping[str, Any], choose: random.Random) -> str:
    """Close the connection at a random moment."""
    impatient = Endpoint(endpoint.url, endpoint.model, endpoint.api_key, timeout=choose.uniform(0.02, 0.6))
    try:
        impatient.complete({**body, "max_tokens": 200})
    except ServerError as error:
        return "aborted" if error.status == 0 else "failed"
    except OSError:
        return "aborted"
    return "finished"


def metrics(endpoint: Endpoint) -> dict[str, float]:
    """The server's plain metrics by name, labels included."""
    values = {}
    for line in endpoint.get("/metrics").splitlines():
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#"):
            values[name] = float(value)
    return values


def wait_idle(endpoint: Endpoint, patience: float = 30.0) -> bool:
    """Whether nothing runs, waits or holds cache memory, within some seconds."""
    end = time.monotonic() + patience
    names = ("slimserve_requests_running", "slimserve_requests_waiting", "slimserve_cache_used_bytes")
    while time.monotonic() < end:
        now = metrics(endpoint)
        if all(now.get(name) == 0 for name in names):
            return True
        time.sleep(0.2)
    return False


@dataclass(frozen=True, slots=True)
class MemoryGate:
    """The last gate: what the server holds lies between its plan without caches and its plan.

    Cache pages that no request touched take nothing on a CPU, so there the caches bound from above only.
    `at_start`: bytes right after start.
    """

    plan: MemoryPlan
    at_start: int
    untouched_pages_are_free: bool

    def __call__(self, trial: Trial) -> GateResult:
        """See `live_beside_plan`."""
        groups = self.plan.by_group()
        cache = groups.get("cache", 0) + groups.get("drafter.cache", 0)
        result = live_beside_plan(
            trial.live_bytes(), self.plan.total_bytes, cache if self.untouched_pages_are_free else 0
        )
        terms = start_terms(trial.endpoint)
        outside = [name for name, term in terms.items() if not _within(term["planned"], term["measured"])]
        shown = f"; {self.at_start / 2**20:.0f} MiB at start, terms measured there: " + ", ".join(
            f"{name} {term['measured'] / 2**20:.0f} of {term['planned'] / 2**20:.0f} MiB"
            for name, term in terms.items()
        )
        return GateResult(
            "memory", result.passed and not outside, result.detail + shown,
            {**result.figures, "start_bytes": self.at_start, "terms": terms},
        )  # fmt: skip


def live_beside_plan(live: int, planned: int, untouched: int) -> GateResult:
    """Whether live bytes are no more than planned, and no less but for `untouched` bytes."""
    least = planned - untouched
    low, high = least - max(TERM_MARGIN * least, TERM_LEAST), planned * (1 + TOTAL_MARGIN)
    return GateResult(
        "memory", live > 0 and low <= live <= high,
        f"{live / 2**20:.0f} MiB live after all this, {planned / 2**20:.0f} MiB planned, "
        f"{untouched / 2**20:.0f} of them pages that may lie untouched",
        {"live_bytes": live, "planned_bytes": planned, "untouched_bytes": untouched, "share": live / max(planned, 1)},
    )  # fmt: skip


def start_terms(endpoint: Endpoint) -> dict[str, dict[str, int]]:
    """Planned and measured bytes of every group that the server measured at start."""
    found = metrics(endpoint)
    terms: dict[str, dict[str, int]] = {}
    for name, planned in found.items():
        if name.startswith("slimserve_memory_planned_bytes{"):
            measured = found.get(name.replace("planned", "measured"))
            if measured is not None:
                terms[name.split('"')[1]] = {"planned": int(planned), "measured": int(measured)}
    return terms


def _within(planned: int, measured: int) -> bool:
    return abs(measured - planned) <= max(TERM_MARGIN * planned, TERM_LEAST)
