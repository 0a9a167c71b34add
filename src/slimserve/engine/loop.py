"""The engine in one process: requests in, one step at a time, outputs out."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch

from slimserve.cache.budget import CacheDemand, CachePlan, full_budget, plan_cache
from slimserve.cache.manager import CacheManager
from slimserve.cache.prefix import CacheIdentity
from slimserve.cache.storage import CacheStorage
from slimserve.engine.config import Acceptance, DrafterKind, EngineConfig
from slimserve.engine.forward import ForwardPass, GraphRecorder, TappedModel
from slimserve.engine.inputs import InputBuffers
from slimserve.engine.messages import EngineInfo, EngineStats
from slimserve.engine.request import FinishReason, Request
from slimserve.engine.runner import Runner
from slimserve.engine.scheduler import Scheduler
from slimserve.engine.speculate import Drafter, Observer, SpeculationControl
from slimserve.engine.speculate.build import DraftSetting, check_speculation, drafter_specs, make_drafter
from slimserve.engine.speculate.model_drafter import ModelDrafter
from slimserve.engine.step import RequestOutput, StepPlan, StepResult
from slimserve.errors import RequestError, RunError
from slimserve.models.contract import CacheSpec, Model
from slimserve.models.dflash2 import DFlash2Model
from slimserve.ops.cpu.library import serve_with

logger = logging.getLogger("slimserve.engine")

_MOST_FAILED_STEPS = 8
"""Steps in a row that may fail before the engine counts as broken."""

_FIRST_LENGTH = 3
"""Drafts with which a drafter that runs a model starts, before anything is measured."""

_SHARE_OF_FREE_MEMORY = 0.5
"""Part of the free memory that caches may take where no budget is given; they take less when less serves."""


class Engine:
    """A model, its caches and its requests. One thread calls it; `slimserve.engine.process` puts it elsewhere."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        *,
        end_token_ids: frozenset[int] = frozenset(),
        identity: CacheIdentity | None = None,
        drafter: Drafter | None = None,
        companion: Model | DFlash2Model | None = None,
    ) -> None:
        """Allocate caches and buffers; raises RefusalError where the budget cannot hold one longest request.

        `identity` names model and weights in the prefix index; `end_token_ids` end every reply without ignore_eos.
        `drafter` takes the place of the one that config.speculation names; `companion` is the model of a drafter that
        has one.
        """
        self.model = model
        self.config = config
        self.healthy = True
        self._failure = ""
        self._failed_steps = 0
        self._num_steps = 0
        device = torch.device(config.device)
        if device.type == "cpu":
            serve_with(config.num_threads)
        elif config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        check_speculation(model, config, companion)
        specs = tuple(model.config.caches(config.cache.dtype.torch))
        own_specs = drafter_specs(model, config, companion) if drafter is None else ()
        self.cache_plan = plan_engine_cache(model, config, own_specs)
        limits, demand = config.scheduler, self.cache_plan.demand
        storage = CacheStorage((*specs, *own_specs), self.cache_plan, device)
        self.cache = CacheManager(
            (*specs, *own_specs),
            self.cache_plan,
            identity=identity,
            storage=storage,
            prefix_caching=config.cache.prefix_caching,
        )
        speculation = config.speculation
        if drafter is None:
            drafter = make_drafter(
                DraftSetting(
                    model,
                    config,
                    self.cache,
                    storage.layers,
                    len(specs),
                    end_token_ids,
                    companion,
                    free_memory(device),
                )
            )
        self.drafter = drafter
        if isinstance(drafter, Observer) and drafter.taps:
            cast(TappedModel, model).taps = drafter.taps
        self.control = SpeculationControl(
            speculation.max_draft,
            speculation.schedule,
            measured=speculation.measured,
            first_length=None if speculation.drafter is DrafterKind.LOOKUP else _FIRST_LENGTH,
        )
        self.scheduler = Scheduler(
            limits, self.cache, end_token_ids=end_token_ids, drafter=drafter, control=self.control
        )
        most_tokens = limits.token_budget + limits.max_sequences * (1 + speculation.max_draft)
        buffers = InputBuffers(specs, limits.max_sequences, most_tokens, demand.max_context, device)
        forward = ForwardPass(
            model,
            self.cache,
            storage.layers,
            buffers,
            model.config.vocab_size,
            taps=isinstance(drafter, Observer) and bool(drafter.taps),
            widest_row=1 if drafter is None else 1 + speculation.max_draft,
            recorder=GraphRecorder(device) if device.type == "cuda" and config.graphs else None,
        )
        self.runner = Runner(
            forward,
            end_token_ids=end_token_ids,
            drafter=drafter,
            rejection=speculation.acceptance is Acceptance.REJECTION,
        )

    def submit(self, request: Request) -> None:
        """Queue a request; raises RequestError (400 can never run, 429 queue full, 503 engine broken)."""
        if not self.healthy:
            raise RequestError(f"the engine is down: {self._failure}", code="engine_down", status=503)
        vocab_size = self.model.config.vocab_size
        if (
            request.prompt_token_ids
            and not 0 <= min(request.prompt_token_ids) <= max(request.prompt_token_ids) < vocab_size
        ):
            raise RequestError(f"the prompt has token ids outside 0 .. {vocab_size - 1}", param="prompt")
        self.scheduler.submit(request)

    def abort(self, request_id: str) -> None:
        """End a request and free all that it holds; its end comes with the next step. Unknown ids are ignored."""
        self.scheduler.abort(request_id)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything (a broken engine steps once more, to say so)."""
        return self.scheduler.has_work or not self.healthy

    def step(self) -> list[RequestOutput]:
        """Run one step and return what each request gained.

        A step that fails ends its requests with an error and leaves the engine running. After a fault that memory
        or books may not have survived, all requests end, `healthy` turns false and the next call raises RunError.
        """
        if not self.healthy and not self.scheduler.has_work:
            raise RunError(self._failure)
        plan = None
        started = time.perf_counter()
        try:
            plan = self.scheduler.plan()
            if not plan.rows:
                return self.scheduler.take_ended()
            self._num_steps += 1
            result = self.runner.run(plan)
            self._observe(plan, result, time.perf_counter() - started)
        except Exception as error:
            logger.exception("a step failed")
            self._failed_steps += 1
            message = f"a step failed: {type(error).__name__}: {error}"
            if plan is None or _is_fatal(error) or self._failed_steps >= _MOST_FAILED_STEPS:
                return self._break(message)
            return self.scheduler.fail(plan, message)
        try:
            outputs = self.scheduler.commit(plan, result)
        except Exception as error:
            logger.exception("a step's results could not be taken in")
            return self._break(f"a step's results could not be taken in: {type(error).__name__}: {error}")
        self._failed_steps = 0
        return outputs

    def _observe(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Tell the control of drafting what a step that only decoded cost and brought."""
        preparation = self.drafter.preparation_seconds if isinstance(self.drafter, ModelDrafter) else 0.0
        if all(row.q_len == 1 + len(row.draft) for row in plan.rows):
            pairs = list(zip(plan.rows, result.rows, strict=True))
            held = [(len(row.draft), outcome.num_accepted_drafts) for row, outcome in pairs if row.draft]
            num_tokens = sum(len(outcome.token_ids) for _, outcome in pairs)
            seconds -= preparation if held else self.scheduler.drafting_seconds
            self.control.observe(len(plan.rows), bool(held), num_tokens, seconds, held, preparation)

    def _break(self, message: str) -> list[RequestOutput]:
        """End everything without touching the caches' books, which may be wrong."""
        self.healthy = False
        self._failure = message
        return self.scheduler.abandon(message)

    def read_stats(self) -> EngineStats:
        """Counters and gauges at this moment."""
        counters, usage = self.scheduler.counters, self.cache.usage()
        return EngineStats(
            num_waiting=self.scheduler.num_waiting,
            num_running=self.scheduler.num_running,
            cache_used=sum(group.num_held * group.unit_bytes for group in usage),
            cache_total=sum(group.num_units * group.unit_bytes for group in usage),
            prefix_query_tokens=counters.prefix_query_tokens,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            cut_by=dict(counters.cut_by),
            num_preemptions=counters.num_preemptions,
            num_steps=self._num_steps,
            num_drafted=counters.drafted_tokens,
            num_accepted=counters.accepted_tokens,
            drafter=self.config.speculation.drafter.value,
            drafted_at=list(counters.drafted_at),
            accepted_at=list(counters.accepted_at),
            decode_rows=counters.decode_rows,
            decode_tokens=counters.decode_tokens,
            draft_lengths=self.control.lengths(),
            draft_gains=self.control.gains(),
            draft_switches=self.control.num_switches,
            draft_length_changes=self.control.num_length_changes,
        )

    def info(self, facts: dict[str, str] | None = None, memory: dict[str, int] | None = None) -> EngineInfo:
        """What a server's door must know."""
        return EngineInfo(
            vocab_size=self.model.config.vocab_size,
            max_request_tokens=self.cache.max_request_tokens,
            max_sequences=self.config.scheduler.max_sequences,
            max_queue=self.config.scheduler.max_queue,
            min_reusable_prefix=self.cache.min_reusable_prefix,
            facts=facts or {},
            memory=memory or {},
        )

    def audit(self) -> None:
        """Raise AssertionError unless all cache memory is owned as the books say."""
        self.cache.audit()
        if isinstance(self.drafter, ModelDrafter):
            self.drafter.audit()

    def close(self) -> list[RequestOutput]:
        """End all requests; returns their ends. Idempotent."""
        self.scheduler.abort_all(FinishReason.ABORT)
        return self.scheduler.take_ended()


def plan_engine_cache(model: Model, config: EngineConfig, drafter_specs: Sequence[CacheSpec] = ()) -> CachePlan:
    """The cache plan of an engine: its budget, or what serves max_sequences within half of the free memory."""
    specs = (*model.config.caches(config.cache.dtype.torch), *drafter_specs)
    limits = config.scheduler
    max_context = min(limits.max_context, model.config.max_context)
    demand = CacheDemand(
        max_sequences=limits.max_sequences,
        max_context=max_context,
        chunk_tokens=min(limits.token_budget, max_context),
        snapshot_spacing=config.cache.snapshot_spacing,
    )
    budget = config.cache.budget_bytes
    if budget is None:
        free = free_memory(torch.device(config.device))
        budget = min(full_budget(specs, demand), int(free * _SHARE_OF_FREE_MEMORY))
    return plan_cache(specs, demand, budget)


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on a device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RunError("/proc/meminfo has no MemAvailable line; give the cache a budget in bytes")


def _is_fatal(error: Exception) -> bool:
    """Whether nothing on the device can be trusted after this error (running out of its memory is not one)."""
    return isinstance(error, torch.AcceleratorError)
