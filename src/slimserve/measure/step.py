"""Where the time of a decode step goes: the floor of each family of operations, and what each took."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from slimserve.engine.build import EngineSettings, build, decode_config
from slimserve.engine.loop import Engine
from slimserve.hardware import Bandwidth, copy_bandwidth
from slimserve.measure.families import KernelClock, family_of_kernel, floor_of_families, merged, order
from slimserve.measure.figures import figure
from slimserve.measure.gpu_rates import decode_run, end_all, start_streams
from slimserve.measure.gpu_trace import Trace, trace_steps
from slimserve.measure.overhead import Overhead, time_parts
from slimserve.plan.description import Description
from slimserve.plan.floor import StepFloor, step_floor

Say = Callable[[str], None]
_TRACED_STEPS = 8


@dataclass(frozen=True, slots=True)
class StepShape:
    """What is timed: streams at once, tokens behind each, timed steps. trace: also where their time goes."""

    streams: tuple[int, ...] = (1, 8)
    context: int = 1000
    steps: int = 24
    seconds: float = 20.0
    trace: bool = False

    @property
    def max_context(self) -> int:
        """Tokens that a stream may reach, with the warm-up and the traced steps."""
        return -(-(self.context + 2 * self.steps + 64 + 8 * max(self.streams)) // 64) * 64


def measure_step(
    name: str, settings: EngineSettings, description: Description, shape: StepShape, say: Say = lambda text: None
) -> dict[str, Any]:
    """The report as plain data (see `step_lines`): per number of streams the step, its floor, and where time went.

    The engine is built in this process as a server's engine process builds it.
    """
    config = decode_config(settings.config)
    on_cpu = torch.device(config.device).type == "cpu"
    clock = KernelClock(description.vocab_size) if shape.trace and on_cpu else None
    with clock.running() if clock is not None else nullcontext():
        loaded = build(msgspec.to_builtins(settings), lambda *_: None)
        engine = loaded.engine
        assert isinstance(engine, Engine)
        bandwidth = copy_bandwidth(torch.device(config.device).type)
        say(f"copy {bandwidth.median / 1e9:.1f} GB/s ({bandwidth.lowest / 1e9:.1f}-{bandwidth.highest / 1e9:.1f})")
        rows = [_row(engine, description, count, shape, bandwidth.median, clock, say) for count in shape.streams]
        engine.close()
    return {
        "kind": "step",
        "profile": name,
        "device": config.device,
        "weights": "synthetic weights" if settings.synthetic is not None else settings.path,
        "facts": loaded.info.facts,
        "kv_dtype": config.cache.dtype.value,
        "context": shape.context,
        "copy_bytes_per_second": _rates(bandwidth),
        "rows": rows,
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _rates(bandwidth: Bandwidth) -> dict[str, float]:
    return {"median": bandwidth.median, "lowest": bandwidth.lowest, "highest": bandwidth.highest}


def _row(
    engine: Engine,
    description: Description,
    count: int,
    shape: StepShape,
    bandwidth: float,
    clock: KernelClock | None,
    say: Say,
) -> dict[str, Any]:
    dtype = engine.config.cache.dtype.torch
    run = decode_run(engine, count, shape.context, steps=shape.steps, seconds=shape.seconds)
    context = shape.context + len(run.tokens[0]) - len(run.step_seconds) // 2
    floor = step_floor(description, count, context=context, bandwidth=bandwidth, kv_dtype=dtype)
    step = figure([1e3 * seconds for seconds in run.step_seconds])
    assert step is not None
    row = {
        "streams": count,
        "tokens_per_second": run.tokens_per_second,
        "step_ms": step.as_json(),
        "floor_ms": floor.milliseconds,
        "floor_bytes": floor.num_bytes,
        "share_of_floor": floor.milliseconds / step.median,
        "hashes": run.as_json()["hashes"],
    }
    say(f"{count} streams: {step.median:.2f} ms a step, floor {floor.milliseconds:.2f} ms")
    if shape.trace:
        row["trace"] = _traced(engine, description, count, shape, floor, clock)
    return row


def _traced(
    engine: Engine, description: Description, count: int, shape: StepShape, floor: StepFloor, clock: KernelClock | None
) -> dict[str, Any]:
    start_streams(engine, count, shape.context)
    steps = min(shape.steps, _TRACED_STEPS)
    trace: Trace | None = None
    parts: Overhead
    if clock is not None:
        clock.reset()
        parts = time_parts(engine, steps, statistics.fmean)
        taken = {name: 1e6 * seconds / steps for name, seconds in clock.seconds.items()}
        calls = {name: number / steps for name, number in clock.calls.items()}
        wall = parts.total
    else:
        parts = time_parts(engine, steps, statistics.fmean)
        trace = trace_steps(engine.step, steps)
        taken, calls, wall = {}, {}, trace.wall
        for kernel in trace.kernels:
            name = family_of_kernel(kernel.name)
            taken[name] = taken.get(name, 0.0) + kernel.microseconds
            calls[name] = calls.get(name, 0.0) + kernel.launches
    end_all(engine)
    needed = floor_of_families(floor, description, engine.config.cache.dtype.torch)
    if trace is not None:
        needed = merged(needed)
    families = []
    for name in order([*dict.fromkeys([*taken, *needed])]):
        floor_us = 1e6 * needed.get(name, 0.0) / floor.bandwidth
        families.append({
            "name": name, "calls": calls.get(name, 0.0), "microseconds": taken.get(name, 0.0),
            "floor_bytes": needed.get(name, 0.0), "floor_microseconds": floor_us,
        })  # fmt: skip
    busy = sum(taken.values())
    return {
        "steps": steps,
        "wall_us": wall,
        "kernels_us": busy,
        "outside_us": max(wall - busy, 0.0),
        "parts_us": {"plan": parts.plan, "run": parts.run, "commit": parts.commit},
        "families": families,
        "kernels": None if trace is None else trace.as_json()["kernels"],
    }


def step_lines(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    rate = report["copy_bytes_per_second"]
    lines = [
        f"{report['profile']} on {report['device']}, {report['weights']}, {report['context']} tokens behind each "
        f"stream, {report['kv_dtype']} caches; copy {rate['median'] / 1e9:.1f} GB/s",
        f"{'streams':>7} {'ms a step (range)':>26} {'tok/s':>9} {'floor ms':>9} {'share':>6}",
    ]
    for row in report["rows"]:
        step = row["step_ms"]
        shown = f"{step['median']:.2f} ({step['lowest']:.2f}-{step['highest']:.2f})"
        lines.append(
            f"{row['streams']:>7} {shown:>26} {row['tokens_per_second']:>9.1f} {row['floor_ms']:>9.3f} "
            f"{row['share_of_floor']:>6.0%}"
        )
    if any(row["share_of_floor"] > 1 for row in report["rows"]):
        lines.append("note: faster than the floor means that processor caches hold the model, or that other programs")
        lines.append("      slowed the copy that the floor was taken from")
    for row in report["rows"]:
        if "trace" in row:
            lines += _trace_lines(row["streams"], row["trace"])
    return lines


def _trace_lines(streams: int, trace: dict[str, Any]) -> list[str]:
    parts = trace["parts_us"]
    lines = [
        f"{streams} streams: {trace['wall_us'] / 1e3:.2f} ms, {trace['kernels_us'] / 1e3:.2f} of them in kernels; "
        f"plan {parts['plan']:.0f} us, commit {parts['commit']:.0f} us",
        f"  {'family':18} {'calls':>7} {'us measured':>12} {'us floor':>10} {'floor / measured':>17}",
    ]
    for family in trace["families"]:
        taken, floor = family["microseconds"], family["floor_microseconds"]
        share = f"{floor / taken:.0%}" if taken and floor else "-"
        lines.append(f"  {family['name']:18} {family['calls']:>7.1f} {taken:>12.1f} {floor:>10.1f} {share:>17}")
    lines.append(f"  {'outside kernels':18} {'':>7} {trace['outside_us']:>12.1f}")
    return lines
