"""The CPU kernels give the same bits whatever instructions they are built for.

So evidence of one machine holds on others.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slimserve.ops.cpu.build import find_compiler

# Without vector instructions where the compiler would take them by itself; other processors have the plain build.
PLAIN = ("-march=x86-64 " if platform.machine() in ("x86_64", "AMD64") else "") + "-O1 -DSLIM_LANES="


def digests(flags: str, tmp_path: Path | None) -> dict[str, Any]:
    """Of a process whose kernels are built with `flags`, in a cache of its own where one is named."""
    environment = {**os.environ, "SLIMSERVE_CXXFLAGS": flags}
    if tmp_path is not None:
        environment["SLIMSERVE_CACHE"] = str(tmp_path)
    script = Path(__file__).with_name("cpu_digests.py")
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_builds_with_other_vectors_give_the_same_bits(tmp_path: Path) -> None:
    if find_compiler() is None:
        pytest.skip("no C++ compiler on this machine")
    native = digests("", None)
    lanes = 8 if "512" in native["instruction_set"] else 16  # as the other kind of machine has them
    plain = digests(f"{PLAIN}{lanes}", tmp_path)
    assert plain["instruction_set"] == "portable"
    different = {name for name, value in native["digests"].items() if plain["digests"][name] != value}
    print(f"{native['instruction_set']}, plain {lanes}: {len(native['digests'])} digests, {len(different)} differ")
    assert not different
    assert len(set(native["digests"].values())) > 60, "digests tell outputs apart"
