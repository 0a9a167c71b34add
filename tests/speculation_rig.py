"""Engines with and without drafting side by side, and drafters that tell or obey."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from slimserve.engine.config import (
    CacheConfig,
    CacheDtype,
    DrafterKind,
    EngineConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from slimserve.engine.loop import Engine
from slimserve.engine.request import FinishReason, Request, SamplingParams
from slimserve.engine.speculate import Drafter
from slimserve.engine.step import StepPlan, StepResult
from slimserve.weights.loader import LoadedModel


@dataclass
class Reply:
    """What one request got."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    ends: list[FinishReason] = field(default_factory=list)
    num_cached: int = 0
    cut_by: str | None = None

    @property
    def said(self) -> tuple[list[int], list[object], list[FinishReason]]:
        """Everything that drafting may not change."""
        return self.token_ids, self.logprobs, self.ends


def make_engine(
    loaded: LoadedModel,
    kind: DrafterKind = DrafterKind.NONE,
    *,
    max_draft: int = 4,
    prefix_caching: bool = True,
    max_sequences: int = 32,
    max_context: int = 512,
    token_budget: int = 160,
    budget_bytes: int | None = None,
    dtype: CacheDtype = CacheDtype.BF16,
    drafter: Drafter | None = None,
    companion: Any = None,
    end_token_ids: frozenset[int] = frozenset(),
    **speculation: Any,
) -> Engine:
    """An engine that drafts whatever it costs, unless `measured` says otherwise."""
    return Engine(
        loaded.model,
        EngineConfig(
            device=str(loaded.device),
            cache=CacheConfig(dtype=dtype, prefix_caching=prefix_caching, budget_bytes=budget_bytes),
            scheduler=SchedulerConfig(
                max_sequences=max_sequences,
                max_context=min(max_context, loaded.model.config.max_context),
                token_budget=token_budget,
                mixed_prefill_budget=token_budget // 2,
            ),
            speculation=SpeculationConfig(kind, max_draft, **{"measured": False, **speculation}),
            numerics=loaded.numerics,
        ),
        end_token_ids=end_token_ids,
        drafter=drafter,
        companion=companion,
    )


def mixed_requests(count: int, vocab_size: int, max_tokens: int = 20, seed: int = 3) -> list[Request]:
    """Greedy and sampled requests with penalties, bans, log probabilities, stops and least lengths; prompts around
    block boundaries that partly share beginnings."""
    rng = random.Random(seed)
    shared = [rng.randrange(1, vocab_size) for _ in range(140)]
    requests = []
    for i in range(count):
        fresh = [rng.randrange(1, vocab_size) for _ in range(rng.choice((1, 9, 63, 64, 65, 100)))]
        prompt = shared[: rng.choice((64, 70, 128, 140))] + fresh if i % 3 == 0 else fresh
        sampling = SamplingParams(
            temperature=float(i % 2),
            top_p=0.95,
            top_k=20,
            seed=i,
            logprobs=2 if i % 4 < 2 else None,
            repetition_penalty=1.2 if i % 5 == 0 else 1.0,
            frequency_penalty=0.3 if i % 7 == 0 else 0.0,
            banned_token_ids=(7, 11) if i % 6 == 0 else (),
            min_tokens=6 if i % 8 < 2 else 0,
        )
        stops = frozenset(rng.sample(range(vocab_size), vocab_size // 16)) if i % 4 == 1 else frozenset()
        length = max_tokens if i % 9 else 2
        requests.append(Request(f"r{i}", prompt, sampling, length, stop_token_ids=stops, speculate=i % 10 != 9))
    return requests


def serve(
    engine: Engine, requests: Sequence[Request], *, each_step: Callable[[Engine, int], None] | None = None
) -> dict[str, Reply]:
    """Submit all at once and step until all have ended; audits after every step."""
    for r in requests:
        engine.submit(
            Request(
                r.request_id, list(r.prompt_token_ids), r.sampling, r.max_tokens, stop_token_ids=r.stop_token_ids,
                ignore_eos=r.ignore_eos, speculate=r.speculate,
            )
        )  # fmt: skip
    replies: dict[str, Reply] = {}
    step = 0
    while engine.has_work:
        if each_step is not None:
            each_step(engine, step)
        for output in engine.step():
            assert output.error is None, output.error
            reply = replies.setdefault(output.request_id, Reply())
            reply.token_ids += output.token_ids
            reply.logprobs += output.logprobs
            reply.num_cached, reply.cut_by = output.num_cached_tokens, output.cache_cut_by
            if output.finish_reason is not None:
                reply.ends.append(output.finish_reason)
        engine.audit()
        step += 1
    assert all(len(reply.ends) == 1 for reply in replies.values()) and len(replies) == len(requests)
    return replies


def said(replies: dict[str, Reply]) -> dict[str, object]:
    """For comparisons."""
    return {name: reply.said for name, reply in sorted(replies.items())}


class ScriptedDrafter:
    """Drafts of known replies: each token right with probability `right`, of random length."""

    def __init__(self, expected: dict[str, list[int]], right: float, seed: int = 1, vocab_size: int = 100) -> None:
        self._expected, self._right, self._vocab_size = expected, right, vocab_size
        self._rng = random.Random(seed)

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[tuple[int, ...]]:
        return [self._propose(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def release(self, request_id: str) -> None:
        """Nothing is kept."""

    def _propose(self, request: Request, limit: int) -> tuple[int, ...]:
        done = len(request.output_token_ids)
        tokens = self._expected[request.request_id][done : done + self._rng.randint(1, limit)]
        return tuple(t if self._rng.random() < self._right else (t + 1) % self._vocab_size for t in tokens)


class Recorder:
    """Stands between an engine and its drafter: keeps the rows that it observes by position, and every proposal."""

    def __init__(self, engine: Engine, watched: str = "r0") -> None:
        self._drafter: Any = engine.drafter
        self._watched = watched
        self.taps: tuple[int, ...] = self._drafter.taps
        self.rows: dict[int, torch.Tensor] = {}
        self.proposals: list[tuple[list[int], tuple[int, ...]]] = []
        planner: Any = engine.scheduler._drafting
        planner._drafter = self
        engine.runner._observer = self

    def observe(self, plan: StepPlan, result: StepResult, hidden: torch.Tensor, tapped: Sequence[torch.Tensor]) -> None:
        self._drafter.observe(plan, result, hidden, tapped)
        token = 0
        for row in plan.rows:
            for i in range(row.q_len):
                if row.request.request_id == self._watched:
                    found = torch.cat([tap[token] for tap in tapped]) if self.taps else hidden[token]
                    self.rows[row.start_position + i] = found.clone()
                token += 1

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[tuple[int, ...]]:
        proposals: list[tuple[int, ...]] = self._drafter.propose(requests, limits)
        for request, proposal in zip(requests, proposals, strict=True):
            if request.request_id == self._watched:
                self.proposals.append(([*request.prompt_token_ids, *request.output_token_ids], proposal))
        return proposals

    def release(self, request_id: str) -> None:
        self._drafter.release(request_id)


def acceptance(engine: Engine) -> list[float]:
    """Share of drafts that held by position, of those whose predecessors held."""
    counters = engine.scheduler.counters
    reached = [counters.drafted_at[0], *counters.accepted_at[:-1]] if counters.drafted_at else []
    return [held / max(1, of) for held, of in zip(counters.accepted_at, reached, strict=True)]
