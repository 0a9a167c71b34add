"""A whole server process: readiness, engine death, stop signals, exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

SCRIPT = Path(__file__).with_name("fake_server.py")


class Server:
    """A server in a process of its own."""

    def __init__(self, grace: float, **fake: Any) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "0", str(grace), json.dumps(fake)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready "), line + self.process.stderr.read() if self.process.stderr else line
        self.url = line.split()[1]

    def engine(self) -> psutil.Process:
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def end(self, timeout: float = 60) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, out, err


@contextlib.contextmanager
def server(grace: float = 5.0, **fake: Any) -> Iterator[Server]:
    running = Server(grace, **fake)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.communicate()


class Stream(threading.Thread):
    """A client that reads one stream to its end."""

    def __init__(self, url: str, max_tokens: int, text: str = "endless") -> None:
        super().__init__(daemon=True)
        self._body = {"prompt": text, "max_tokens": max_tokens, "stream": True, "temperature": 0}
        self._url = url
        self.started = threading.Event()
        self.events: list[str] = []
        self.start()

    def run(self) -> None:
        with (
            contextlib.suppress(httpx.HTTPError),  # a cut is seen in the events
            httpx.stream("POST", self._url + "/v1/completions", json=self._body, timeout=60) as reply,
        ):
            for line in reply.iter_lines():
                if line.startswith("data: "):
                    self.events.append(line[6:])
                    self.started.set()


def wait_until_down(url: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if httpx.get(url + "/health", timeout=30).status_code != 200:
                return
        except httpx.HTTPError:
            return
        time.sleep(0.02)
    raise AssertionError("health stayed good")


@pytest.mark.parametrize("how", ["killed", "crashed"])
def test_a_dead_engine_ends_streams_with_an_error_and_the_server_with_a_failure(how: str) -> None:
    with server(step_seconds=0.01) as running:
        engine = running.engine()
        stream = Stream(running.url, 4000)
        assert stream.started.wait(60)
        assert httpx.get(running.url + "/health").status_code == 200
        if how == "killed":
            engine.kill()
        else:
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(running.url + "/v1/completions", json={"prompt": "crash!"}, timeout=60)
        wait_until_down(running.url)
        stream.join(60)
        assert not stream.is_alive(), "the stream never closed"
        error = json.loads(stream.events[-1])["error"]
        assert error["code"] == "engine_down" and "died" in error["message"]
        code, out, err = running.end()
        assert code == 1 and "the engine stopped" in out
        assert "engine_down" in err and "Traceback" not in err


def test_a_stop_signal_lets_requests_finish() -> None:
    with server(grace=10.0, step_seconds=0.01) as running:
        stream = Stream(running.url, 100)
        assert stream.started.wait(60)
        running.process.send_signal(signal.SIGTERM)
        code, out, err = running.end()
        stream.join(60)
        assert stream.events[-1] == "[DONE]"
        assert json.loads(stream.events[-2])["choices"][0]["finish_reason"] == "length"
        assert code == 0 and "left: ['MainThread']" in out, out + err


def test_after_the_grace_period_the_rest_ends_with_an_error() -> None:
    with server(grace=0.5, step_seconds=0.01) as running:
        engine = running.engine()
        stream = Stream(running.url, 4000)
        assert stream.started.wait(60)
        started = time.monotonic()
        running.process.send_signal(signal.SIGINT)
        code, out, err = running.end()
        assert time.monotonic() - started < 30  # the reply would take 40
        stream.join(60)
        assert json.loads(stream.events[-1])["error"]["code"] == "shutting_down"
        assert code == 0, out + err
        assert not engine.is_running()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_signal_right_after_the_url_is_told_ends_in_order(number: int, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    script = "import os, signal, sys; sys.path.insert(0, sys.argv[1]); import fake_server as f; original = f.serve\n"
    script += "def serve(spec, text, options, progress, on_ready):\n"
    script += f"    original(spec, text, options, progress, lambda *_: os.kill(os.getpid(), {int(number)}))\n"
    script += "f.serve = serve; sys.argv = ['x', '0', '1', '{}']; sys.exit(f.main())"
    ended = subprocess.run(
        [sys.executable, "-c", script, str(SCRIPT.parent)],
        env={**environment, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr and list(tmp_path.iterdir()) == []


def test_a_second_stop_signal_ends_at_once_and_without_traces() -> None:
    with server(grace=30.0, step_seconds=0.01) as running:
        whole = threading.Thread(target=_post_and_forget, args=(running.url,), daemon=True)
        whole.start()
        stream = Stream(running.url, 4000)
        assert stream.started.wait(60)
        running.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        started = time.monotonic()
        running.process.send_signal(signal.SIGINT)
        code, out, err = running.end()
        assert time.monotonic() - started < 20  # the reply would take 40, the grace 30
        assert code == 0 and "Traceback" not in err, out + err


def _post_and_forget(url: str) -> None:
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(url + "/v1/completions", json={"prompt": "endless", "max_tokens": 4000}, timeout=60)


def test_a_stop_signal_while_loading_leaves_nothing_behind(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    pid_file, folder = tmp_path / "pid", tmp_path / "tmp"
    folder.mkdir()
    arguments = json.dumps({"load_seconds": 60, "pid_file": str(pid_file)})
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "0", "1", arguments],
        env={**environment, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 60
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert len(list(folder.iterdir())) == 1
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert not psutil.pid_exists(int(pid_file.read_text()))
    assert list(folder.iterdir()) == []


def test_a_taken_port_is_wrong_use_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        ended = subprocess.run(
            [sys.executable, str(SCRIPT), str(port), "1", '{"load_seconds": 60}'],
            capture_output=True,
            text=True,
            timeout=60,
            env=environment,
        )
        assert ended.returncode == 2 and f":{port}" in ended.stdout and "--port" in ended.stdout


def test_loading_that_is_refused_ends_with_3() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "0", "1", '{"fail_load": "refuse"}'],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert ended.returncode == 3 and "does not fit" in ended.stdout
