"""`slimserve debug parity`: small errors where kernels are right, and the layer's name where one is not."""

from __future__ import annotations

import json
from pathlib import Path

import nano_models
import pytest
from nano_models import GLM, QWEN

from slimserve.cli.main import main
from slimserve.errors import UsageError
from slimserve.measure.parity import Side, TracedModel, compare_traces, default_tokens, parity, reference_of
from slimserve.ops.registry import entries, references_only


@pytest.mark.parametrize("name", [QWEN, GLM])
def test_serving_kernels_against_references(name: str) -> None:
    candidate = Side(nano_models.any_form(name))
    report = parity(candidate, reference_of(candidate), 96)
    assert [row.layer for row in report.rows] == [*(f"layer {i}" for i in range(8)), "norm", "logits"]
    assert max(row.largest for row in report.rows) < 1e-4
    assert report.argmax_equal == report.tokens == 96 and report.divergence < 1e-8
    assert report.recorded is not None and report.recorded.total == 384
    assert report.recorded.equal >= (384 if name == QWEN else 340)


def test_references_alone_serve_inside_the_context() -> None:
    before = entries("cpu")
    with references_only():
        assert {entry.name for entry in entries("cpu")} == {"torch reference"}
    assert entries("cpu") == before


def test_the_first_layer_at_fault_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TracedModel(Side(nano_models.any_form(QWEN)))
    tokens = default_tokens(model.loaded, 40)
    whole = model.trace(tokens)
    same, equal, margin, divergence = compare_traces(model.trace(tokens), whole)
    assert all(row.largest == 0.0 for row in same) and (equal, margin, divergence) == (40, 0.0, 0.0)
    layer = model.loaded.model.layers[5]
    mlp = layer.mlp
    monkeypatch.setattr(layer, "mlp", lambda x: 1.01 * mlp(x))
    rows, _, _, divergence = compare_traces(model.trace(tokens), whole)
    assert [row.relative > 1e-4 for row in rows] == [False] * 5 + [True] * 5
    assert divergence > 0


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = nano_models.any_form(QWEN)
    arguments = ["debug", "parity", str(path), "--tokens", "24", "--against", str(path), "--kv-dtype", "bf16", "--json"]
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tokens"] == 24 and 0 < report["rows"][3]["relative"] < 0.02
    assert main(["debug", "parity", str(path), "--kv-dtype", "int4"]) == 2
    assert "--kv-dtype 'int4' is not one of bf16, fp16, fp8, float32" in capsys.readouterr().err
    with pytest.raises(UsageError, match="exceed the model's context"):
        TracedModel(Side(path)).trace([5] * 40_000)
