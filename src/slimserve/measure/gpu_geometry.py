"""Large geometries on one GPU with synthetic weights: memory against plan, decode and prefill rates against the floor.

    python -m slimserve.measure.gpu_geometry --out FOLDER [--profiles a,b] [--budget SECONDS] [--streams 1,8,16,32,64]

Each profile runs in a process of its own, and so does each further shape whose memory is measured: what a process has
loaded and recorded stays in its `runtime`. Results come line by line and lie in FOLDER/geometry-PROFILE.json after
every stage, so that a run that is cut short still says something. First, small editions of the models (a few layers
at real width) run in parallel processes, so that kernels are compiled once, on all cores.

Per profile: load; planned and measured memory of the recorded shape; steady decode at every number of streams (1,000
random prompt ids; prompts come from the prefix cache after the first, widest run; the rate counts steps in which all
streams decode) with the floor of the same step; time to the first token at 1,000 and prefill at 8,192; replies equal
for every number of streams, cold and cached, with and without graphs; where the time of a step goes; what a step costs
that verifies drafts (forced ones, so that acceptance is known). Per shape: memory, requests of the longest length.
The first profile's shapes come first: they are short, and nothing else may use up their time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slimserve.cache.prefix import CacheIdentity
from slimserve.engine.config import CacheDtype, DrafterKind, EngineConfig
from slimserve.engine.loop import Engine
from slimserve.engine.memory import MemoryProbe
from slimserve.errors import UsageError
from slimserve.hardware import copy_bandwidth, detect
from slimserve.measure.gpu_rates import (
    DecodeRun,
    ForcedDrafts,
    decode_run,
    end_all,
    first_token_seconds,
    longest_requests,
    prompt_of,
    same_beginnings,
    start_streams,
    verify_run,
)
from slimserve.measure.gpu_shapes import Shape, find_shape, jobs_of, seconds_of
from slimserve.models.contract import Role
from slimserve.plan.compare import compare, comparison_lines
from slimserve.plan.description import Description
from slimserve.plan.floor import step_floor
from slimserve.plan.memory import DeviceMemory, MemoryPlan
from slimserve.profiles.planning import admit, memory_for, plan_profile
from slimserve.profiles.resolve import resolve
from slimserve.profiles.synthetic import synthetic_model
from slimserve.weights.loader import LoadedModel, load_source
from slimserve.weights.synthetic import SyntheticModel, lay_out

PROFILES = ("qwen35-4b", "qwen38-nvfp4-1", "glm53f-q2-1")
STREAMS = (1, 8, 16, 32, 64)
PROMPT_TOKENS = 1_000
PREFILL_TOKENS = 8_192


DRAFTED = {"qwen35-4b": 3, "qwen38-nvfp4-1": 3, "glm53f-q2-1": 1}
"""Tokens drafted by force, to see what a step costs that verifies them."""
MOST_VERIFYING = 1.15
"""Most that such a step may cost over a plain one, beside the experts that more rows touch."""
VERIFIED_TOKENS = 96


@dataclass(slots=True)
class Sink:
    """Where results go: printed at once, and kept in a JSON file that is whole after every stage."""

    path: Path | None
    name: str
    deadline: float
    report: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def opened(cls, path: Path, name: str, seconds: float) -> Sink:
        """Adds to what other processes left in the file, where there is one."""
        kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return cls(path, name, time.monotonic() + seconds, kept)

    def say(self, text: str) -> None:
        """One line."""
        print(f"[{self.name} {time.monotonic() - self.started:6.1f} s] {text}", flush=True)

    def keep(self, key: str, value: Any) -> None:
        """Part of the report."""
        self.report[key] = value
        if self.path is not None:
            self.path.write_text(json.dumps(self.report, indent=1), encoding="utf-8")

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def stage(self, key: str, needs: float, run: Callable[[], Any]) -> Any:
        """Run a stage if `needs` seconds are left; a failure is kept and the next stage goes on."""
        if self.left < needs:
            self.say(f"{key}: left out, {self.left:.0f} s are left and it needs about {needs:.0f}")
            self.keep(key, {"left_out": True})
            return None
        try:
            return run()
        except Exception as error:
            self.say(f"{key}: FAILED: {type(error).__name__}: {str(error)[:600]}")
            self.keep(key, {"failed": f"{type(error).__name__}: {error}", "where": traceback.format_exc()[-3000:]})
            if isinstance(error, torch.AcceleratorError):
                raise
            return None


@dataclass(slots=True)
class Bench:
    """One model on one device, its description, and the rates of the machine."""

    name: str
    description: Description
    sink: Sink
    device: torch.device
    prompt_tokens: int = PROMPT_TOKENS
    bandwidth: float = 0.0
    matrix_rate: float = 0.0
    loaded: LoadedModel | None = None
    probe: MemoryProbe | None = None
    runs: list[DecodeRun] = field(default_factory=list)

    def machine(self) -> None:
        """Copy bandwidth and the bf16 matrix rate, which the floors are made of."""
        copied = copy_bandwidth(self.device.type, num_bytes=(1 << 29) if self.device.type == "cuda" else None)
        self.bandwidth = copied.median
        size = 8192 if self.device.type == "cuda" else 256
        a = torch.randn(size, size, device=self.device).bfloat16()
        times = []
        for _ in range(6):
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            before = time.perf_counter()
            a @ a
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - before)
        self.matrix_rate = 2 * size**3 / sorted(times)[len(times) // 2]
        del a
        forget()
        names = {"copy_bytes_per_second": copied.median, "copy_lowest": copied.lowest, "copy_highest": copied.highest}
        self.sink.keep(
            "machine",
            {
                **names,
                "bf16_matrix_flops": self.matrix_rate,
                "devices": [accelerator.name for accelerator in detect().accelerators],
            },
        )
        self.sink.say(
            f"copy {copied.median / 1e12:.2f} TB/s ({copied.lowest / 1e12:.2f}-{copied.highest / 1e12:.2f}), "
            f"bf16 matrix product {self.matrix_rate / 1e12:.0f} TFLOP/s"
        )

    def load(self, model: SyntheticModel, config: EngineConfig, *, keep: bool = True) -> LoadedModel:
        """Make the weights; `keep`: the report tells of them."""
        started = time.monotonic()
        self.probe = MemoryProbe(self.device)
        source = lay_out(model).source(self.device)
        self.loaded = load_source(source, device=self.device, numerics=config.numerics)
        self.probe.mark()
        seconds = time.monotonic() - started
        stored = sum(family.num_bytes for family in self.loaded.memory)
        kernels = sorted(set(self.loaded.kernels.values()))
        report = {
            "seconds": seconds, "stored_bytes": stored, "held_bytes": self.loaded.resident_bytes,
            "kernels": kernels, "weights": "synthetic weights",
            "families": [[f.role.value, f.format, f.num_tensors, f.num_bytes] for f in self.loaded.memory],
        }  # fmt: skip
        if keep:
            self.sink.keep("load", report)
        held = self.loaded.resident_bytes / 2**30
        self.sink.say(f"synthetic weights: {stored / 2**30:.2f} GiB stored, {held:.2f} GiB held, {seconds:.1f} s")
        return self.loaded

    def engine(self, config: EngineConfig, plan: MemoryPlan | None, key: str) -> Engine:
        """Build an engine on the weights, lay its memory beside the plan."""
        assert self.loaded is not None and self.probe is not None
        self.probe.again()
        started = time.monotonic()
        identity = CacheIdentity(self.name, self.loaded.fingerprint, key)
        engine = Engine(self.loaded.model, config, identity=identity)
        self.probe.mark()
        measured = self.probe.measure(self.loaded, engine)
        self.sink.say(f"{key}: engine built and warm in {time.monotonic() - started:.1f} s")
        if plan is None:
            return engine
        rows = compare(plan, measured)
        for line in comparison_lines(rows):
            self.sink.say(f"  {line}")
        self.sink.keep(key, {
            "context": plan.max_context, "sequences": plan.max_sequences, "kv_dtype": config.cache.dtype.value,
            "terms": [[row.name, row.planned, row.measured, row.within] for row in rows],
        })  # fmt: skip
        return engine

    def decode(self, engine: Engine, streams: Sequence[int], steps: int, seconds: float) -> None:
        """Steady decode, most streams first: later runs find their prompts in the prefix cache."""
        table = []
        dtype = engine.config.cache.dtype.torch
        for count in sorted(streams, reverse=True):
            if self.sink.left < 10:
                self.sink.say(f"{count} streams: left out, {self.sink.left:.0f} s are left")
                continue
            run = decode_run(engine, count, self.prompt_tokens, steps=steps, seconds=seconds)
            self.runs.append(run)
            context = self.prompt_tokens + len(run.tokens[0]) - len(run.step_seconds) // 2
            floor = step_floor(self.description, count, context=context, bandwidth=self.bandwidth, kv_dtype=dtype)
            share = floor.milliseconds / (1e3 * run.step_median)
            table.append({
                **run.as_json(), "floor_ms": floor.milliseconds, "floor_bytes": floor.num_bytes, "share": share,
                "floor_terms": {term.name: term.num_bytes for term in floor.terms},
            })  # fmt: skip
            self.sink.keep("decode", table)
            computed = run.prompt_tokens - run.cached_tokens
            self.sink.say(
                f"{count:3} streams: {run.tokens_per_second:8.1f} tok/s, {1e3 * run.step_median:7.2f} ms a step "
                f"({len(run.step_seconds)} steps), floor {floor.milliseconds:6.2f} ms = {share:4.0%}; prompts: "
                f"{computed} tokens at {computed / run.prefill_seconds:.0f} tok/s, {run.cached_tokens} cached"
            )

    def check_replies(self, engine: Engine, steps: int, seconds: float) -> None:
        """The same streams again: cold, and without graphs; every reply must begin alike."""
        engine.cache.clear_index()
        count = min(8, engine.config.scheduler.max_sequences)
        again = decode_run(engine, count, self.prompt_tokens, steps=steps, seconds=seconds)
        forward = engine.runner.forward
        recorder, forward.recorder = forward.recorder, None
        plain = decode_run(engine, count, self.prompt_tokens, steps=min(steps, 24), seconds=seconds)
        forward.recorder = recorder
        differing = same_beginnings([*self.runs, again, plain])
        distinct = min(len(set(tokens)) / max(1, len(tokens)) for run in self.runs for tokens in run.tokens)
        self.sink.keep("replies", {
            "differing": differing, "least_share_of_distinct_tokens": distinct,
            "cold_hashes": again.as_json()["hashes"], "plain_step_ms": 1e3 * plain.step_median,
            "graph_step_ms": 1e3 * again.step_median, "graphs": getattr(recorder, "num_graphs", 0),
        })  # fmt: skip
        verdict = "equal" if not differing else f"DIFFER: {'; '.join(differing[:4])}"
        self.sink.say(f"replies of {[r.streams for r in self.runs]} streams, {count} cold, {count} plain: {verdict}")
        with_graphs, without = 1e3 * again.step_median, 1e3 * plain.step_median
        self.sink.say(f"{count} streams: {with_graphs:.2f} ms a step with graphs, {without:.2f} without")

    def prefill(self, engine: Engine) -> None:
        """Time to the first token of one prompt, cold and alone."""
        vocab_size = engine.model.config.vocab_size
        found: dict[str, Any] = {}
        for length, repeats in ((self.prompt_tokens, 3), (PREFILL_TOKENS, 2)):
            if length + 1 > engine.cache.max_request_tokens:
                continue
            times = sorted(
                first_token_seconds(engine, prompt_of(500 + length + n, length, vocab_size)) for n in range(repeats)
            )
            floor = self.prefill_flops(length) / self.matrix_rate
            found[str(length)] = {
                "seconds": times, "tokens_per_second": length / times[len(times) // 2], "floor_seconds": floor,
            }  # fmt: skip
            middle = times[len(times) // 2]
            self.sink.say(
                f"prefill of {length}: {1e3 * middle:.0f} ms ({1e3 * times[0]:.0f}-{1e3 * times[-1]:.0f}), "
                f"{length / middle:.0f} tok/s; arithmetic floor {1e3 * floor:.0f} ms"
            )
            self.sink.keep("prefill", found)

    def prefill_flops(self, tokens: int) -> float:
        """Operations of the matrix products of a prompt; attention and recurrence not counted."""
        config = self.description.config
        total = 0.0
        for spec in config.parameters():
            if spec.role not in (Role.LINEAR, Role.EXPERT) or (spec.layer or 0) >= config.num_layers:
                continue
            elements = 1.0
            for extent in spec.shape:
                elements *= extent
            if spec.role is Role.EXPERT:
                elements *= self.description.experts_per_token / spec.shape[0]
            total += elements
        return 2.0 * total * tokens

    def verify(self, config: EngineConfig, drafted: int) -> None:
        """What a step of one stream costs that verifies `drafted` tokens, beside a plain one; replies must be equal."""
        assert self.loaded is not None
        drafter = ForcedDrafts(drafted, self.loaded.model.config.vocab_size)
        speculation = replace(config.speculation, drafter=DrafterKind.NONE, max_draft=drafted, measured=False)
        engine = Engine(self.loaded.model, replace(config, speculation=speculation), drafter=drafter)
        run = verify_run(engine, drafter, self.prompt_tokens, VERIFIED_TOKENS)
        engine.close()
        dtype = config.cache.dtype.torch
        plain, wider = (
            step_floor(self.description, rows, context=self.prompt_tokens, bandwidth=self.bandwidth, kv_dtype=dtype)
            for rows in (1, 1 + drafted)
        )
        experts = wider.milliseconds / plain.milliseconds
        self.sink.keep("verify", {
            "rows": 1 + drafted, "ratio": run.ratio, "plain_ms": [1e3 * t for t in sorted(run.plain)],
            "verifying_ms": [1e3 * t for t in sorted(run.verifying)], "equal": run.equal, "drafted": run.drafted,
            "accepted": run.accepted, "bytes_ratio": experts, "most": MOST_VERIFYING * experts,
        })  # fmt: skip
        self.sink.say(
            f"verify of {1 + drafted} rows, 1 stream: {1e3 * statistics.median(run.verifying):.2f} ms "
            f"({len(run.verifying)} steps) over {1e3 * statistics.median(run.plain):.2f} ms ({len(run.plain)} steps) = "
            f"{run.ratio:.3f}, bytes say {experts:.3f}; {run.accepted} of {run.drafted} accepted; replies "
            f"{'equal' if run.equal else 'DIFFER'}"
        )

    def traces(self, engine: Engine, streams: Sequence[int]) -> None:
        """Where the time of decode steps and of a prompt's steps goes."""
        from slimserve.measure.gpu_trace import Trace, trace_steps

        found: dict[str, Any] = {}

        def show(key: str, trace: Trace) -> None:
            found[key] = trace.as_json()
            self.sink.keep("traces", found)
            for line in trace.lines(key):
                self.sink.say(line)

        for count in streams:
            start_streams(engine, count, self.prompt_tokens)
            show(f"decode of {count}", trace_steps(engine.step, 3))
            end_all(engine)
        engine.cache.clear_index()
        length = min(4096, engine.cache.max_request_tokens - 2)
        start_streams(engine, 1, length, first=900, decoding=False)
        show("prompt of 4,096, first two steps", trace_steps(engine.step, 2))
        end_all(engine)


