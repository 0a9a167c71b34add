"""Recorded llama.cpp outputs, and how a model agrees with them when it is fed the same tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from step_driver import StepDriver

from slimserve.fetch import model_path
from slimserve.models.contract import Model

RECORDS = Path(__file__).resolve().parents[2] / "shared" / "reference"
FILES = {
    "qwen25-coder-0.5b": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "smollm2-135m": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma3-270m": "gemma-3-270m-q4_k_m.gguf",
}


def recorded_cases(profile: str) -> list[dict[str, Any]]:
    """The recorded cases of a profile; skips the test where the records are not beside the checkout."""
    path = RECORDS / f"{profile}-llamacpp.json"
    if not path.exists():
        pytest.skip(f"recorded outputs {path.name} are not beside the checkout")
    return json.loads(path.read_text(encoding="utf-8"))


def model_file(profile: str) -> Path:
    """The real model file of a profile; skips the test where it is not in the cache."""
    path = model_path(FILES[profile])
    if not path.exists():
        pytest.skip(f"model file {path.name} is not in the cache; `make test` fetches it")
    return path


@dataclass(frozen=True)
class Disagreement:
    """A step whose argmax differs: how much the record prefers its own token (nats)."""

    case: str
    step: int
    recorded_token: int
    own_token: int
    recorded_margin: float
    own_margin: float


def teacher_forced(model: Model, case: dict[str, Any], kv_dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Log probabilities [48, V] of the steps whose tokens the record holds, from one prefill."""
    prompt, output = case["prompt_token_ids"], case["output_token_ids"]
    driver = StepDriver(model, kv_dtype=kv_dtype, num_pages=16, device=device)
    step = driver.input([(driver.new(), prompt + output[:-1])])
    with torch.inference_mode():
        hidden = model(step, driver.caches)
        logits = model.logits(hidden[len(prompt) - 1 :].contiguous())
    return torch.log_softmax(logits.double(), dim=-1).cpu()


def compare(
    cases: list[dict[str, Any]], logprobs_of: Callable[[dict[str, Any]], torch.Tensor]
) -> tuple[int, list[Disagreement], float]:
    """(steps, disagreements, mean absolute difference of the chosen token's log probability)."""
    disagreements: list[Disagreement] = []
    steps, difference = 0, 0.0
    for case in cases:
        logprobs = logprobs_of(case)
        for step, (token, entries) in enumerate(zip(case["output_token_ids"], case["top_logprobs"], strict=True)):
            steps += 1
            recorded = {entry["id"]: entry["logprob"] for entry in entries}
            difference += abs(float(logprobs[step, token]) - recorded[token])
            own = int(logprobs[step].argmax())
            if own != token:
                margin = recorded[token] - recorded.get(own, min(recorded.values()))
                own_margin = float(logprobs[step, own] - logprobs[step, token])
                disagreements.append(Disagreement(case["name"], step, token, own, margin, own_margin))
    return steps, disagreements, difference / steps
