"""The gates of a qualification: each asks a running server something and says whether the answer may stand.

Here are the gates about what the model says; `needles` and `load` hold the others.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from slimserve.measure.booted import BootedProfile
from slimserve.measure.client import Endpoint
from slimserve.measure.prompts import PromptSource, fixed_text, prompt_source
from slimserve.profiles.record import QualifyRecord
from slimserve.profiles.resolve import ResolvedProfile

LIKELIHOOD_TOKENS = 512
_FIXED_SENTENCES = 200
"""Sentences of the fixed text, more than LIKELIHOOD_TOKENS tokens of any vocabulary."""


@dataclass(frozen=True, slots=True)
class GateResult:
    """One gate, asked once.

    `figures` are numbers by name. `exact` holds what a second run of the same build must repeat to the last bit.
    """

    name: str
    passed: bool
    detail: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    exact: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def digest(values: object) -> str:
    """A short name of some numbers, different as soon as one of them differs in its last bit."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


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

    def ids(self, text: str, mark: bool = False) -> list[int]:
        """Token ids of a text by the server's own tokenizer; `mark`: with the beginning mark of the model, if any."""
        answer = self.endpoint.post("/tokenize", {"prompt": text, "add_special_tokens": mark})
        return [int(token) for token in answer["tokens"]]

    def chat_ids(self, text: str) -> list[int]:
        """Token ids of a chat with one message, ready for the reply, without thinking."""
        body = {"messages": [{"role": "user", "content": text}], "chat_template_kwargs": {"enable_thinking": False}}
        return [int(token) for token in self.endpoint.post("/tokenize", body)["tokens"]]

    def generate(self, token_ids: list[int], count: int, **more: Any) -> tuple[list[int], list[float], int]:
        """(token ids, their log probabilities, cached prompt tokens) of one reply of exactly `count` tokens."""
        body = {"model": self.endpoint.model, "prompt": token_ids, "max_tokens": count, "ignore_eos": True,
                "return_token_ids": True, "logprobs": 1, "temperature": 0.0, **more}  # fmt: skip
        answer = self.endpoint.post("/v1/completions", body)
        choice = answer["choices"][0]
        cached = answer["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return list(choice["token_ids"]), list(choice["logprobs"]["token_logprobs"]), int(cached)


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
    detail = f"{record.canary!r} -> {text[:200]!r}, expected {record.expect!r}"
    return GateResult("canary-text", passed, detail, exact={"reply": digest(text)})


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
    equal = total = 0
    worst = 0.0
    scores = []
    for case in oracle["cases"][:3] if trial.quick else oracle["cases"]:
        output = case["output_token_ids"]
        scored = trial.score(case["prompt_token_ids"] + output)[-len(output) :]
        scores.append(scored)
        for (value, best), margin in zip(scored, case["margins"], strict=True):
            total += 1
            if value >= best:
                equal += 1
            else:
                worst = max(worst, float(margin))
    share = equal / total
    # Few cases of a quick run may miss a bar that was set for all of them.
    bar = trial.record.agreement - (0.03 if trial.quick else 0.0)
    return GateResult(
        "agreement", share >= bar and worst <= trial.record.margin,
        f"{equal} of {total} steps agree with {oracle['source']} (asked: {trial.record.agreement:.0%}); largest margin "
        f"of the oracle elsewhere {worst:.3f} nat (allowed: {trial.record.margin:g})",
        {"steps": total, "agreeing": equal, "share": share, "largest_margin": worst},
        {"scores": digest(scores)},
    )  # fmt: skip


def likelihood_ids(encode: Callable[[str], Sequence[int]]) -> list[int]:
    """The first tokens of the fixed text; `encode` is to put the model's beginning mark in front."""
    return list(encode(fixed_text(_FIXED_SENTENCES)))[:LIKELIHOOD_TOKENS]


def likelihood(trial: Trial) -> GateResult:
    """The fixed text has the reference's tokens, and its negative log likelihood per token within a margin."""
    known = (load_oracle(trial.profile.name) or {}).get("likelihood")
    ids = likelihood_ids(lambda text: trial.ids(text, mark=True))
    values = [value for value, _ in trial.score(ids)]
    nats = -sum(values) / len(values)
    if known is None:
        passed, beside = 0.0 < nats < 20.0, "no reference is recorded, so only its being finite was asked"
        figures = {"nats_per_token": nats, "tokens": len(values)}
    else:
        margin = trial.record.likelihood
        apart = nats - known["nats_per_token"]
        passed = digest(ids) == known["tokens"] and abs(apart) <= margin
        figures = {"nats_per_token": nats, "reference": known["nats_per_token"], "tokens": len(values)}
        beside = f"{apart:+.4f} beside {known['source']} (allowed: {margin:g})"
        if digest(ids) != known["tokens"]:
            beside += "; the text has OTHER TOKENS than the reference's"
    detail = f"{nats:.4f} nat per token over {len(values)} tokens of the fixed text, {beside}"
    return GateResult("likelihood", passed, detail, figures, {"scores": digest(values)})


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
        {"requests": count, "different": len(different)}, {"replies": digest(alone)},
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
        {"cached": warm[2], "cached_longer": warm_longer[2]}, {"replies": digest([cold[:2], cold_longer[:2]])},
    )  # fmt: skip