def measure_profile(name: str, sink: Sink, streams: Sequence[int], steps: int, seconds: float, trace: bool) -> None:
    """All stages of one profile on the CUDA device."""
    resolved = resolve(name, device="cuda")
    memory = memory_for(resolved)
    config, plan = admit(resolved, made=True)
    record = resolved.record
    assert record is not None and memory is not None
    bench = Bench(name, resolved.description, sink, torch.device("cuda", 0))
    bench.load(synthetic_model(record), config)
    engine = sink.stage("recorded shape", 0, partial(bench.engine, config, plan, "recorded shape"))
    if engine is None:
        forget()
        sink.say("trying once more without graphs")
        engine = bench.engine(replace(config, graphs=False), plan, "recorded shape, no graphs")
    _stages(bench, engine, streams, steps, seconds, trace)
    del engine
    if name in DRAFTED:
        forget()
        sink.stage("verify", 15, partial(measure_verify, bench, name, memory))
    sink.say("done")


def _stages(bench: Bench, engine: Engine, streams: Sequence[int], steps: int, seconds: float, trace: bool) -> None:
    """What is measured on the recorded shape."""
    sink = bench.sink
    bench.machine()
    counts = [count for count in streams if count <= engine.config.scheduler.max_sequences]
    sink.stage("decode", 15, lambda: bench.decode(engine, counts, steps, seconds))
    sink.stage("prefill", 15, lambda: bench.prefill(engine))
    sink.stage("replies", 20, lambda: bench.check_replies(engine, min(steps, 48), seconds))
    if trace:
        sink.stage("traces", 20, lambda: bench.traces(engine, sorted({1, max(counts)})))
    engine.close()


