"""Whole tiny models served by the Triton kernels, in float32, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from triton_device import DEVICE, ON_DEVICE, triton_marks

from slimserve.ops import NumericsConfig, explain

pytestmark = triton_marks()
tiny_models = pytest.importorskip("tiny_models", reason="needs transformers and gguf")
from step_driver import StepDriver  # noqa: E402

from slimserve.weights.loader import load_model  # noqa: E402


@pytest.mark.usefixtures("triton_everywhere")
@pytest.mark.parametrize("case", list(tiny_models.CASES) if ON_DEVICE else ["gemma3-scaled"])
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    model = tiny_models.build(case)
    tokens = torch.randint(0, model.config.vocab_size, (150 if ON_DEVICE else 72,)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0].float()
    loaded = load_model(tiny_models.save_folder(model, tmp_path), numerics=NumericsConfig(), device=DEVICE)
    driver = StepDriver(loaded.model, device=DEVICE)
    sequence = driver.new()
    cut = len(tokens) - (5 if ON_DEVICE else 2)
    parts = [driver.step([(sequence, tokens[:cut])], every_logit=True)]
    parts += [driver.step([(sequence, tokens[i : i + 1])], every_logit=True) for i in range(cut, len(tokens))]
    got = torch.cat(parts).cpu()
    assert (got - expected).abs().max() < 2e-4
    assert loaded.model.head.weight.kernel == "triton tiles"
    rows = explain(DEVICE, kv_dtype=torch.float32)
    assert all(row.kernel.startswith("triton") for row in rows if row.op != "embedding")
