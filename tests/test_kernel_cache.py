"""Compiled device kernels: one folder of the cache, told apart by source and device, safe under two boots at once."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slimserve.ops import compiled

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

BOOT = """
import json, os, sys, time
from pathlib import Path
from slimserve.ops import compiled
from slimserve.ops.triton import rows
import triton
from triton.backends.compiler import GPUTarget
while not Path(sys.argv[1]).exists():
    time.sleep(0.005)
def compile_for(architecture, block):
    signature = {"x_ptr": "*bf16", "y_ptr": "*bf16", "width": "i32", "limit": "fp32"}
    constants = {"CLAMP": False, "GELU": False, "BLOCK": block}
    names = rows._gated_kernel.arg_names
    source = triton.compiler.ASTSource(
        rows._gated_kernel, {name: signature.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
    )
    triton.compile(source, target=GPUTarget("cuda", architecture, 32))
compile_for(90, 128)
compile_for(90, 256)
compile_for(80, 128)
counts = compiled.counts
print(json.dumps([counts.compiled, counts.reused, counts.describe(), os.environ[compiled.FOLDER_VARIABLE]]))
"""


def boots(count: int, go: Path, **variables: str) -> list[list[Any]]:
    """What `count` processes say that compile the same three kernels at the same time."""
    source = str(Path(compiled.__file__).resolve().parents[2])
    plain = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", compiled.FOLDER_VARIABLE)}
    environment = {**plain, "PYTHONPATH": source, **variables}
    command = [sys.executable, "-c", BOOT, str(go)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(count)]
    go.touch()
    said = [process.communicate(timeout=300)[0] for process in running]
    assert [process.returncode for process in running] == [0] * count
    return [json.loads(text) for text in said]


def test_a_second_boot_compiles_nothing_and_says_so(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    folder = cache / "triton"
    for done, reused, words, chosen in boots(2, tmp_path / "go", SLIMSERVE_CACHE=str(cache)):
        # Sources, sizes and architectures are told apart; of two boots at once either may find the other's kernels.
        assert done + reused == 3 and chosen == str(folder)
        assert words.endswith(f"{reused} reused from {folder}")
    kernels = list(folder.glob("*/*.cubin"))
    assert len({path.parent for path in kernels}) == 3
    assert not list(folder.glob("**/tmp.*")), "nothing half-written is left"
    [(done, reused, words, _)] = boots(1, tmp_path / "go", SLIMSERVE_CACHE=str(cache))
    assert (done, reused) == (0, 3) and words == f"0 compiled, 3 reused from {folder}"


def test_the_folder_that_triton_was_told_is_kept(tmp_path: Path) -> None:
    own = tmp_path / "own"
    variables = {"SLIMSERVE_CACHE": str(tmp_path / "cache"), compiled.FOLDER_VARIABLE: str(own)}
    [(done, _, words, chosen)] = boots(1, tmp_path / "go", **variables)
    assert done == 3 and chosen == str(own) and str(own) in words
    assert list(own.glob("*/*.cubin")) and not (tmp_path / "cache" / "triton").exists()