def measure_shape(name: str, shape: Shape, sink: Sink) -> None:
    """Memory of another configuration, in a process that loads nothing else, and its longest requests."""
    resolved = resolve(name, device="cuda", flags=shape.flags)
    config, plan = admit(resolved, made=True)
    record = resolved.record
    assert record is not None
    bench = Bench(name, resolved.description, sink, torch.device("cuda", 0))
    bench.load(synthetic_model(record), config, keep=False)
    engine = bench.engine(config, plan, shape.label)
    done = longest_requests(engine, shape.requests, plan.max_context)
    sink.keep(f"{shape.label}: longest", done)
    sink.say(f"{shape.label}: {done}")
    engine.close()


def measure_verify(bench: Bench, name: str, memory: DeviceMemory) -> None:
    """A small configuration of the profile that drafts by force."""
    resolved = resolve(name, device="cuda", flags={"max_context": 4096, "max_sequences": 1})
    plan = plan_profile(resolved, memory, made=True)
    if plan.cache is None:
        raise plan.refusal(name)
    bench.verify(resolved.engine_config(plan.cache.budget_bytes), DRAFTED[name])


def forget() -> None:
    """Give the memory of an engine that nobody holds any more back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def compile_kernels(name: str, rows: int) -> None:
    """Run a few layers of a profile at real width with `rows` streams and some prompts: kernels land in the cache."""
    resolved = resolve(name, device="cuda")
    record = resolved.record
    assert record is not None
    model = synthetic_model(record)
    layers = 5 if name.startswith("glm") else 4
    small = SyntheticModel(name, {**model.config, "num_hidden_layers": layers}, model.rules, (), model.seed)
    config = resolved.planned_config()
    limits = replace(config.scheduler, max_sequences=max(rows, 2), max_context=12288)
    for dtype in (CacheDtype.BF16, CacheDtype.FP8) if rows <= 8 else (CacheDtype.BF16,):
        cache = replace(config.cache, budget_bytes=3 << 30, dtype=dtype)
        chosen = replace(config, scheduler=limits, cache=cache, graphs=False)
        loaded = load_source(lay_out(small).source("cuda"), device="cuda", numerics=config.numerics)
        engine = Engine(loaded.model, chosen)
        decode_run(engine, min(rows, 64), 65 + 900 // rows, steps=4, seconds=30.0)
        if rows == 1:
            first_token_seconds(engine, prompt_of(1, PREFILL_TOKENS, engine.model.config.vocab_size))
            decode_run(engine, 2, PROMPT_TOKENS, steps=2, seconds=5.0)
        del engine, loaded
        forget()


def compile_all(profiles: Sequence[str], streams: Sequence[int]) -> None:
    """Small editions of every profile at every tile of rows, side by side."""
    started = time.monotonic()
    rows = sorted({1, *(count for count in (8, 16, 32, 64) if count <= max(streams))})
    jobs = []
    for name in profiles:
        for count in rows if not name.startswith("glm") else rows[:-1]:
            command = [sys.executable, "-m", __spec__.name, "--compile", name, "--rows", str(count)]
            log = Path(f"/tmp/compile-{name}-{count}.log")
            jobs.append((name, count, log, subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT)))
    for name, count, log, process in jobs:
        if process.wait() != 0:
            tail = log.read_text(encoding="utf-8", errors="replace")[-1500:]
            print(f"compiling {name} at {count} rows failed:\n{tail}", flush=True)
    print(f"kernels compiled in {time.monotonic() - started:.0f} s ({len(jobs)} processes)", flush=True)


def run_all(arguments: argparse.Namespace) -> None:
    """Compile, then every profile and every shape in a process of its own, until the budget is spent."""
    end = time.monotonic() + arguments.budget
    if not arguments.no_compile:
        compile_all(arguments.profiles, arguments.streams)
    for name in arguments.profiles:
        report_path(arguments.out, name).unlink(missing_ok=True)
    jobs = jobs_of(arguments.profiles)
    while jobs:
        job, left = jobs[0], end - time.monotonic()
        own = seconds_of(jobs, left)
        jobs = jobs[1:]
        if job.label is not None and own > left:
            sink = Sink.opened(report_path(arguments.out, job.name), job.name, left)
            sink.stage(job.label, own, lambda: None)
            continue
        command = [
            sys.executable, "-m", __spec__.name, "--one", job.name, "--budget", f"{own:.0f}",
            "--out", str(arguments.out), "--streams", ",".join(map(str, arguments.streams)),
            "--steps", str(arguments.steps), "--seconds", str(arguments.seconds),
            *(["--no-trace"] if arguments.no_trace else []), *(["--shape", job.label] if job.label else []),
        ]  # fmt: skip
        try:
            subprocess.run(command, timeout=own + 45, check=False)
        except subprocess.TimeoutExpired:
            print(f"{job.name} {job.label or ''}: stopped {own + 45:.0f} s after its start", flush=True)


def report_path(folder: Path, name: str) -> Path:
    """Where all processes of a profile keep their results."""
    return folder / f"geometry-{name}.json"


def main(given: Sequence[str] | None = None) -> None:
    """See the module."""
    numbers: Callable[[str], list[int]] = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--profiles", type=lambda text: text.split(","), default=list(PROFILES))
    parser.add_argument("--streams", type=numbers, default=list(STREAMS))
    parser.add_argument("--steps", type=int, default=100, help="most timed steps of a decode run")
    parser.add_argument("--seconds", type=float, default=5.0, help="after which no timed step begins")
    parser.add_argument("--budget", type=float, default=440.0, help="seconds for everything")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-trace", action="store_true")
    parser.add_argument("--one", help="measure this profile in this process")
    parser.add_argument("--shape", help="with --one: measure only the memory of this further shape")
    parser.add_argument("--compile", help="only compile this profile's kernels")
    parser.add_argument("--rows", type=int, default=1)
    arguments = parser.parse_args(given)
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    if arguments.compile:
        compile_kernels(arguments.compile, arguments.rows)
    elif arguments.one:
        arguments.out.mkdir(parents=True, exist_ok=True)
        sink = Sink.opened(report_path(arguments.out, arguments.one), arguments.one, arguments.budget)
        if arguments.shape:
            try:
                shape = find_shape(arguments.one, arguments.shape)
            except UsageError as error:
                parser.error(str(error))
            sink.stage(shape.label, 0, partial(measure_shape, arguments.one, shape, sink))
        else:
            measure_profile(
                arguments.one, sink, arguments.streams, arguments.steps, arguments.seconds, not arguments.no_trace
            )
    else:
        arguments.out.mkdir(parents=True, exist_ok=True)
        run_all(arguments)


if __name__ == "__main__":
    main()
