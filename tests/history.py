"""Random histories of one engine with a fake model: submit, abort anywhere, preempt, evict, finish, draft."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from fake_model import ALL_KINDS, MAX_DRAFT, VOCAB, FakeModel, cache_table, continuation, explicit_plan, next_token

from slimserve.cache.budget import CacheDemand
from slimserve.cache.manager import CacheManager
from slimserve.cache.prefix import CacheIdentity
from slimserve.cache.storage import CacheStorage
from slimserve.engine.config import SchedulerConfig
from slimserve.engine.forward import Computed, ForwardPass
from slimserve.engine.inputs import InputBuffers
from slimserve.engine.request import FinishReason, Request, SamplingParams
from slimserve.engine.runner import Runner
from slimserve.engine.scheduler import Scheduler
from slimserve.engine.speculate import SpeculationControl
from slimserve.engine.step import RequestOutput
from slimserve.errors import RequestError
from slimserve.models.contract import CacheKind

END_TOKEN = 5


class OracleDrafter:
    """Drafts the true continuation, and wrong tokens now and then."""

    def __init__(self, rng: random.Random, kinds, right: float) -> None:
        self._rng, self._kinds, self._right = rng, kinds, right

    def propose(self, requests: list[Request], limits: list[int]) -> list[tuple[int, ...]]:
        return [self._propose(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def release(self, request_id: str) -> None:
        """Nothing is kept."""

    def _propose(self, request: Request, limit: int) -> tuple[int, ...]:
        count = self._rng.randint(0, limit)
        known = [*request.prompt_token_ids, *request.output_token_ids]
        draft = continuation(known, count, self._kinds)
        return tuple(t if self._rng.random() < self._right else self._rng.randrange(VOCAB) for t in draft)


class PlainRecorder:
    """Repeats the call itself: steps are widened with null rows as for graphs, on any device."""

    def record(self, run: Callable[[], Computed], result: Computed) -> Callable[[], Computed]:
        return run


@dataclass
class Open:
    """What a history knows about a request that has not ended."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    aborted: bool = False
    struck: bool = False


