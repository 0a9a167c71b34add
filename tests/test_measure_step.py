"""Step and kernel measurements: every kernel has a family, times add up, figures are checked, flags say no."""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch

from slimserve.cli import main as cli_main
from slimserve.measure.families import (
    _BY_MODULE,
    EXPERTS,
    FAMILIES,
    HEAD,
    OTHER,
    PRODUCTS,
    UNTIMED,
    family_of_kernel,
    floor_of_families,
    merged,
    order,
)
from slimserve.measure.kernel_bench import matrices_of
from slimserve.measure.kernels_sequence import geometry_of
from slimserve.measure.overhead import overhead_lines, overhead_report
from slimserve.ops.cpu import library
from slimserve.plan.floor import step_floor
from slimserve.profiles.registry import find_record
from slimserve.profiles.resolve import describe_record


def test_every_kernel_of_this_build_has_one_family() -> None:
    named = [*(name for family in FAMILIES for name in family.cpu), *UNTIMED]
    assert len(named) == len(set(named))
    # An entry point that no family names is timed as OTHER; one that is gone must leave its family.
    assert set(named) <= {name.removeprefix("slim_") for name in library.SIGNATURES}
    kernels = [name for family in FAMILIES for name in family.cuda]
    assert len(kernels) == len(set(kernels))
    jit = pytest.importorskip("triton.runtime.jit")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    package = importlib.import_module("slimserve.ops.triton")
    assert {"attention", "linear", "rows"} < {module.name for module in pkgutil.iter_modules(package.__path__)}
    for module in pkgutil.iter_modules(package.__path__):
        if module.name not in _BY_MODULE:
            continue
        members = vars(importlib.import_module(f"{package.__name__}.{module.name}"))
        launched = (jit.JITFunction, interpreter.InterpretedFunction)
        found = [n for n, value in members.items() if isinstance(value, launched) and n.endswith("_kernel")]
        assert [name for name in found if family_of_kernel(name) == OTHER] == []
    assert family_of_kernel("_attention_kernel") == "attention" and family_of_kernel("_route_kernel") != OTHER
    assert family_of_kernel("void at::native::sort") == OTHER


@pytest.mark.parametrize("name", ["qwen25-coder-0.5b", "gemma3-270m", "nano-glm5-next", "glm53f-q2-1"])
def test_families_hold_every_byte_of_the_floor(name: str) -> None:
    description = describe_record(find_record(name))
    floor = step_floor(description, 4, context=700, bandwidth=1e11)
    found = floor_of_families(floor, description, torch.bfloat16)
    assert OTHER not in found
    assert sum(found.values()) == pytest.approx(floor.num_bytes)
    together = merged(found)
    assert sum(together.values()) == pytest.approx(floor.num_bytes)
    assert HEAD not in together and EXPERTS not in together and together[PRODUCTS] > found[HEAD]
    assert order([OTHER, *found])[-1] == OTHER


def test_matrices_and_heads_of_a_model() -> None:
    description = describe_record(find_record("qwen25-coder-0.5b"))
    matrices = matrices_of(description)
    held = sum(m.count * m.shape[0] * m.shape[1] for m in matrices)
    assert held == sum(w.shape[0] * w.shape[1] for w in description.weights if w.family in ("linear", "head"))
    [heads] = geometry_of("", description, torch.float16).heads
    assert (heads.query, heads.key, heads.width, heads.count, heads.window) == (14, 2, 64, 24, None)
    windows = {h.window for h in geometry_of("", describe_record(find_record("gemma3-270m")), torch.float16).heads}
    assert windows == {None, 512}
    hybrid = geometry_of("", describe_record(find_record("qwen35-4b")), torch.bfloat16)
    [recurrent] = hybrid.recurrent
    assert (recurrent.key_heads, recurrent.heads, recurrent.per_channel, recurrent.count) == (16, 32, False, 24)
    assert (recurrent.channels, recurrent.taps, hybrid.sparse) == (8192, 4, ())
    glm = geometry_of("", describe_record(find_record("glm53f-q2-1")), torch.bfloat16)
    [sparse] = glm.sparse
    assert (sparse.heads, sparse.dim, sparse.index_heads, sparse.index_dim) == (64, 512, 32, 128)
    assert (sparse.top_pools, sparse.pool, sparse.count) == (512, 4, 11)
    assert glm.heads == () and glm.recurrent[0].per_channel and glm.recurrent[0].heads == 64
    assert any("of 288 experts" in m.what for m in matrices_of(describe_record(find_record("glm53f-q2-1"))))


