"""Builds the C++ kernels at first use and keeps the library in the cache folder.

The folder $CACHE/build/<key> is named by a hash of the sources, the compiler's version, its flags and the machine's
instruction sets, so a changed source, compiler or machine builds anew and an old library is never loaded by mistake.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from slimserve.errors import RefusalError

SOURCES = Path(__file__).resolve().parent
LIBRARY_NAME = "libslimserve.so"
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-g0", "-w", "-pthread")
_COMPILE_SECONDS = 600


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler: its command and the first line of its version."""

    command: tuple[str, ...]
    version: str

    @property
    def name(self) -> str:
        """The command as a user would type it."""
        return shlex.join(self.command)


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What `slimserve doctor` prints: the compiler found (None = none), the library's path, whether it exists."""

    compiler: str | None
    library: str | None
    built: bool
    note: str


@dataclass(slots=True)
class Outcome:
    """What this process did for its library: seconds of compiling (None: another run had built it), and where it is."""

    library: Path | None = None
    seconds: float | None = None

    def describe(self) -> str:
        """In words, for the lines of a start."""
        if self.library is None:
            return "none: torch references serve"
        words = "reused from" if self.seconds is None else f"compiled in {self.seconds:.0f} s into"
        return f"{words} {self.library.parent}"


outcome = Outcome()


def cache_folder() -> Path:
    """$SLIMSERVE_CACHE, else $XDG_CACHE_HOME/slimserve, else ~/.cache/slimserve (as `slimserve.fetch` has it)."""
    chosen = os.environ.get("SLIMSERVE_CACHE", "").strip()
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "slimserve"


def _version(command: tuple[str, ...]) -> str | None:
    try:
        answer = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = answer.stdout.strip().splitlines()
    return lines[0] if answer.returncode == 0 and lines else None


@lru_cache(maxsize=1)
def find_compiler() -> Compiler | None:
    """$CXX, then c++, g++, clang++, then the compiler in the `ziglang` wheel; None where there is none."""
    candidates: list[tuple[str, ...]] = []
    chosen = os.environ.get("CXX", "").strip()
    if chosen:
        candidates.append(tuple(shlex.split(chosen)))
    candidates += [(name,) for name in ("c++", "g++", "clang++") if shutil.which(name)]
    if importlib.util.find_spec("ziglang") is not None:
        candidates.append((sys.executable, "-m", "ziglang", "c++"))
    for command in candidates:
        version = _version(command)
        if version is not None:
            return Compiler(command, version)
    return None


def _cpu_identity() -> str:
    """Model and instruction sets, so that a cache folder shared by different machines stays right."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = {"model name", "flags", "Features", "CPU part"}
    found = dict(
        line.split(":", 1) for line in reversed(lines) if ":" in line and line.split("\t")[0].strip() in wanted
    )
    return " ".join(f"{key.strip()}={value.strip()}" for key, value in sorted(found.items()))


def sources() -> list[Path]:
    """The translation units, those that take longest first: none of them ends alone on one core."""
    return sorted(SOURCES.glob("*.cpp"), key=lambda path: (not path.stem.startswith("kernels_"), path.stem))


def library_path(compiler: Compiler) -> Path:
    """Where the library of these sources, this compiler and this machine lies or will lie."""
    digest = hashlib.sha256()
    for path in [*sources(), *sorted(SOURCES.glob("*.h"))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for part in (*compiler.command, compiler.version, *FLAGS, *extra_flags(), _cpu_identity()):
        digest.update(part.encode() + b"\0")
    return cache_folder() / "build" / digest.hexdigest()[:24] / LIBRARY_NAME


def extra_flags() -> tuple[str, ...]:
    """Flags of $SLIMSERVE_CXXFLAGS after the fixed ones: for tests of other instruction sets."""
    return tuple(shlex.split(os.environ.get("SLIMSERVE_CXXFLAGS", "")))


def _run(command: list[str], what: str) -> None:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RefusalError(f"Compiling {what} with {command[0]} failed: {error}.") from error
    if answer.returncode != 0:
        reason = next((line for line in answer.stderr.splitlines() if "error" in line), answer.stderr[-400:]).strip()
        raise RefusalError(f"Compiling {what} with {command[0]} failed: {reason}.")


def compile_library(compiler: Compiler, target: Path, told: Callable[[int, int], None] | None = None) -> None:
    """Compile all sources, a few at a time, and put the library at `target` in one rename.

    `told` hears how many units of how many are done, one call at a time.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    flags = [*FLAGS, *extra_flags()]
    units = sources()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="tmp-") as folder:
        objects = [Path(folder) / f"{path.stem}.o" for path in units]

        def compile_unit(index: int) -> None:
            command = [*compiler.command, *flags, "-c", str(units[index]), "-o", str(objects[index])]
            _run(command, units[index].name)

        jobs = max(1, min(len(units), os.cpu_count() or 1, 8))
        with ThreadPoolExecutor(jobs) as pool:
            futures = [pool.submit(compile_unit, index) for index in range(len(units))]
            try:
                for done, future in enumerate(as_completed(futures), 1):
                    future.result()
                    if told is not None:
                        told(done, len(units))
            except RefusalError:
                pool.shutdown(cancel_futures=True)
                raise
        built = Path(folder) / LIBRARY_NAME
        _run([*compiler.command, *flags, "-shared", *map(str, objects), "-o", str(built)], LIBRARY_NAME)
        os.replace(built, target)


def _compile_aloud(compiler: Compiler, target: Path) -> None:
    """Compile and say so on stderr; a terminal sees the units counted in one line."""
    line = f"Compiling the CPU kernels with {compiler.name} (once, about a quarter of a minute)"
    if not sys.stderr.isatty():
        print(f"{line} ...", file=sys.stderr, flush=True)
        compile_library(compiler, target)
        return

    def told(done: int, units: int) -> None:
        print(f"\r{line}: {done} of {units}", end="", file=sys.stderr, flush=True)

    print(f"{line} ...", end="", file=sys.stderr, flush=True)
    try:
        compile_library(compiler, target, told)
    finally:
        print(file=sys.stderr)


def ensure_library() -> Path:
    """The library's path; builds it where it is missing.

    Raises RefusalError, with the remedy, where no compiler is found or the build fails. Processes that need it at
    the same time wait for one build under a lock.
    """
    compiler = find_compiler()
    if compiler is None:
        raise RefusalError(
            "No C++ compiler was found (looked for $CXX, c++, g++, clang++ and the ziglang wheel); "
            "install one, for example with: pip install ziglang."
        )
    target = library_path(compiler)
    outcome.library, outcome.seconds = target, None
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        outcome.library = None
        raise RefusalError(
            f"{target.parent} cannot be written ({error}); set SLIMSERVE_CACHE to a folder of yours."
        ) from error
    from filelock import FileLock

    with FileLock(str(target.parent) + ".lock", timeout=_COMPILE_SECONDS):
        if not target.exists():
            started = time.monotonic()
            try:
                _compile_aloud(compiler, target)
            except RefusalError:
                outcome.library = None
                raise
            outcome.seconds = time.monotonic() - started
    return target


def describe() -> BuildReport:
    """What would serve CPU products on this machine, without building anything."""
    compiler = find_compiler()
    if compiler is None:
        return BuildReport(
            None, None, False, "no C++ compiler: products run on slow torch references; pip install ziglang"
        )
    target = library_path(compiler)
    note = "built" if target.exists() else "will be built at first use"
    return BuildReport(f"{compiler.name} ({compiler.version})", str(target), target.exists(), note)
