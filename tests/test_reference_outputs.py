"""Real models against recorded llama.cpp output and against transformers on the decoded weights of the same files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import reference_outputs
import torch
from reference_outputs import compare, model_file, recorded_cases, teacher_forced
from tiny_models import from_gguf_file

from slimserve.ops import Activations, NumericsConfig
from slimserve.weights.loader import LoadedModel, load_model

LogProbsOf = Callable[[dict[str, Any]], torch.Tensor]

LEAST_AGREEMENT = {"qwen25-coder-0.5b": 0.99, "smollm2-135m": 0.97, "gemma3-270m": 0.98}
LARGEST_MARGIN = 0.4
"""llama.cpp rounds activations to int8: it differs from itself by up to 0.36 nat between ways to run one prompt."""
TIE = 0.01
"""Argmax margin in nats below which two float32 evaluations may differ."""


def load(profile: str, activations: Activations) -> LoadedModel:
    loaded = load_model(model_file(profile), numerics=NumericsConfig(cpu_activations=activations))
    if "reference" in " ".join(loaded.kernels.values()):
        pytest.skip("the C++ kernels are not built here; the torch references would take an hour")
    return loaded


def hold_against_record(profile: str, cases: list[dict[str, Any]], logprobs_of: LogProbsOf) -> None:
    """Print and bound how far a model that is fed the recorded tokens departs from the record."""
    steps, disagreements, difference = compare(cases, logprobs_of)
    agreed = steps - len(disagreements)
    print(f"{profile}: {agreed} of {steps} agree, mean difference of the chosen token {difference:.4f} nat")
    for entry in disagreements:
        print(f"  {entry}")
    assert agreed / steps >= LEAST_AGREEMENT[profile]
    assert all(entry.recorded_margin < LARGEST_MARGIN for entry in disagreements)
    assert difference < 0.06


@pytest.mark.parametrize("profile", reference_outputs.FILES)
def test_agrees_with_recorded_llama_cpp(profile: str) -> None:
    cases = recorded_cases(profile)
    model = load(profile, Activations.INT8).model
    hold_against_record(profile, cases, lambda case: teacher_forced(model, case, torch.float16))


@pytest.mark.gpu
def test_agrees_on_a_device() -> None:
    """SmolLM2 by the device's kernels, bf16 activations and cache, against the same record and bounds."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    profile = "smollm2-135m"
    cases = recorded_cases(profile)
    model = load_model(model_file(profile), device="cuda").model
    hold_against_record(profile, cases, lambda case: teacher_forced(model, case, torch.bfloat16, "cuda"))


QUICK_CASES = 4
"""Cases that the float32 oracle sees in every run; all of them run with -m slow."""


@pytest.mark.parametrize("profile", reference_outputs.FILES)
def test_agrees_with_transformers_in_float32(profile: str) -> None:
    short = [case for case in recorded_cases(profile) if len(case["prompt_token_ids"]) < 100]
    compare_with_transformers(profile, short[-QUICK_CASES:])


@pytest.mark.slow
@pytest.mark.parametrize("profile", reference_outputs.FILES)
def test_agrees_with_transformers_on_every_case(profile: str) -> None:
    compare_with_transformers(profile, recorded_cases(profile))


def compare_with_transformers(profile: str, cases: list[dict[str, Any]]) -> None:
    model = load(profile, Activations.FLOAT).model
    oracle = from_gguf_file(model_file(profile))
    steps, differing, worst = 0, [], 0.0
    for case in cases:
        own = teacher_forced(model, case, torch.float32)
        with torch.inference_mode():
            prompt, output = case["prompt_token_ids"], case["output_token_ids"]
            hidden = oracle.model(torch.tensor([prompt + output[:-1]])).last_hidden_state
            logits = oracle.lm_head(hidden[:, len(prompt) - 1 :])[0]
        expected = torch.log_softmax(logits.double(), dim=-1)
        worst = max(worst, float((own - expected)[expected > -12].abs().max()))
        for step in (own.argmax(-1) != expected.argmax(-1)).nonzero().flatten().tolist():
            margin = expected[step].max() - expected[step, own[step].argmax()]
            differing.append((case["name"], step, float(margin)))
        steps += len(output)
    print(f"{profile}: {len(differing)} of {steps} argmax differ {differing}; largest difference {worst:.2e} nat")
    assert steps > 0
    assert all(margin < TIE for _, _, margin in differing)
    assert worst < 1e-3
