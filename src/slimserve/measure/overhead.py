"""What a decode step costs besides the model: plan, inputs, sampling and commit, on a model that does nothing."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slimserve.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from slimserve.engine.loop import Engine
from slimserve.engine.request import Request, SamplingParams
from slimserve.layers.contract import Caches, StepInput
from slimserve.models.contract import BufferSpec, CacheKind, CacheSpec, ParameterSpec

_PROMPT_TOKENS = 300
_WARM_UP_STEPS = 20


@dataclass(frozen=True, slots=True)
class _NullConfig:
    """Two cache groups of one tiny layer each, full and sliding."""

    vocab_size: int
    architecture: str = "null"
    hidden_size: int = 1
    num_layers: int = 2
    max_context: int = 32_768

    def parameters(self) -> Sequence[ParameterSpec]:
        """None."""
        return ()

    def caches(self, kv_dtype: torch.dtype) -> Sequence[CacheSpec]:
        """One page buffer pair per group."""
        page = (BufferSpec("k", (1, 64, 1), kv_dtype), BufferSpec("v", (1, 64, 1), kv_dtype))
        return (
            CacheSpec("full", CacheKind.ATTENTION, (0,), page=page),
            CacheSpec("window", CacheKind.WINDOW, (1,), page=page, window=512),
        )


class _NullModel:
    """Zeros for hidden states, and the same random logits every time."""

    def __init__(self, vocab_size: int, most_rows: int) -> None:
        self.config = _NullConfig(vocab_size)
        self._logits = torch.randn(most_rows, vocab_size)

    def __call__(self, step: StepInput, caches: Caches) -> torch.Tensor:
        return torch.zeros(step.num_tokens, 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same logits for every step."""
        return self._logits[: len(hidden)]


@dataclass(frozen=True, slots=True)
class Overhead:
    """Microseconds of a step's parts; `run` holds inputs, finite check and greedy sampling."""

    plan: float
    run: float
    commit: float

    @property
    def total(self) -> float:
        """Microseconds of a step."""
        return self.plan + self.run + self.commit


def measure_overhead(num_rows: int, vocab_size: int, num_steps: int = 500) -> Overhead:
    """Decode num_steps steps of num_rows greedy requests on the CPU."""
    limits = SchedulerConfig(max_sequences=num_rows, max_context=4096)
    config = EngineConfig(cache=CacheConfig(budget_bytes=1 << 27), scheduler=limits)
    engine = Engine(_NullModel(vocab_size, num_rows), config)
    for number in range(num_rows):
        prompt = [number % vocab_size] * _PROMPT_TOKENS
        engine.submit(Request(f"r{number}", prompt, SamplingParams(temperature=0.0), 3500, ignore_eos=True))
    while any(job.num_pending > 1 for job in engine.scheduler.jobs()):
        engine.step()
    for _ in range(_WARM_UP_STEPS):
        engine.step()
    return time_parts(engine, num_steps)


def time_parts(
    engine: Engine, num_steps: int, average: Callable[[Sequence[float]], float] = statistics.median
) -> Overhead:
    """Run num_steps steps of an engine that only decodes, and time their parts."""
    parts: tuple[list[float], list[float], list[float]] = ([], [], [])
    for _ in range(num_steps):
        marks = [time.perf_counter()]
        plan = engine.scheduler.plan()
        marks.append(time.perf_counter())
        result = engine.runner.run(plan)
        marks.append(time.perf_counter())
        engine.scheduler.commit(plan, result)
        marks.append(time.perf_counter())
        for part, (start, end) in zip(parts, itertools.pairwise(marks), strict=True):
            part.append((end - start) * 1e6)
    return Overhead(*(average(part) for part in parts))


def overhead_report(rows: Sequence[int], vocab_size: int, *, num_steps: int = 500, repeats: int = 5) -> dict[str, Any]:
    """Microseconds of a step besides the model, for several numbers of rows, as plain data (see `overhead_lines`)."""
    table = []
    for count in rows:
        found = sorted(
            (measure_overhead(count, vocab_size, num_steps) for _ in range(repeats)), key=lambda one: one.total
        )
        middle = found[len(found) // 2]
        table.append({
            "rows": count, "microseconds": middle.total, "lowest": found[0].total, "highest": found[-1].total,
            "plan": middle.plan, "inputs_and_sampling": middle.run, "commit": middle.commit,
        })  # fmt: skip
    return {"kind": "overhead", "vocab_size": vocab_size, "repeats": repeats, "rows": table}


def overhead_lines(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    return [
        f"{row['rows']} rows, {report['vocab_size']} tokens: {row['microseconds']:.0f} us a step "
        f"({row['lowest']:.0f} .. {row['highest']:.0f} over {report['repeats']} repeats): plan {row['plan']:.0f}, "
        f"inputs and sampling {row['inputs_and_sampling']:.0f}, commit {row['commit']:.0f}"
        for row in report["rows"]
    ]
