"""The measurement of large geometries, run on tiny ones on the CPU: every stage works, and it sees what is wrong."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_synthetic
import torch
from history import PlainRecorder

from slimserve.cache.budget import CacheDemand, full_budget
from slimserve.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from slimserve.engine.loop import Engine
from slimserve.measure import gpu_geometry
from slimserve.measure.gpu_geometry import PROFILES, Bench, Sink, main, report_path
from slimserve.measure.gpu_rates import DecodeRun, longest_requests, same_beginnings
from slimserve.measure.gpu_shapes import SHAPE_SECONDS, SHAPES, jobs_of, seconds_of
from slimserve.plan.description import describe_config
from slimserve.profiles.registry import find_record
from slimserve.profiles.settings import check


def bench_of(name: str, folder: Path, seconds: float = 600.0) -> tuple[Bench, Engine]:
    model = tiny_synthetic.tiny(name)
    description = describe_config(name, model.config, model.rules, model.present)
    sink = Sink(folder / "report.json", name, time.monotonic() + seconds)
    bench = Bench(name, description, sink, torch.device("cpu"), prompt_tokens=100)
    limits = SchedulerConfig(max_sequences=5, max_context=2048, token_budget=128)
    config = EngineConfig(cache=CacheConfig(budget_bytes=64 << 20), scheduler=limits)
    bench.load(model, config)
    engine = bench.engine(config, None, "tiny")
    engine.runner.forward.recorder = PlainRecorder()
    return bench, engine


@pytest.mark.parametrize("name", tiny_synthetic.NAMES)
def test_every_stage_on_a_tiny_model(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench, engine = bench_of(name, tmp_path)
    bench.machine()
    bench.decode(engine, (1, 2, 4), steps=9, seconds=20.0)
    bench.prefill(engine)
    bench.check_replies(engine, steps=9, seconds=20.0)
    bench.verify(engine.config, 3)
    done = longest_requests(engine, 5, 200)
    assert done["requests"] == done["at_once"] == 5 and done["context"] == 200
    with pytest.raises(RuntimeError, match="at most 5 ran at once"):
        longest_requests(engine, 6, 200)
    report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    assert report["load"]["weights"] == "synthetic weights"
    assert [row["streams"] for row in report["decode"]] == [4, 2, 1]
    assert all(0 < row["share"] < 1 and row["steps"] == 9 for row in report["decode"])
    assert report["decode"][1]["cached_tokens"] == 128 and report["decode"][0]["cached_tokens"] == 0
    assert report["replies"]["differing"] == []
    verified = report["verify"]
    assert verified["equal"] and 0 < verified["accepted"] < verified["drafted"]
    assert verified["most"] > 1.1 and verified["ratio"] > 0 and len(verified["verifying_ms"]) > 10
    assert report["replies"]["least_share_of_distinct_tokens"] > 0.5
    assert report["prefill"]["100"]["tokens_per_second"] > 0
    assert "synthetic weights" in capsys.readouterr().out


@pytest.mark.parametrize("name", tiny_synthetic.NAMES)
def test_caches_planned_for_so_many_longest_requests_run_them_all_at_once(name: str, tmp_path: Path) -> None:
    bench, roomy = bench_of(name, tmp_path)
    assert bench.loaded is not None
    limits = SchedulerConfig(max_sequences=4, max_context=512, token_budget=128)
    demand = CacheDemand(4, 512, 128, roomy.cache.plan.demand.snapshot_spacing)
    exact = full_budget(bench.loaded.model.config.caches(torch.bfloat16), demand)
    config = replace(roomy.config, cache=replace(roomy.config.cache, budget_bytes=exact), scheduler=limits)
    engine = bench.engine(config, None, "tiny")
    assert engine.cache.plan.num_blocks == 4 * 512 // 64
    done = longest_requests(engine, 4, 512)
    assert done["at_once"] == 4 and done["preemptions"] == 0


def test_replies_that_differ_are_named() -> None:
    first = DecodeRun(2, 1.0, 1.0, 10, 0, [1.0], [[1, 2, 3], [4, 5, 6]])
    other = DecodeRun(2, 1.0, 1.0, 10, 0, [1.0], [[1, 2], [4, 9, 6, 7]])
    assert same_beginnings([first, first]) == []
    assert same_beginnings([first, other]) == ["stream 1 of 2 from token 1"]


def test_stages_end_at_the_deadline_and_failures_are_kept(tmp_path: Path) -> None:
    sink = Sink(tmp_path / "r.json", "x", time.monotonic() + 5)
    assert sink.stage("late", 60, lambda: 1) is None and sink.report["late"] == {"left_out": True}

    def fail() -> None:
        raise RuntimeError("no")

    sink.stage("bad", 1, fail)
    assert sink.report["bad"]["failed"] == "RuntimeError: no"
    assert sink.stage("good", 1, lambda: 7) == 7


def test_shapes_are_settings_of_the_records() -> None:
    assert set(SHAPES) == set(PROFILES)
    flags = [shape.flags for shapes in SHAPES.values() for shape in shapes]
    for name, value in ((n, v) for flag in flags for n, v in flag.items()):
        check(name, value, "a shape")
    # Five shapes that differ in context, sequences, KV dtype and drafter: the recorded one and four more.
    assert len(SHAPES["qwen35-4b"]) == 4
    for name, shapes in SHAPES.items():
        assert find_record(name).model.max_context >= max(shape.flags["max_context"] for shape in shapes)
        assert all(shape.requests <= shape.flags["max_sequences"] for shape in shapes)
    assert replace(SHAPES["qwen35-4b"][0], requests=1).requests == 1


def test_every_shape_has_a_process_and_its_time() -> None:
    jobs = jobs_of(PROFILES)
    assert [job.label for job in jobs[:4]] == [shape.label for shape in SHAPES["qwen35-4b"]]
    assert {(job.name, job.label) for job in jobs if job.label} == {(n, s.label) for n in SHAPES for s in SHAPES[n]}
    assert [job.name for job in jobs if job.label is None] == list(PROFILES) and set(SHAPE_SECONDS) == set(PROFILES)
    left, spent = 540.0, []
    for place in range(len(jobs)):
        spent.append(seconds_of(jobs[place:], left))
        left -= spent[-1]
    assert left >= -1e-6 and all(seconds > 20 for seconds in spent), "a profile's own run starves no shape"


def test_processes_of_a_profile_share_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def run(command: list[str], **_: Any) -> None:
        given = command[command.index("--one") :]
        started.append(given)
        label = given[given.index("--shape") + 1] if "--shape" in given else "recorded shape"
        Sink.opened(report_path(tmp_path, given[1]), given[1], 9.0).keep(label, {"terms": []})

    monkeypatch.setattr(gpu_geometry.subprocess, "run", run)
    report_path(tmp_path, "qwen35-4b").write_text('{"of an earlier run": 1}')
    main(["--out", str(tmp_path), "--profiles", "qwen35-4b,glm53f-q2-1", "--no-compile", "--budget", "220"])
    report = json.loads(report_path(tmp_path, "qwen35-4b").read_text())
    assert set(report) == {"recorded shape", *(shape.label for shape in SHAPES["qwen35-4b"])} and len(started) == 7
    # What no longer fits is kept as left out, not forgotten.
    main(["--out", str(tmp_path), "--profiles", "glm53f-q2-1", "--no-compile", "--budget", "60"])
    assert json.loads(report_path(tmp_path, "glm53f-q2-1").read_text())["8,192 x 2 bf16"] == {"left_out": True}
    with pytest.raises(SystemExit) as error:
        main(["--one", "qwen35-4b", "--shape", "7 x 7", "--out", str(tmp_path)])
    assert error.value.code == 2
