"""Long random lives of an engine that drafts: nothing leaks, every request ends once, replies stay those of plain
decoding."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_dflash2
from speculation_rig import make_engine
from tiny_mtp import save_tiny

from slimserve.cache.budget import cache_bytes
from slimserve.engine.config import DrafterKind
from slimserve.engine.loop import Engine
from slimserve.engine.request import FinishReason, Request, SamplingParams
from slimserve.engine.speculate.model_drafter import ModelDrafter
from slimserve.weights.loader import LoadedModel, load_model


class Life:
    """Submits, aborts and steps at random; a request in 16 is asked again of an engine that decodes plainly."""

    def __init__(self, loaded: LoadedModel, engine: Engine, seed: int) -> None:
        self.loaded, self.engine = loaded, engine
        self.vocab_size = loaded.model.config.vocab_size
        self.rng = random.Random(seed)
        self.open: dict[str, tuple[Request, list[int]]] = {}
        self.past: list[list[int]] = []
        self.steps = self.ends = self.checked = 0

    def submit(self) -> None:
        rng = self.rng
        prompt = [rng.randrange(1, self.vocab_size) for _ in range(rng.choice((1, 5, 30, 63, 64, 65, 120)))]
        if self.past and rng.random() < 0.5:
            old = rng.choice(self.past[-8:])
            prompt = (old[: rng.choice((len(old), rng.randint(1, len(old))))] + prompt)[:170]
        sampling = SamplingParams(
            temperature=rng.choice((0.0, 1.0)), top_p=0.95, top_k=20, seed=rng.randrange(1 << 60),
            repetition_penalty=rng.choice((1.0, 1.0, 1.1)), min_tokens=rng.choice((0, 0, 4)),
        )  # fmt: skip
        request = Request(
            f"r{self.ends + len(self.open)}-{self.steps}", prompt, sampling, rng.choice((1, 2, 9, 30, 70)),
            stop_token_ids=frozenset(rng.sample(range(self.vocab_size), rng.choice((0, 0, 4)))),
            speculate=rng.random() < 0.9,
        )  # fmt: skip
        self.open[request.request_id] = (request, [])
        self.engine.submit(request)

    def step(self) -> None:
        self.steps += 1
        for output in self.engine.step():
            assert output.error is None, output.error
            request, tokens = self.open[output.request_id]
            tokens += output.token_ids
            assert len(tokens) <= request.max_tokens
            if output.finish_reason is not None:
                del self.open[output.request_id]
                self.ends += 1
                self.past.append([*request.prompt_token_ids, *tokens])
                if output.finish_reason is not FinishReason.ABORT and self.ends % 16 == 0:
                    self.check(request, tokens)

    def check(self, request: Request, tokens: list[int]) -> None:
        plain = make_engine(self.loaded, max_sequences=1, max_context=256)
        plain.submit(
            Request("again", list(request.prompt_token_ids), request.sampling, request.max_tokens,
                    stop_token_ids=request.stop_token_ids)
        )  # fmt: skip
        found: list[int] = []
        while plain.has_work:
            for output in plain.step():
                found += output.token_ids
        assert found == tokens, f"{request.request_id}: drafting changed a reply"
        self.checked += 1

    def live(self, steps: int, audit_every: int) -> None:
        rng = self.rng
        while self.steps < steps:
            while len(self.open) < 9 and rng.random() < 0.4:
                self.submit()
            if self.open and rng.random() < 0.02:
                self.engine.abort(rng.choice(list(self.open)))
            running = [job for job in self.engine.scheduler._running if job.sequence is not None]
            if running and rng.random() < 0.02:
                self.engine.scheduler._preempt(rng.choice(running), {})
            if self.engine.has_work:
                self.step()
            if self.steps % audit_every == 0:
                self.engine.audit()
        while self.engine.has_work:
            self.step()
        self.check_nothing_left()

    def check_nothing_left(self) -> None:
        assert not self.open
        self.engine.audit()
        caches = [self.engine.cache]
        drafter: Any = self.engine.drafter
        if isinstance(drafter, ModelDrafter):
            caches.append(drafter.cache)
            assert len(drafter) == 0 and not drafter._sampler._kept
        else:
            assert len(drafter._tracker) == 0 and not drafter._sampler._kept
        for cache in caches:
            assert all(usage.num_held == 0 for usage in cache.usage())
            cache.clear_index()
            cache.audit()
            assert all(usage.num_free == usage.num_units for usage in cache.usage())


def _nextn(kind: str) -> Callable[[Path], tuple[LoadedModel, DrafterKind, Any]]:
    def make(folder: Path) -> tuple[LoadedModel, DrafterKind, Any]:
        pytest.importorskip("tiny_hybrids", reason="needs transformers")
        return load_model(save_tiny(kind, folder)), DrafterKind.NEXTN, None

    return make


def _dflash2(folder: Path) -> tuple[LoadedModel, DrafterKind, Any]:
    pytest.importorskip("tiny_hybrids", reason="needs transformers")
    companion = load_model(tiny_dflash2.save_folder(folder / "drafter", tiny_dflash2.tensors()), drafter=True)
    return load_model(save_tiny("qwen", folder / "target")), DrafterKind.DFLASH2, companion.model


def _model(folder: Path) -> tuple[LoadedModel, DrafterKind, Any]:
    tiny_models = pytest.importorskip("tiny_models", reason="needs transformers")
    loaded = load_model(tiny_models.save_folder(tiny_models.build("qwen2"), folder))
    return loaded, DrafterKind.MODEL, loaded.model


CASES = {"nextn qwen": _nextn("qwen"), "nextn glm": _nextn("glm"), "dflash2": _dflash2, "model": _model}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("steps", "audit_every"), [(500, 9), pytest.param(100_000, 997, marks=pytest.mark.slow)], ids=["short", "long"]
)
@pytest.mark.timeout(7200)
def test_a_long_life(case: str, steps: int, audit_every: int, tmp_path: Path) -> None:
    """Half of the pages that six longest requests would take, and preemption besides."""
    loaded, kind, companion = CASES[case](tmp_path)
    settings: dict[str, Any] = {"max_sequences": 6, "max_context": 256, "token_budget": 96, "max_draft": 5}
    roomy = make_engine(loaded, kind, companion=companion, **settings).cache
    budget = cache_bytes([group.spec for group in roomy.groups], roomy.plan.demand, 12)
    engine = make_engine(loaded, kind, companion=companion, budget_bytes=budget, **settings)
    life = Life(loaded, engine, seed=steps)
    life.live(steps, audit_every)
    counters = engine.scheduler.counters
    assert counters.drafted_tokens > steps and life.checked > 2 and counters.finished["abort"] > 0
    assert counters.num_preemptions > 0 and counters.prefix_hit_tokens > 0
