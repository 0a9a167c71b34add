"""The engine process: handshake, one end per request, death on either side, orderly stop."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

from slimserve.engine.build import EngineSettings, decode_config, encode_config
from slimserve.engine.config import (
    Activations,
    CacheConfig,
    CacheDtype,
    DrafterKind,
    EngineConfig,
    NumericsConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from slimserve.engine.messages import ENCODER, EngineSpec, Rejection, Submit
from slimserve.engine.process import EngineClient, ProcessEngine, ThreadEngine
from slimserve.engine.request import FinishReason, SamplingParams
from slimserve.engine.step import RequestOutput
from slimserve.errors import RefusalError, RunError, UsageError

KINDS = [ProcessEngine, ThreadEngine]


class Listener:
    """Collects everything."""

    def __init__(self) -> None:
        self.outputs: queue.Queue[RequestOutput] = queue.Queue()
        self.accepted: list[str] = []
        self.rejected: queue.Queue[Rejection] = queue.Queue()
        self.down: list[str] = []
        self.went_down = threading.Event()

    def on_accepted(self, request_ids: Sequence[str]) -> None:
        self.accepted += request_ids

    def on_rejected(self, rejections: Sequence[Rejection]) -> None:
        for rejection in rejections:
            self.rejected.put(rejection)

    def on_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            self.outputs.put(output)

    def on_down(self, reason: str) -> None:
        self.down.append(reason)
        self.went_down.set()

    def until_finished(self, *request_ids: str) -> dict[str, list[RequestOutput]]:
        found: dict[str, list[RequestOutput]] = {name: [] for name in request_ids}
        while not all(outputs and outputs[-1].finish_reason for outputs in found.values()):
            output = self.outputs.get(timeout=60)
            assert not (found[output.request_id] and found[output.request_id][-1].finish_reason), "a second end"
            found[output.request_id].append(output)
        return found


def start(kind: Any, listener: Listener, **fake: Any) -> Any:
    return kind(EngineSpec("fake_engine:build", fake), listener, lambda *_: None)


@contextlib.contextmanager
def running(kind: Any, **fake: Any) -> Iterator[tuple[EngineClient, Listener]]:
    listener = Listener()
    client = start(kind, listener, **fake)
    try:
        yield client, listener
    finally:
        client.shutdown(0.0)


def submit(name: str, text: str = "endless", max_tokens: int = 10) -> Submit:
    return Submit(name, list(text.encode()), SamplingParams(temperature=0), max_tokens)


def ask_stats(client: EngineClient) -> Any:
    found: queue.Queue[Any] = queue.Queue()
    client.query_stats(found.put)
    return found.get(timeout=60)


@pytest.mark.parametrize("kind", KINDS)
def test_loading_is_told_and_requests_end_once(kind: Any) -> None:
    seen: list[tuple[str, int, int]] = []
    listener = Listener()
    spec = EngineSpec("fake_engine:build", {"max_request_tokens": 500})
    client = kind(spec, listener, lambda *progress: seen.append(progress))
    assert seen == [("weights", 0, 2), ("weights", 1, 2), ("weights", 2, 2)]
    assert client.info.max_request_tokens == 500 and client.alive and client.failure is None
    names = [f"r{index}" for index in range(20)]
    for name in names:
        client.submit(submit(name))
    found = listener.until_finished(*names)
    for outputs in found.values():
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert sum(len(output.token_ids) for output in outputs) == 10
    assert sorted(listener.accepted) == sorted(names)
    assert ask_stats(client).num_running == 0
    client.shutdown(1.0)
    assert not client.alive and client.failure is None and len(listener.down) == 1
    with pytest.raises(RunError):
        client.submit(submit("late"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_refused_request_is_told_and_others_go_on(kind: Any) -> None:
    with running(kind, step_seconds=0.05) as (client, listener):
        client.submit(submit("good", max_tokens=100))
        client.submit(submit("bad", "refuse!"))
        client.submit(submit("good"))  # the same id twice
        codes = {listener.rejected.get(timeout=60).code, listener.rejected.get(timeout=60).code}
        assert codes == {"refused", "duplicate_request_id"}
        listener.until_finished("good")


@pytest.mark.parametrize("kind", KINDS)
def test_abort_takes_effect_before_the_next_step(kind: Any) -> None:
    with running(kind, step_seconds=0.05) as (client, listener):
        client.submit(submit("a", max_tokens=1000))
        listener.outputs.get(timeout=60)
        client.abort("a")
        client.abort("unknown")
        stats = ask_stats(client)
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        while not listener.outputs.empty():
            assert listener.outputs.get().finish_reason is None
        time.sleep(0.2)
        assert listener.outputs.empty(), "an aborted request went on"


@pytest.mark.parametrize("kind", KINDS)
def test_shutdown_finishes_what_it_can_and_aborts_the_rest(kind: Any) -> None:
    listener = Listener()
    client = start(kind, listener, step_seconds=0.02)
    client.submit(submit("short", max_tokens=5))
    client.submit(submit("long", max_tokens=100_000))
    listener.outputs.get(timeout=60)
    started = time.monotonic()
    client.shutdown(0.6)
    assert 0.5 < time.monotonic() - started < 30
    ends = {output.request_id: output.finish_reason for output in listener.outputs.queue if output.finish_reason}
    assert ends == {"short": FinishReason.LENGTH, "long": FinishReason.ABORT}
    assert client.failure is None and listener.went_down.is_set()


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_fails_ends_everything_with_its_reason(kind: Any) -> None:
    with running(kind) as (client, listener):
        client.submit(submit("other", max_tokens=100_000))
        listener.outputs.get(timeout=60)
        client.submit(submit("bad", "raise!"))
        found = listener.until_finished("other", "bad")
        for outputs in found.values():
            assert outputs[-1].finish_reason is FinishReason.ERROR and "as asked" in (outputs[-1].error or "")
        assert listener.went_down.wait(60)
        assert not client.alive and "as asked" in (client.failure or "")


def test_stop_signals_are_the_parents_to_obey() -> None:
    with running(ProcessEngine, step_seconds=0.01) as (client, listener):
        client.submit(submit("a", max_tokens=50))
        listener.outputs.get(timeout=60)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(client.pid, number)  # type: ignore[attr-defined]
        assert listener.until_finished("a")["a"][-1].finish_reason is FinishReason.LENGTH
        assert client.alive


@pytest.mark.parametrize("how", ["crash", "SIGKILL", "SIGABRT"])
def test_the_parent_notices_a_dead_engine_at_once(how: str) -> None:
    with running(ProcessEngine, step_seconds=0.01) as (client, listener):
        client.submit(submit("a", max_tokens=100_000))
        listener.outputs.get(timeout=60)
        started = time.monotonic()
        if how == "crash":
            client.submit(submit("b", "crash!"))
        else:
            os.kill(client.pid, getattr(signal, how))  # type: ignore[attr-defined]
        assert listener.went_down.wait(60)
        assert time.monotonic() - started < 30
        assert not client.alive and ("exit code 7" if how == "crash" else how) in (client.failure or "")
        with pytest.raises(RunError, match="died"):
            client.submit(submit("c"))


@pytest.mark.parametrize(
    ("fail", "error", "words"),
    [("refuse", RefusalError, "3 of 2 bytes"), ("bug", RunError, "a bug"), ("crash", RunError, "exit code 9")],
)
def test_loading_that_fails_says_why(fail: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        start(ProcessEngine, Listener(), fail_load=fail)


def test_an_unknown_factory_is_wrong_use() -> None:
    with pytest.raises(UsageError, match="no engine factory"):
        ProcessEngine(EngineSpec("fake_engine:nothing"), Listener(), lambda *_: None)


@pytest.mark.parametrize("folder", ["absent", "long"])
def test_no_place_for_sockets_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    place = tmp_path / ("x" * 120 if folder == "long" else "absent")
    if folder == "long":
        place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    with pytest.raises(RunError, match="TMPDIR"):
        start(ProcessEngine, Listener())
    assert folder == "absent" or list(place.iterdir()) == []


def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="t") as place:  # pytest's own folders may be too deep for a socket
        monkeypatch.setattr(tempfile, "tempdir", place)
        _nothing_is_left_in(Path(place))


def _nothing_is_left_in(place: Path) -> None:
    threads = threading.active_count()
    with running(ProcessEngine) as (client, _):
        (new,) = place.iterdir()
        assert new.name.startswith("slimserve-") and new.stat().st_mode & 0o777 == 0o700
        pid = client.pid  # type: ignore[attr-defined]
    assert list(place.iterdir()) == []
    assert threading.active_count() == threads
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


PARENT = """
import os, sys, time
sys.path[:0] = {paths!r}
from slimserve.engine.messages import EngineSpec
from slimserve.engine.process import ProcessEngine
class Nobody:
    def __getattr__(self, name): return lambda *_: None
