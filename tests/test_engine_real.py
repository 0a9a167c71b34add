"""The engine with real architectures: its greedy tokens are the step driver's, whatever the budget and the company."""

from __future__ import annotations

from pathlib import Path

import pytest
import reference_outputs
import tiny_models
import torch
from step_driver import StepDriver

from slimserve.engine.config import CacheConfig, CacheDtype, EngineConfig, SchedulerConfig
from slimserve.engine.loop import Engine
from slimserve.engine.request import Request, SamplingParams
from slimserve.weights.loader import LoadedModel, load_model


def engine_of(loaded: LoadedModel, *, token_budget: int, max_sequences: int = 8, max_context: int = 256) -> Engine:
    config = EngineConfig(
        cache=CacheConfig(dtype=CacheDtype.BF16),
        scheduler=SchedulerConfig(
            max_sequences=max_sequences,
            max_context=max_context,
            token_budget=token_budget,
            mixed_prefill_budget=min(token_budget, 256),
        ),
        numerics=loaded.numerics,
    )
    return Engine(loaded.model, config)


def run(engine: Engine, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens of all prompts, submitted together."""
    for index, prompt in enumerate(prompts):
        request = Request(f"r{index}", list(prompt), SamplingParams(temperature=0.0), max_tokens=count, ignore_eos=True)
        engine.submit(request)
    out: dict[str, list[int]] = {f"r{index}": [] for index in range(len(prompts))}
    finished = set()
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            out[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                assert output.request_id not in finished
                finished.add(output.request_id)
        engine.audit()
    assert len(finished) == len(prompts)
    return [out[f"r{index}"] for index in range(len(prompts))]


@pytest.mark.parametrize("case", ["qwen2", "llama-yarn", "mistral-sliding", "gemma3"])
@pytest.mark.parametrize("token_budget", [16, 64, 512])
def test_tiny_models_through_the_engine(case: str, token_budget: int, tmp_path: Path) -> None:
    loaded = load_model(tiny_models.save_folder(tiny_models.build(case), tmp_path))
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 131, (size,), generator=generator).tolist() for size in (3, 64, 100, 129)]
    expected = [StepDriver(loaded.model, kv_dtype=torch.bfloat16).greedy(prompt, 12) for prompt in prompts]
    engine = engine_of(loaded, token_budget=token_budget)
    assert run(engine, prompts, 12) == expected
    assert run(engine, prompts[::-1], 12) == expected[::-1], "a prefix hit changed tokens"


def test_a_real_model_through_the_engine() -> None:
    cases = reference_outputs.recorded_cases("smollm2-135m")
    loaded = load_model(reference_outputs.model_file("smollm2-135m"))
    if "reference" in " ".join(loaded.kernels.values()):
        pytest.skip("the C++ kernels are not built here; the torch references would take minutes")
    prompts = [case["prompt_token_ids"] for case in cases if len(case["prompt_token_ids"]) < 100][:4]
    expected = [StepDriver(loaded.model, kv_dtype=torch.bfloat16).greedy(prompt, 24) for prompt in prompts]
    assert run(engine_of(loaded, token_budget=64), prompts, 24) == expected
    recorded = [case["output_token_ids"][:24] for case in cases if len(case["prompt_token_ids"]) < 100][:4]
    agreeing = sum(own[:4] == other[:4] for own, other in zip(expected, recorded, strict=True))
    assert agreeing >= 2, "greedy text starts differently from llama.cpp's in most cases"
