"""Progress of transfers: a contract, a silent one, and a terminal one on stderr."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol


class Task(Protocol):
    """One bar."""

    def set(self, done: int) -> None:
        """Bytes done so far (may go back when a transfer restarts)."""
        ...

    def close(self) -> None:
        """The task ended, well or not."""
        ...


class Progress(Protocol):
    """Where transfers tell how far they are."""

    def task(self, label: str, total: int) -> Task:
        """Open a bar of `total` bytes."""
        ...

    def note(self, text: str) -> None:
        """Say one line."""
        ...


class _SilentTask:
    def set(self, done: int) -> None:
        pass

    def close(self) -> None:
        pass


class SilentProgress:
    """Says nothing."""

    def task(self, label: str, total: int) -> Task:
        """A bar that nobody sees."""
        return _SilentTask()

    def note(self, text: str) -> None:
        """Drop the line."""


class _PlainTask:
    """A line each quarter, for logs."""

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total, self._quarter = label, max(total, 1), 0

    def set(self, done: int) -> None:
        quarter = 4 * done // self._total
        if quarter > self._quarter:
            self._quarter = quarter
            print(f"{self._label}: {100 * done // self._total} % of {self._total:,} bytes", file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


class _RichTask:
    def __init__(self, bars: Any, task_id: Any, on_close: Callable[[], None]) -> None:
        self._bars, self._id, self._on_close, self._open = bars, task_id, on_close, True

    def set(self, done: int) -> None:
        self._bars.update(self._id, completed=done)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._bars.refresh()
            self._on_close()


class TerminalProgress:
    """Bars on a terminal's stderr, a few lines where stderr is no terminal."""

    def __init__(self) -> None:
        self._bars: Any = None
        self._running = 0
        self._lock = threading.Lock()

    def task(self, label: str, total: int) -> Task:
        """Open a bar."""
        if not sys.stderr.isatty():
            return _PlainTask(label, total)
        with self._lock:
            if self._bars is None:
                self._bars = _make_bars()
                self._bars.start()
            self._running += 1
            return _RichTask(self._bars, self._bars.add_task(label, total=total), self._closed)

    def _closed(self) -> None:
        with self._lock:
            self._running -= 1
            if self._running == 0 and self._bars is not None:
                self._bars.stop()
                self._bars = None

    def note(self, text: str) -> None:
        """A line on stderr, above the bars."""
        bars = self._bars
        if bars is not None:
            bars.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=sys.stderr, flush=True)


def _make_bars() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    return Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def folder_bytes(folder: Path) -> int:
    """Bytes of the files below a folder; files and folders that vanish meanwhile count as nothing."""
    total = 0
    for parent, _, names in os.walk(folder):  # passes over folders that cannot be listed
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


@contextmanager
def watched(measure: Callable[[], int], task: Task, interval: float = 0.3) -> Iterator[None]:
    """Feed `task` from `measure()` while a transfer runs that does not report progress itself."""
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(interval):
            task.set(measure())

    thread = threading.Thread(target=watch, name="fetch-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