class House:
    """Scheduler, cache, runner and fake model, with small pools so that memory is always short."""

    def __init__(
        self,
        seed: int,
        *,
        kinds: tuple[CacheKind, ...] = ALL_KINDS,
        pages: int = 40,
        slots: int = 14,
        max_sequences: int = 6,
        max_context: int = 640,
        token_budget: int = 200,
        mixed_prefill_budget: int = 96,
        spacing: int = 256,
        prefix_caching: bool = True,
        right_drafts: float | None = 0.7,
        max_queue: int = 12,
        padded: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.kinds = kinds
        self.now = 0.0
        specs = cache_table(kinds)
        demand = CacheDemand(max_sequences, max_context, token_budget, spacing)
        counts = []
        for kind in kinds:
            units = slots if kind is CacheKind.RECURRENT else pages
            counts.append((units, max_sequences if kind in (CacheKind.INDEXER, CacheKind.RECURRENT) else 0))
        plan = explicit_plan(demand, counts, kinds)
        storage = CacheStorage(specs, plan, torch.device("cpu"))
        self.cache = CacheManager(
            specs, plan, identity=CacheIdentity("fake"), storage=storage, prefix_caching=prefix_caching
        )
        self.drafter = None if right_drafts is None else OracleDrafter(self.rng, kinds, right_drafts)
        config = SchedulerConfig(
            max_sequences=max_sequences,
            max_context=max_context,
            token_budget=token_budget,
            mixed_prefill_budget=mixed_prefill_budget,
            max_queue=max_queue,
            skip_ahead=4,
            ageing_steps=8,
        )
        self.scheduler = Scheduler(
            config,
            self.cache,
            end_token_ids=frozenset({END_TOKEN}),
            drafter=self.drafter,
            control=SpeculationControl(MAX_DRAFT, measured=False),
            clock=lambda: self.now,
        )
        self.model = FakeModel(kinds, max_context)
        most = token_budget + max_sequences * (1 + MAX_DRAFT)
        buffers = InputBuffers(specs, max_sequences, most, max_context, torch.device("cpu"))
        recorder = PlainRecorder() if padded else None
        self.forward = ForwardPass(self.model, self.cache, storage.layers, buffers, VOCAB, recorder=recorder)
        self.runner = Runner(self.forward, end_token_ids=frozenset({END_TOKEN}))
        self.open: dict[str, Open] = {}
        self.past: list[list[int]] = []
        self.num_submitted = self.num_ended = self.num_refused = self.num_steps = 0
        self.ends: dict[FinishReason, int] = {}

    # What a history may do.

    def submit(self) -> None:
        prompt = self._prompt()
        request = Request(
            f"r{self.num_submitted}",
            prompt,
            SamplingParams(
                temperature=0.0, min_tokens=self.rng.choice((0, 0, 3)), prompt_logprobs=self.rng.random() < 0.1
            ),
            max_tokens=self.rng.choice((0, 1, 2, 7, 30, 90, 150)),
            stop_token_ids=frozenset(self.rng.sample(range(VOCAB), self.rng.choice((0, 0, 2)))),
            ignore_eos=self.rng.random() < 0.5,
            priority=self.rng.choice((0, 0, 0, 1, -1)),
            deadline=self.now + 40 if self.rng.random() < 0.05 else None,
            cache_salt=self.rng.choice(("", "", "tenant")),
            speculate=self.rng.random() < 0.8,
        )
        try:
            self.scheduler.submit(request)
        except RequestError as error:
            assert error.status in (400, 429)
            self.num_refused += 1
            return
        self.num_submitted += 1
        self.open[request.request_id] = Open(request)

    def _prompt(self) -> list[int]:
        """Fresh tokens, an old sequence, one that continues it, or one that shares a part of it."""
        fresh = [self.rng.randrange(VOCAB) for _ in range(self.rng.choice((1, 5, 63, 64, 65, 128, 190, 260, 400)))]
        if not self.past or self.rng.random() < 0.3:
            return fresh
        old = self.rng.choice(self.past[-12:])
        cut = self.rng.choice((len(old), len(old), self.rng.randint(1, len(old))))
        return (old[:cut] + self.rng.choice(([], fresh[:20], fresh)))[:500]

    def abort(self) -> None:
        if self.open:
            request_id = self.rng.choice(list(self.open))
            self.scheduler.abort(request_id)
            self.scheduler.abort(request_id)
            self.open[request_id].aborted = True

    def step(self, abort_in_flight: bool = False) -> None:
        self.now += 1.0
        plan = self.scheduler.plan()
        if plan.rows:
            self.num_steps += 1
            if self.model.fault is not None:
                self._struck(plan)
            try:
                result = self.runner.run(plan)
            except RuntimeError as error:
                self.take(self.scheduler.fail(plan, str(error)))
                return
            if abort_in_flight:
                self.abort()
            self.take(self.scheduler.commit(plan, result))
        else:
            ended = self.scheduler.take_ended()
            assert ended or not self.scheduler.has_work, "a step neither progressed nor ended anything"
            self.take(ended)

    def fault(self) -> None:
        self.model.fault = self.rng.choice(("nan", "nan", "raise")), self.rng.randrange(64)

    def _struck(self, plan) -> None:
        """Note whose end the coming fault will be."""
        kind, row = self.model.fault
        rows = plan.rows if kind == "raise" else (plan.rows[row % len(plan.rows)],)
        for row in rows:
            self.open[row.request.request_id].struck = True

    def take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert output.request_id in self.open, "output for a request that has ended"
            known = self.open[output.request_id]
            for token in output.token_ids:
                expected = self._expected(known)
                assert token == expected, f"{output.request_id}: {token} after {len(known.tokens)}, expected {expected}"
                known.tokens.append(token)
            if output.finish_reason is not None:
                self._check_end(known, output)

    def _expected(self, known: Open) -> int:
        """The model's token; where it would end the reply below min_tokens, the next best one that does not."""
        request = known.request
        token = next_token([*request.prompt_token_ids, *known.tokens], self.kinds)
        if len(known.tokens) < request.sampling.min_tokens:
            while token in self._end_tokens(request):
                token = (token + 1) % VOCAB
        return token

    @staticmethod
    def _end_tokens(request: Request) -> set[int]:
        return set(request.stop_token_ids) | (set() if request.ignore_eos else {END_TOKEN})

    def _check_end(self, known: Open, output: RequestOutput) -> None:
        request, reason = known.request, output.finish_reason
        assert reason is not None
        self.num_ended += 1
        self.ends[reason] = self.ends.get(reason, 0) + 1
        ends = self._end_tokens(request)
        stops = [i for i, token in enumerate(known.tokens) if token in ends and i >= request.sampling.min_tokens]
        assert not stops or (stops[0] == len(known.tokens) - 1), "tokens after an end"
        assert len(known.tokens) <= request.max_tokens
        assert output.num_cached_tokens % 64 == 0 and output.num_cached_tokens < len(request.prompt_token_ids)
        if reason is FinishReason.STOP:
            assert stops
        elif reason is FinishReason.LENGTH:
            assert len(known.tokens) == request.max_tokens and not stops
        elif reason is FinishReason.ABORT:
            assert known.aborted
        else:
            assert output.error is not None
            late = "deadline" in output.error and request.deadline is not None and request.deadline <= self.now
            assert late or known.struck, output.error
        assert reason is FinishReason.ERROR or known.aborted or not known.struck, "a struck request went on"
        self.past.append([*request.prompt_token_ids, *known.tokens])
        del self.open[request.request_id]

    def drain(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work and not self.open, "requests were not ended"

    def audit(self) -> None:
        self.cache.audit()

    def check_nothing_held(self) -> None:
        """After a drain only the index holds memory, and clearing it frees everything."""
        self.audit()
        assert all(usage.num_held == 0 for usage in self.cache.usage())
        self.cache.clear_index()
        self.audit()
        assert all(usage.num_free == usage.num_units for usage in self.cache.usage())
