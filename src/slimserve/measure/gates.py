"""The gates of a qualification: each asks a running server something and says whether the answer may stand."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from slimserve.errors import RunError
from slimserve.measure.booted import BootedProfile
from slimserve.measure.client import Endpoint, ServerError
from slimserve.measure.exact import ExactShape, run_exact
from slimserve.measure.prompts import PromptSource, prompt_source
from slimserve.plan.compare import TOTAL_MARGIN
from slimserve.profiles.record import QualifyRecord
from slimserve.profiles.resolve import ResolvedProfile

NEEDLE = "The password of the harbour gate is"
SECRET = " violet seven"
NEEDLE_GAIN = 1.0
"""Nats that a needle in the prompt must add to the probability of its answer."""


@dataclass(frozen=True, slots=True)
class GateResult:
    """One gate. `figures` are numbers by name; `noise` is how far two runs of the same build were apart."""

    name: str
    passed: bool
    detail: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    noise: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name, "passed": self.passed, "detail": self.detail,
            "figures": dict(self.figures), "noise": dict(self.noise), "seconds": round(self.seconds, 2),
        }  # fmt: skip


@dataclass(slots=True)
class Trial:
    """What the gates share: the server, the profile, prompts that nobody had before."""

    booted: BootedProfile
    profile: ResolvedProfile
    record: QualifyRecord
    source: PromptSource
    live_bytes: Callable[[], int]
    quick: bool = False

    @property
    def endpoint(self) -> Endpoint:
        """Where the server answers."""
        return self.booted.endpoint

    def chat(self, text: str, **more: Any) -> dict[str, Any]:
        """The first choice of a greedy chat reply."""
        body = {"model": self.endpoint.model, "messages": [{"role": "user", "content": text}], "temperature": 0.0}
        answer = self.endpoint.post("/v1/chat/completions", {**body, "max_tokens": 128, **more})
        choice: dict[str, Any] = answer["choices"][0]
        return choice

    def score(self, token_ids: list[int]) -> list[tuple[float, float]]:
        """(log probability, best log probability) of every token but the first, by one scoring request."""
        answer = self.endpoint.post(
            "/v1/completions",
            {"model": self.endpoint.model, "prompt": token_ids, "max_tokens": 0, "echo": True, "logprobs": 1},
        )
        found = answer["choices"][0]["logprobs"]
        pairs = zip(found["token_logprobs"], found["top_logprobs"], strict=True)
        return [(value, max(top.values(), default=value)) for value, top in pairs if value is not None]

    def ids(self, text: str) -> list[int]:
        """Token ids of a text by the server's own tokenizer, without a beginning mark."""
        answer = self.endpoint.post("/tokenize", {"prompt": text, "add_special_tokens": False})
        return [int(token) for token in answer["tokens"]]

    def generate(self, token_ids: list[int], count: int, **more: Any) -> tuple[list[int], list[float], int]:
        """(token ids, their log probabilities, cached prompt tokens) of one reply of exactly `count` tokens."""
        body = {"model": self.endpoint.model, "prompt": token_ids, "max_tokens": count, "ignore_eos": True,
                "return_token_ids": True, "logprobs": 1, "temperature": 0.0, **more}  # fmt: skip
        answer = self.endpoint.post("/v1/completions", body)
        choice = answer["choices"][0]
        cached = answer["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return list(choice["token_ids"]), list(choice["logprobs"]["token_logprobs"]), int(cached)


Gate = Callable[[Trial], GateResult]


def start_trial(
    booted: BootedProfile, profile: ResolvedProfile, live_bytes: Callable[[], int], quick: bool = False
) -> Trial:
    """A trial on a server that has just come up; live_bytes tells what it holds of the device's memory."""
    assert profile.record is not None, "only profiles of the catalog are qualified"
    source = prompt_source(booted.endpoint, num_sentences=4000)
    return Trial(booted, profile, profile.record.qualify, source, live_bytes, quick)


def canary_text(trial: Trial) -> GateResult:
    """A plain question has its plain answer."""
    record = trial.record
    if trial.profile.chat:
        choice = trial.chat(record.canary)
        text = str(choice["message"].get("content") or "")
    else:
        body = {"prompt": record.canary, "max_tokens": 24, "temperature": 0.0}
        text = trial.endpoint.complete(body).text
    passed = re.search(record.expect, text) is not None
    return GateResult("canary-text", passed, f"{record.canary!r} -> {text[:200]!r}, expected {record.expect!r}")


def canary_thinking(trial: Trial) -> GateResult:
    """A model that thinks hands its thinking over apart from its answer."""
    message = trial.chat(trial.record.canary)["message"]
    thought, text = str(message.get("reasoning_content") or ""), str(message.get("content") or "")
    passed = bool(thought.strip()) and bool(text.strip()) and "<think>" not in text and "</think>" not in text
    return GateResult("canary-thinking", passed, f"thinking {thought[:120]!r}, answer {text[:120]!r}")


def canary_tool(trial: Trial) -> GateResult:
    """A question that needs a tool becomes a call with readable arguments."""
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    message = trial.chat("What is the weather in Oslo?", tools=[tool])["message"]
    calls = message.get("tool_calls") or []
    try:
        names = [call["function"]["name"] for call in calls]
        arguments = [json.loads(call["function"]["arguments"]) for call in calls]
    except (KeyError, ValueError, TypeError):
        names, arguments = [], []
    passed = names == ["get_weather"] and "oslo" in str(arguments[0].get("city", "")).lower()
    return GateResult("canary-tool", passed, f"calls {calls!s:.200}, content {message.get('content')!s:.120}")


def load_oracle(profile: str) -> dict[str, Any] | None:
    """The recorded oracle of a profile (token ids, and by how much it preferred its own), or None."""
    path = resources.files("slimserve.measure") / "oracles" / f"{profile}.json"
    if not path.is_file():
        return None
    oracle: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return oracle


def agreement(trial: Trial) -> GateResult:
    """Fed the oracle's tokens, the model prefers the same ones; where not, the oracle hardly preferred its own."""
    oracle = load_oracle(trial.profile.name)
    assert oracle is not None
    runs = [_agreement_run(trial, oracle["cases"]) for _ in range(2)]
    equal, total, worst = runs[0]
    share = equal / total
    # Few cases of a quick run may miss a bar that was set for all of them.
    bar = trial.record.agreement - (0.03 if trial.quick else 0.0)
    passed = share >= bar and worst <= trial.record.margin and runs[0] == runs[1]
    return GateResult(
        "agreement", passed,
        f"{equal} of {total} steps agree with {oracle['source']}; largest margin elsewhere {worst:.3f} nat",
        {"steps": total, "agreeing": equal, "share": share, "largest_margin": worst},
        {"agreeing": abs(runs[0][0] - runs[1][0])},
    )  # fmt: skip


def _agreement_run(trial: Trial, cases: list[dict[str, Any]]) -> tuple[int, int, float]:
    equal = total = 0
    worst = 0.0
    for case in cases[:3] if trial.quick else cases:
        output = case["output_token_ids"]
        scored = trial.score(case["prompt_token_ids"] + output)[-len(output) :]
        for (value, best), margin in zip(scored, case["margins"], strict=True):
            total += 1
            if value >= best:
                equal += 1
            else:
                worst = max(worst, float(margin))
    return equal, total, worst


def likelihood(trial: Trial) -> GateResult:
    """The fixed text's negative log likelihood: finite, and the same bits twice."""
    ids = trial.source.take(512).body()
    assert isinstance(ids, list)
    runs = [[value for value, _ in trial.score(ids)] for _ in range(2)]
    nats = -sum(runs[0]) / len(runs[0])
    passed = runs[0] == runs[1] and 0.0 < nats < 20.0
    twice = "twice the same bits" if runs[0] == runs[1] else "two runs DIFFER"
    return GateResult(
        "likelihood", passed, f"{nats:.4f} nat per token over {len(runs[0])} tokens of the fixed text; {twice}",
        {"nats_per_token": nats, "tokens": len(runs[0])},
        {"nats_per_token": abs(sum(runs[0]) - sum(runs[1])) / len(runs[0])},
    )  # fmt: skip


def needles(trial: Trial) -> GateResult:
    """A sentence planted early makes its answer likelier at the end, at every length; cold and cached agree."""
    needle, secret = trial.ids(f" {NEEDLE}{SECRET}."), trial.ids(SECRET)
    question = trial.ids(f" {NEEDLE}")
    gains: dict[str, float] = {}
    differing = []
    for length in trial.record.needles[:1] if trial.quick else trial.record.needles:
        filler = trial.source.take(length - len(needle) - len(question) - len(secret)).body()
        assert isinstance(filler, list)
        third = len(filler) // 3
        planted = filler[:third] + needle + filler[third:] + question + secret
        cold = trial.score(planted)
        cached = trial.score(planted)
        if cold != cached:
            differing.append(length)
        plain = trial.score(filler + question + secret)
        tail = len(secret)
        gains[str(length)] = sum(v for v, _ in cold[-tail:]) - sum(v for v, _ in plain[-tail:])
    passed = not differing and all(gain >= NEEDLE_GAIN for gain in gains.values())
    shown = ", ".join(f"{length} tokens {gain:+.2f} nat" for length, gain in gains.items())
    return GateResult(
        "needles", passed, f"{shown}; cold and cached differ at {differing or 'no length'}", {"gain": gains}
    )


def row_independence(trial: Trial) -> GateResult:
    """The same requests alone and among others: identical token ids and identical log probabilities."""
    count = 4 if trial.quick else 8
    prompts = [trial.source.take(96 + 17 * number).body() for number in range(count)]
    settings = [{"temperature": 0.0} if n % 2 == 0 else {"temperature": 1.0, "seed": n} for n in range(count)]
    alone = [_plain(trial, prompt, setting, "alone") for prompt, setting in zip(prompts, settings, strict=True)]
    together: list[Any] = [None] * count

    def run(number: int) -> None:
        together[number] = _plain(trial, prompts[number], settings[number], "together")

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    different = [number for number in range(count) if alone[number] != together[number]]
    return GateResult(
        "row-independence", not different,
        f"{count} requests alone and together: {'all bits equal' if not different else f'{different} differ'}",
        {"requests": count, "different": len(different)},
    )  # fmt: skip


def _plain(trial: Trial, prompt: Any, setting: Mapping[str, Any], salt: str) -> tuple[list[int], list[float]]:
    """Ids and log probabilities of a reply; the salt keeps the two arms from sharing a prefix cache."""
    ids, logprobs, _ = trial.generate(prompt, 24, cache_salt=salt, **setting)
    return ids, logprobs


def prefix_cache(trial: Trial) -> GateResult:
    """A prompt again: tokens come from the cache, and every bit of the reply stays."""
    prompt = trial.source.take(320).body()
    longer = trial.source.take(64).body()
    assert isinstance(prompt, list) and isinstance(longer, list)
    cold = trial.generate(prompt, 24)
    warm = trial.generate(prompt, 24)
    cold_longer = trial.generate(prompt + longer, 24, cache_salt="apart")
    warm_longer = trial.generate(prompt + longer, 24)
    same = cold[:2] == warm[:2] and cold_longer[:2] == warm_longer[:2]
    passed = same and cold[2] == 0 and warm[2] >= 64 and warm_longer[2] >= 64
    return GateResult(
        "prefix-cache", passed,
        f"cached tokens {cold[2]}, {warm[2]}, {warm_longer[2]}; replies {'equal' if same else 'DIFFER'}",
        {"cached": warm[2], "cached_longer": warm_longer[2]},
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
    rates = {str(row["concurrency"]): row["output_tokens_per_second"] for row in report["rows"]}
    medians = [row["output_tokens_per_second"]["median"] for row in report["rows"]]
    passed = report["exact"] and max(medians) >= medians[0]
    shown = ", ".join(f"c{count} {rate['median']:.1f}" for count, rate in rates.items())
    figures = {
        "tokens_per_second": rates,
        "decode": {str(row["concurrency"]): row["decode_tokens_per_second"] for row in report["rows"]},
        "first_token_seconds": {
            str(row["concurrency"]): row["first_token_seconds"]["median"] for row in report["rows"]
        },
    }
    detail = f"{record.prompt_tokens}/{record.output_tokens} tokens: {shown} tok/s; counts exact: {report['exact']}"
    noise = {f"c{count}": rate["spread"] for count, rate in rates.items()}
    return GateResult("bench-exact", passed, detail, figures, noise)


def memory(trial: Trial, planned_bytes: int) -> GateResult:
    """What the server holds after all that is what the plan said, or less (pages that nobody touched yet)."""
    live = trial.live_bytes()
    passed = 0 < live <= planned_bytes * (1 + TOTAL_MARGIN)
    return GateResult(
        "memory", passed, f"{live / 2**20:.0f} MiB live, {planned_bytes / 2**20:.0f} MiB planned",
        {"live_bytes": live, "planned_bytes": planned_bytes, "share": live / max(planned_bytes, 1)},
    )  # fmt: skip


def soak(trial: Trial) -> GateResult:
    """Requests of all lengths, a third broken off; afterwards nothing runs and the first answer is unchanged."""
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

    threads = [threading.Thread(target=worker, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    idle = _idle(trial.endpoint)
    after = trial.generate(prompt, 16, cache_salt="after")[:2]
    passed = counts["failed"] == 0 and counts["finished"] > 0 and idle and before == after and trial.booted.alive
    return GateResult(
        "soak", passed,
        f"{seconds:.0f} s: {counts}; {'idle afterwards' if idle else 'NOT idle afterwards'}, the first reply "
        f"{'unchanged' if before == after else 'CHANGED'}", dict(counts),
    )  # fmt: skip


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


def _idle(endpoint: Endpoint, patience: float = 15.0) -> bool:
    """Whether nothing runs or waits, within some seconds."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        lines = endpoint.get("/metrics").splitlines()
        values = {line.split()[0]: float(line.split()[1]) for line in lines if line and line[0] != "#" and " " in line}
        if values.get("slimserve_requests_running") == 0 and values.get("slimserve_requests_waiting") == 0:
            return True
        time.sleep(0.2)
    return False
