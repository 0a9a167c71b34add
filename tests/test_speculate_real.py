"""Qwen2.5-Coder, real weights: drafting from the text and by a smaller model changes no token."""

from __future__ import annotations

import random
from typing import Any

import pytest
import reference_outputs
import torch
from speculation_rig import Reply, ScriptedDrafter, make_engine, said, serve

from slimserve.engine.build import check_vocabularies
from slimserve.engine.config import DrafterKind
from slimserve.engine.loop import Engine
from slimserve.engine.request import Request, SamplingParams
from slimserve.fetch import model_path
from slimserve.measure.speculate_tasks import EDITED_FILE
from slimserve.serve.model_text import model_text
from slimserve.weights.loader import LoadedModel, load_model

LARGER = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def small(request: pytest.FixtureRequest) -> LoadedModel:
    device = request.param
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    loaded = load_model(reference_outputs.model_file("qwen25-coder-0.5b"), device=device)
    if device == "cpu" and "reference" in " ".join(loaded.kernels.values()):
        pytest.skip("the C++ kernels are not built here; the torch references would take minutes")
    return loaded


@pytest.fixture(scope="module")
def larger(small: LoadedModel) -> LoadedModel:
    if not model_path(LARGER).exists():
        pytest.skip(f"model file {LARGER} is not in the cache")
    return load_model(model_path(LARGER), device=small.device)


def requests_of(loaded: LoadedModel, count: int, max_tokens: int) -> list[Request]:
    """Parts of a file to go on with, and a chat about them; greedy and sampled with the recommended filters."""
    text = model_text(loaded.source, loaded.config.vocab_size)
    lines = EDITED_FILE.splitlines(keepends=True)
    requests = []
    for i in range(count):
        part = "".join(lines[3 * i % 40 : 3 * i % 40 + 8 + i % 5])
        if i % 2:
            prompt = text.encode(part + "\n\n# The same again:\n" + part[: len(part) // 3])
        else:
            prompt = text.encode_chat([{"role": "user", "content": f"Repeat this:\n{part}"}], None, {})
        sampling = SamplingParams(
            temperature=0.0 if i % 3 else 1.0, top_p=0.95, top_k=20, seed=i, logprobs=1 if i % 4 < 3 else None,
            repetition_penalty=1.05 if i % 5 == 4 else 1.0, frequency_penalty=0.1 if i % 7 == 6 else 0.0,
            banned_token_ids=tuple(range(300, 320)) if i % 6 == 2 else (), min_tokens=9 if i % 8 < 2 else 0,
        )  # fmt: skip
        stops = frozenset(range(2000 * (i % 4), 2000 * (i % 4) + 900)) if i % 4 == 1 else frozenset()
        requests.append(Request(f"r{i}", prompt, sampling, max_tokens, stop_token_ids=stops, ignore_eos=True))
    return requests


def run(loaded: LoadedModel, kind: DrafterKind, requests: list[Request], companion: Any = None) -> tuple[Any, Any]:
    engine = make_engine(
        loaded, kind, companion=companion, max_sequences=len(requests), max_context=512, token_budget=256, max_draft=5
    )
    first: dict[str, Reply] = serve(engine, requests)
    again = serve(engine, requests) if kind is not DrafterKind.NONE else first
    assert said(again) == said(first), "on prefix hits"
    return said(first), engine.scheduler.counters


def test_small_model_alone_and_in_company(small: LoadedModel) -> None:
    requests = requests_of(small, 10, 20)
    plain, _ = run(small, DrafterKind.NONE, requests)
    for kind, companion in ((DrafterKind.LOOKUP, None), (DrafterKind.MODEL, small.model)):
        drafted, counters = run(small, kind, requests, companion)
        assert drafted == plain, kind.value
        assert counters.accepted_tokens > 0.3 * counters.drafted_tokens > 0, kind.value
    for i in (0, 3):
        alone, _ = run(small, DrafterKind.LOOKUP, [requests[i]])
        assert alone[f"r{i}"] == plain[f"r{i}"]


def test_small_model_preempted_and_with_any_drafts(small: LoadedModel) -> None:
    requests = requests_of(small, 8, 14)
    settings: dict[str, Any] = {"max_sequences": 8, "max_context": 512, "token_budget": 256, "max_draft": 5}
    plain = serve(make_engine(small, prefix_caching=False, **settings), requests)
    rng = random.Random(2)

    def preempt(engine: Engine, step: int) -> None:
        running = [job for job in engine.scheduler._running if job.sequence is not None]
        if step % 4 == 3 and running:
            engine.scheduler._preempt(rng.choice(running), {})

    engine = make_engine(small, DrafterKind.LOOKUP, **settings)
    assert said(serve(engine, requests, each_step=preempt)) == said(plain)
    assert engine.scheduler.counters.num_preemptions > 1 < engine.scheduler.counters.accepted_tokens
    for right in (0.0, 0.5, 1.0):
        expected = {name: reply.token_ids for name, reply in plain.items()}
        scripted = ScriptedDrafter(expected, right, vocab_size=small.model.config.vocab_size)
        engine = make_engine(small, drafter=scripted, **settings)
        assert said(serve(engine, requests)) == said(plain), f"{right:.0%} of the drafts are right"


@pytest.mark.slow
def test_larger_model_drafted_by_the_small_one(small: LoadedModel, larger: LoadedModel) -> None:
    check_vocabularies(larger.source, small.source)
    requests = requests_of(larger, 32, 40)
    plain, _ = run(larger, DrafterKind.NONE, requests)
    for kind, companion in ((DrafterKind.LOOKUP, None), (DrafterKind.MODEL, small.model)):
        drafted, counters = run(larger, kind, requests, companion)
        assert drafted == plain, kind.value
        assert counters.accepted_tokens > 0.3 * counters.drafted_tokens > 0, kind.value
