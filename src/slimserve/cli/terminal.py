"""The terminal: the model's text on standard output, everything else on standard error, Unicode in and out."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from slimserve.errors import printable


def prepare_streams() -> None:
    """UTF-8 on all three streams; what cannot be read or written becomes a replacement character.

    A stream that was closed for us leads nowhere; otherwise the next file that is opened would take its number, and
    whatever is printed would be written into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        with contextlib.suppress(OSError):
            try:
                os.fstat(number)
            except OSError:
                os.open(os.devnull, os.O_RDWR)
            if getattr(sys, name) is None:
                setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]


def clean_argument(text: str) -> str:
    """A command-line argument whose invalid bytes became replacement characters."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def say(text: str = "") -> None:
    """One line to the person, on standard error; names out of files cannot command the terminal."""
    print(printable(text), file=sys.stderr, flush=True)


def speak(text: str) -> None:
    """The model's own text, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def is_interactive() -> bool:
    """Whether a person sits at standard input."""
    return sys.stdin is not None and sys.stdin.isatty()


def read_all_input() -> str:
    """Everything on standard input, as text."""
    buffer = getattr(sys.stdin, "buffer", None)
    if buffer is None:
        return sys.stdin.read()
    return bytes(buffer.read()).decode("utf-8", "replace")


def ask(prompt: str) -> str:
    """One line from the person, without its line end; EOFError at the end of input."""
    if is_interactive() and sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing and history for input())
        return input(prompt)
    if is_interactive():
        print(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


class LoadProgress:
    """Loading, stage by stage: a bar on a terminal, nothing elsewhere."""

    def __init__(self) -> None:
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        """A ProgressCallback."""
        if not sys.stderr.isatty():
            return
        if self._bars is None:
            self._bars = _make_bars()
            self._bars.start()
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total or None)
        self._bars.update(self._tasks[stage], completed=done, total=total or None)

    def close(self) -> None:
        """Take the bars away."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


def _make_bars() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("loading {task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


Loaded = TypeVar("Loaded")


def with_progress(load: Callable[[LoadProgress], Loaded]) -> Loaded:
    """What `load` returns; bars never outlive it."""
    progress = LoadProgress()
    try:
        return load(progress)
    finally:
        progress.close()
