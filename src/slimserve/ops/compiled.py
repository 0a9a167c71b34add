"""What is compiled at first use, where it is kept, and what a boot compiled or found there.

Two folders of the cache: `build/` holds the C++ library, under a hash of sources, compiler, flags and processor
(`ops.cpu.build`); `triton/` holds device kernels, each under Triton's own hash of its source, the compiler's version,
the device's architecture and the launch options. Both are written in one rename, so two boots at once can only do the
same work twice. Kernels are not tuned at run time: there is nothing else to keep.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimserve.ops.cpu import build

FOLDER_VARIABLE = "TRITON_CACHE_DIR"


@dataclass(slots=True)
class Counts:
    """Device kernels of this process: compiled here, or found compiled; seconds spent compiling."""

    compiled: int = 0
    reused: int = 0
    seconds: float = 0.0

    def describe(self) -> str:
        """In words, for the lines of a start."""
        words = f"{self.compiled} compiled" + (f" in {self.seconds:.1f} s" if self.compiled else "")
        return f"{words}, {self.reused} reused from {kernel_folder()}"


counts = Counts()
_lock = threading.Lock()


def kernel_folder() -> Path:
    """$TRITON_CACHE_DIR, else the cache's `triton` folder."""
    chosen = os.environ.get(FOLDER_VARIABLE, "").strip()
    return Path(chosen).expanduser() if chosen else build.cache_folder() / "triton"


def kept_kernels() -> int:
    """Compiled device kernels in the folder."""
    with contextlib.suppress(OSError):
        return sum(1 for _ in kernel_folder().glob("*/*.cubin")) + sum(1 for _ in kernel_folder().glob("*/*.hsaco"))
    return 0


def keep_kernels() -> None:
    """Tell Triton its folder, and count what it compiles and what it finds; called before any kernel is compiled.

    Where the folder cannot be made, Triton keeps to its own and one sentence says so.
    """
    folder = kernel_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"slimserve: {folder} cannot be made ({error.strerror}); kernels are kept elsewhere", file=sys.stderr)
    else:
        os.environ[FOLDER_VARIABLE] = str(folder)
    with contextlib.suppress(ImportError, AttributeError):
        from triton import knobs

        before = knobs.compilation.listener
        if getattr(before, "__name__", "") != _listen.__name__:
            knobs.compilation.listener = _listen if before is None else _both(before)


def _listen(*, times: Any, cache_hit: bool, **_: Any) -> None:
    with _lock:
        if cache_hit:
            counts.reused += 1
        else:
            counts.compiled += 1
            counts.seconds += times.total / 1e6


def _both(before: Any) -> Any:
    """A listener that was there already, and ours."""

    def listen(**arguments: Any) -> None:
        before(**arguments)
        _listen(**arguments)

    listen.__name__ = _listen.__name__
    return listen