def run(arguments: list[str], out: Path) -> dict[str, Any]:
    assert cli_main.main(["bench", *arguments, "--out", str(out)]) == 0
    report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return report


@pytest.mark.parametrize("name", ["nano-qwen3_5", "nano-glm5-next"])
def test_a_step_and_where_its_time_goes(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(["step", name, "--streams", "1,3", "--context", "70", "--steps", "8", "--trace"], tmp_path / "step")
    assert [row["streams"] for row in report["rows"]] == [1, 3]
    for row in report["rows"]:
        trace = row["trace"]
        assert row["floor_ms"] > 0 and row["step_ms"]["count"] >= 8
        assert 0 < trace["kernels_us"] <= trace["wall_us"]
        assert trace["kernels_us"] + trace["outside_us"] == pytest.approx(trace["wall_us"])
        families = {family["name"]: family for family in trace["families"]}
        assert families["recurrent state"]["calls"] > 0 and families["sampling"]["calls"] == 1
        assert families["output head"]["calls"] == 1 and families["matrix products"]["microseconds"] > 0
        assert sum(f["floor_bytes"] for f in families.values()) == pytest.approx(row["floor_bytes"])
        assert (families["experts"]["calls"] > 0) if "glm" in name else ("experts" not in families)
    printed = capsys.readouterr().out
    assert "outside kernels" in printed and "us floor" in printed
    # The library is as it was: nothing is timed any more.
    assert "slim_linear" not in vars(library.load()) or library.load().slim_linear.__class__.__name__ == "_FuncPtr"


def test_kernels_of_a_profile_are_checked_against_float64(tmp_path: Path) -> None:
    report = run(["kernels", "nano-qwen3_5", "--rows", "1,3", "--context", "130"], tmp_path / "kernels")
    assert report["weights"] == "synthetic weights" and report["copy_bytes_per_second"] > 0
    assert all(f["microseconds"] > 0 and f["error"] < 2e-2 for f in report["figures"])
    assert {f["family"] for f in report["figures"]} == {"products", "attention", "delta-rule", "convolution"}
    assert all(f["count"] > 0 and f["agrees"] for f in report["figures"])
    assert set(report["step_microseconds"]) == {"1", "3"}


def test_the_engine_alone() -> None:
    report = overhead_report((2,), 64, num_steps=5, repeats=2)
    [row] = report["rows"]
    parts = row["plan"] + row["inputs_and_sampling"] + row["commit"]
    assert row["rows"] == 2 and parts == pytest.approx(row["microseconds"]) and row["lowest"] <= row["highest"]
    assert "2 rows, 64 tokens" in overhead_lines(report)[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["step"], "name a profile"),
        (["step", "nano-qwen3_5", "--null-model"], "takes neither"),
        (["step", "nano-qwen3_5", "--weights", "real"], "the only value is synthetic"),
        (["step", "nano-qwen3_5", "--streams", "0"], "at least 1"),
        (["kernels", "nano-qwen3_5", "--formats", "Q4_K"], "--formats is for runs without a profile"),
        (["kernels", "--formats", "Q9_K"], "'Q9_K' is not a known storage format"),
        (["kernels", "--sweep", "--device", "cpu"], "about a GPU's kernels"),
        (["kernels", "--kv-dtype", "q8", "--device", "cpu"], "'q8' is not known; there are bf16, fp16 and fp8"),
        (["kernels", "--families", "attention,mlp"], "must be some of products, attention, latent"),
        (["kernels", "smollm2-135m", "--families", "latent", "--device", "cpu"], "has nothing of latent to time"),
        (["kernels", "nano-qwen3_5", "--tiny"], "--tiny is for runs without a profile"),
        (["kernels", "--device", "cuda:7"], "torch sees"),
    ],
)
def test_wrong_use_is_one_sentence(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["bench", *arguments]) == 2
    said = capsys.readouterr().err.strip()
    assert words in said and said.count("\n") == 0
