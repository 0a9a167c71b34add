"""Building the C++ kernels: compilers in order, one atomic library per sources and machine, clear refusals."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slimserve.errors import RefusalError
from slimserve.ops.cpu import build, library

TINY = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def tiny_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of one small source in place of the kernels, and an empty cache."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "tiny.cpp").write_text(TINY)
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setenv("SLIMSERVE_CACHE", str(tmp_path / "cache"))
    return folder


def compiler_or_skip() -> build.Compiler:
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    return compiler


def test_builds_once_and_again_when_a_source_changes(tiny_sources: Path) -> None:
    compiler_or_skip()
    assert not build.describe().built
    first = build.ensure_library()
    assert ctypes.CDLL(str(first)).answer() == 42
    written = first.stat().st_mtime_ns
    assert build.ensure_library() == first
    assert first.stat().st_mtime_ns == written
    report = build.describe()
    assert report.built
    assert report.library == str(first)
    (tiny_sources / "tiny.cpp").write_text(TINY.replace("42", "43"))
    second = build.ensure_library()
    assert second.parent != first.parent
    assert ctypes.CDLL(str(second)).answer() == 43
    assert [p.name for p in second.parent.iterdir()] == [build.LIBRARY_NAME]  # nothing half-made is left


def test_progress_is_told_and_the_longest_units_start_first(
    tiny_sources: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler = compiler_or_skip()
    (tiny_sources / "kernels_one.cpp").write_text("int one() { return 1; }\n")
    assert [path.name for path in build.sources()] == ["kernels_one.cpp", "tiny.cpp"]
    told: list[tuple[int, int]] = []
    build.compile_library(compiler, build.library_path(compiler), lambda done, units: told.append((done, units)))
    assert told == [(1, 2), (2, 2)]
    (tiny_sources / "kernels_one.cpp").unlink()
    build.ensure_library()
    words = capsys.readouterr().err
    assert "Compiling the CPU kernels" in words
    assert "\r" not in words  # not a terminal


def test_a_source_that_does_not_compile_is_refused_with_the_compilers_words(tiny_sources: Path) -> None:
    compiler = compiler_or_skip()
    (tiny_sources / "tiny.cpp").write_text("int broken( {")
    with pytest.raises(RefusalError, match=r"tiny\.cpp.*error"):
        build.ensure_library()
    assert not build.library_path(compiler).exists()


def test_without_a_compiler_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build.find_compiler.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    try:
        with pytest.raises(RefusalError, match="pip install ziglang"):
            build.ensure_library()
        report = build.describe()
        assert report.compiler is None
        assert "ziglang" in report.note
    finally:
        build.find_compiler.cache_clear()


def test_cxx_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = tmp_path / "my c++"
    own.write_text("#!/bin/sh\necho my compiler 1.0\n")
    own.chmod(0o755)
    build.find_compiler.cache_clear()
    monkeypatch.setenv("CXX", f"'{own}' --flag")
    try:
        compiler = build.find_compiler()
        assert compiler == build.Compiler((str(own), "--flag"), "my compiler 1.0")
    finally:
        build.find_compiler.cache_clear()


FORKED = """
import os, torch
from slimserve.ops.cpu import library, rows
torch.set_num_threads(1)  # OpenMP, which torch uses, hangs in a forked child once its parent has used threads
library.set_threads(2)
x, w = torch.randn(64, 4096), torch.ones(4096)
want = rows.rms_norm(x, w, 1e-6)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(rows.rms_norm(x, w, 1e-6), want) else 1)
status = os.waitpid(child, 0)[1]
assert torch.equal(rows.rms_norm(x, w, 1e-6), want)
raise SystemExit(os.waitstatus_to_exitcode(status))
"""


def test_threads_survive_a_fork_and_new_counts() -> None:
    compiler_or_skip()
    before = library.load().slim_threads()
    for threads in (1, 3, 2, before):
        library.set_threads(threads)
        assert library.load().slim_threads() == threads
    source = str(Path(library.__file__).resolve().parents[3])
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=300, env={**os.environ, "PYTHONPATH": source})


TWO_BOOTS = """
import sys, time
from pathlib import Path
from slimserve.ops.cpu import build
build.SOURCES = Path(sys.argv[1])
while not Path(sys.argv[2]).exists():
    time.sleep(0.005)
build.ensure_library()
print(build.outcome.describe())
"""


def test_two_boots_at_once_build_once_and_say_who_did(tiny_sources: Path, tmp_path: Path) -> None:
    compiler_or_skip()
    source = str(Path(build.__file__).resolve().parents[3])
    command = [sys.executable, "-c", TWO_BOOTS, str(tiny_sources), str(tmp_path / "go")]
    environment = {**os.environ, "PYTHONPATH": source, "SLIMSERVE_CACHE": str(tmp_path / "cache")}
    boots = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    (tmp_path / "go").touch()
    said = sorted(boot.communicate(timeout=300)[0].strip() for boot in boots)
    assert [boot.returncode for boot in boots] == [0, 0]
    folder = build.ensure_library().parent
    assert said[0].startswith("compiled in ") and said[0].endswith(f"into {folder}"), said
    assert said[1] == f"reused from {folder}" == build.outcome.describe()
