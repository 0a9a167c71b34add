"""A profile served as a user would serve it: its own process, its own port, watched from outside."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from slimserve.errors import RunError
from slimserve.measure.client import Endpoint, ServerError

_SERVING = re.compile(r"serving (?P<names>.+) at (?P<url>http://\S+)/v1")
_PR_SET_PDEATHSIG = 1


class BootedProfile:
    """A context in which `slimserve PROFILE --serve` runs; `endpoint` is where it answers.

    Raises RunError with the server's own last words when it does not come up within `timeout` seconds.
    """

    def __init__(self, arguments: Sequence[str], *, timeout: float = 900.0) -> None:
        self._command = [sys.executable, "-m", "slimserve.cli.main", *arguments, "--serve", "--port", "0", "--quiet"]
        self._timeout = timeout
        self._lines: deque[str] = deque(maxlen=400)
        self._ready = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self.endpoint = Endpoint("http://127.0.0.1:1")
        self.boot_seconds = 0.0

    def __enter__(self) -> BootedProfile:
        root = str(Path(__file__).resolve().parent.parent.parent)
        paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        started = time.monotonic()
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env=environment, errors="replace", preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )  # fmt: skip
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        while not (self._ready.wait(0.1) and self._healthy()):
            if self._process.poll() is not None:
                time.sleep(0.2)  # the last lines are still on their way
                raise RunError(f"the server did not start: {self.last_words}")
            if time.monotonic() - started > self._timeout:
                self.__exit__(None, None, None)
                raise RunError(f"the server did not start within {self._timeout:g} s; it last said: {self.last_words}")
        self.boot_seconds = time.monotonic() - started
        return self

    def _healthy(self) -> bool:
        """Whether a step could run now."""
        try:
            self.endpoint.get("/health")
        except ServerError:
            time.sleep(0.1)
            return False
        return True

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self._lines.append(line.rstrip())
            match = _SERVING.search(line)
            if match is not None:
                self.endpoint = Endpoint(match["url"], match["names"].split(",")[0].strip())
                self._ready.set()

    @property
    def last_words(self) -> str:
        """The last line that the server said."""
        return next((line for line in reversed(self._lines) if line.strip()), "nothing")

    @property
    def said(self) -> tuple[str, ...]:
        """Everything the server said on standard error (the newest 400 lines)."""
        return tuple(self._lines)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def resident_bytes(self) -> int:
        """Memory of the server and its children: what is their own, and files that they map, counted once.

        The largest process's mapped files stand for all: the others map the same libraries. So the figure does not
        depend on what else runs on the machine and shares them.
        """
        if self._process is None:
            return 0
        found = [_resident(pid) for pid in _tree(self._process.pid)]
        return sum(own for own, _ in found) + max(mapped for _, mapped in found)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()  # not the signal of Ctrl-C: shells start background jobs deaf to that one
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=30)


def _end_with_parent() -> None:
    """Ask to be stopped when the process that measures is gone, however it went."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _tree(pid: int) -> list[int]:
    """A process and everything below it."""
    found = [pid]
    for current in found:
        for path in Path(f"/proc/{current}/task").glob("*/children"):
            try:
                found += [int(child) for child in path.read_text(encoding="ascii").split()]
            except (OSError, ValueError):
                continue
    return found


def _resident(pid: int) -> tuple[int, int]:
    """(bytes of a process's own, resident bytes of files that it maps)."""
    for name, whole, own in (("smaps_rollup", "Rss", "Anonymous"), ("status", "VmRSS", "RssAnon")):
        try:
            lines = Path(f"/proc/{pid}/{name}").read_text(encoding="ascii", errors="replace").splitlines()
            values = {
                key: int(rest.split()[0])
                for key, _, rest in (line.partition(":") for line in lines)
                if rest[-2:] == "kB"
            }
            return values[own] * 1024, (values[whole] - values[own]) * 1024
        except (OSError, KeyError, ValueError):
            continue
    return 0, 0