client = ProcessEngine(EngineSpec("fake_engine:build", {arguments!r}), Nobody(), lambda *_: None)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("loading", [False, True], ids=["serving", "loading"])
def test_an_engine_never_outlives_its_parent(tmp_path: Path, loading: bool) -> None:
    pid_file = tmp_path / "pid"
    arguments = {"pid_file": str(pid_file), "load_seconds": 60.0 if loading else 0.0}
    script = PARENT.format(paths=[entry for entry in sys.path if entry], arguments=arguments)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 60
        while not (pid_file.exists() and pid_file.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        child = psutil.Process(int(pid_file.read_text()))
        if not loading:
            assert parent.stdout is not None and parent.stdout.readline() == b"ready\n"
        assert child.is_running()
        parent.kill()
        parent.wait()
        child.wait(60)
    finally:
        parent.kill()
        parent.wait()


def test_a_configuration_crosses_the_boundary_whole() -> None:
    config = EngineConfig(
        device="cuda:1",
        num_threads=3,
        cache=CacheConfig(dtype=CacheDtype.FP8, budget_bytes=1 << 40, prefix_caching=False),
        scheduler=SchedulerConfig(max_sequences=7, max_queue=9),
        speculation=SpeculationConfig(drafter=DrafterKind.LOOKUP, max_draft=3, schedule=((1, 4, 3), (5, 8, 1))),
        numerics=NumericsConfig(activation_dtype=torch.bfloat16, cpu_activations=Activations.FLOAT),
    )
    message = ENCODER.encode(EngineSettings(path="p", name="n", config=encode_config(config)).spec())
    spec = msgspec.msgpack.decode(message, type=EngineSpec)
    assert decode_config(msgspec.convert(spec.arguments, EngineSettings).config) == config
    assert config != EngineConfig()
