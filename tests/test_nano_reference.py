"""The trained nano checkpoints against transformers' recorded output, and needles that only a working cache finds."""

from __future__ import annotations

from pathlib import Path

import nano_models
import pytest
import torch
from hybrid_driver import HybridDriver
from nano_models import GLM, QWEN

from slimserve import ops
from slimserve.ops import Activations, NumericsConfig
from slimserve.weights.loader import LoadedModel, load_model
from slimserve.weights.tokenizer import Tokenizer

FLOAT = NumericsConfig(cpu_activations=Activations.FLOAT)
NEAR_TIE = 1e-3
"""Nats between the oracle's two best, below which either may win."""
CARD = {QWEN: {256: 0.75, 1024: 0.65, 2048: 0.55, 4096: 0.70}, GLM: {256: 0.60, 1024: 0.50, 2048: 0.50, 4096: 0.50}}
"""Needle recall of the model cards. GLM at 4,096 tokens was not measured there; it is held to its 2,048 figure."""
TRIALS = {256: 6, 1024: 4, 2048: 3, 4096: 3}
SLOW_TRIALS = 20
PACKAGED_AGREEMENT = {QWEN: 1.0, GLM: 0.88}
"""Share of recorded tokens that the shipped form prefers; the quantized GLM file was measured at 352 of 384 (0.917)."""


@pytest.fixture(scope="module")
def models() -> dict[Path, LoadedModel]:
    return {}


def load(path: Path, models: dict[Path, LoadedModel]) -> LoadedModel:
    if path not in models:
        models[path] = load_model(path, numerics=FLOAT)
    return models[path]


def logits_of(loaded: LoadedModel, tokens: list[int]) -> torch.Tensor:
    blocks = len(tokens) // 64 + 4
    driver = HybridDriver(loaded.model, num_pages=blocks, num_slots=blocks, num_open=3)
    return driver.step([(driver.new(), tokens)], every_logit=True)


def agreement(loaded: LoadedModel, name: str) -> tuple[int, int, float, float]:
    """(recorded tokens preferred, recorded tokens, largest margin elsewhere, largest log probability difference)."""
    equal = total = 0
    margin = apart = 0.0
    for case in nano_models.reference(name):
        prompt, output = case["prompt_ids"], case["greedy_ids"]
        scores = torch.log_softmax(logits_of(loaded, prompt + output[:-1])[len(prompt) - 1 :], dim=-1)
        for row, token, top in zip(scores, output, case["top5_logprobs"], strict=True):
            total += 1
            equal += int(row.argmax()) == token
            if int(row.argmax()) != token:
                margin = max(margin, top[0][1] - dict(top).get(int(row.argmax()), top[-1][1]))
            apart = max(apart, *(abs(float(row[int(t)]) - value) for t, value in top))
    return equal, total, margin, apart


@pytest.mark.parametrize("name", [QWEN, GLM])
def test_recorded_tokens_teacher_forced(name: str, models: dict[Path, LoadedModel]) -> None:
    """Every recorded token is the argmax in float32 outside near ties, and the five best have their probabilities."""
    equal, total, margin, apart = agreement(load(nano_models.whole(name), models), name)
    print(f"{name}: {equal} of {total}, margin elsewhere {margin:.5f}, top five within {apart:.5f} nat")
    assert total == 384
    assert margin < NEAR_TIE, "a recorded token lost where the oracle was sure"
    assert apart < 5e-3


@pytest.mark.parametrize("name", [QWEN, GLM])
def test_packaged_form(name: str, models: dict[Path, LoadedModel]) -> None:
    """What ships agrees as well as its README says."""
    equal, total, margin, apart = agreement(load(nano_models.packaged(name), models), name)
    print(f"{name} as packaged: {equal} of {total}, margin elsewhere {margin:.3f}, top five within {apart:.3f} nat")
    assert equal >= PACKAGED_AGREEMENT[name] * total


def test_greedy_continuation_decodes_the_recorded_tokens(models: dict[Path, LoadedModel]) -> None:
    """Token by token through the caches, not teacher-forced: 48 tokens of a prompt beyond the dense limit."""
    for name in (QWEN, GLM):
        loaded = load(nano_models.whole(name), models)
        case = next(case for case in nano_models.reference(name) if case["kind"] == "chat_needle")
        assert len(case["prompt_ids"]) > 256 + 3, "the prompt must reach the indexer's selection"
        driver = HybridDriver(loaded.model)
        assert driver.greedy(case["prompt_ids"], 48) == case["greedy_ids"]


def filler_of(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(nano_models.documentation()[:120_000])


@torch.inference_mode()
def finds(loaded: LoadedModel, tokenizer: Tokenizer, needle: nano_models.Needle) -> bool:
    driver = HybridDriver(
        loaded.model, num_pages=len(needle.prompt) // 64 + 4, num_slots=len(needle.prompt) // 64 + 4, num_open=3
    )
    return tokenizer.decode(driver.greedy(needle.prompt, len(needle.code))) == needle.code


def recall(name: str, loaded: LoadedModel, length: int, trials: int) -> float:
    if length > 1024 and nano_models.is_reference(loaded):
        pytest.skip("the C++ kernels are not built here; the torch references would take minutes")
    tokenizer = nano_models.tokenizer_of(loaded.source.path)
    filler = filler_of(tokenizer)
    needles = [nano_models.needle(tokenizer, filler, length, seed) for seed in range(trials)]
    assert all(len(needle.prompt) == length for needle in needles)
    found = [finds(loaded, tokenizer, needle) for needle in needles]
    missed = [f"{needle.depth:.2f}" for needle, hit in zip(needles, found, strict=True) if not hit]
    print(f"{name}, {length} tokens: {sum(found)} of {trials} needles found, missed at depths {missed}")
    return sum(found) / trials


@pytest.mark.parametrize("length", TRIALS)
@pytest.mark.parametrize("name", [QWEN, GLM])
def test_needles(name: str, length: int, models: dict[Path, LoadedModel]) -> None:
    loaded = load(nano_models.any_form(name), models)
    assert recall(name, loaded, length, TRIALS[length]) >= CARD[name][length]


@pytest.mark.slow
@pytest.mark.parametrize("length", TRIALS)
@pytest.mark.parametrize("form", ["whole", "packaged"])
@pytest.mark.parametrize("name", [QWEN, GLM])
def test_many_needles(name: str, form: str, length: int, models: dict[Path, LoadedModel]) -> None:
    loaded = load(getattr(nano_models, form)(name), models)
    assert recall(name, loaded, length, SLOW_TRIALS) >= CARD[name][length]


def newest_pools(queries, head_weights, pages, block_table, row_offsets, start_positions, *, top_pools, **_):  # type: ignore[no-untyped-def]
    """A wrong selection: the pools that were completed last."""
    ends = [start + torch.arange(n) for start, n in zip(start_positions, row_offsets.diff(), strict=True)]
    visible = (torch.cat(ends) + 1) // (64 // pages.shape[1])
    index = torch.arange(top_pools)[None] + (visible - top_pools).clamp(min=0)[:, None]
    return torch.where(index < visible[:, None], index, -1).to(torch.int32)


def test_the_indexers_choice_is_what_the_recorded_output_needs(
    models: dict[Path, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control of the comparison above: with other pools the recorded probabilities beyond 259 tokens are missed."""
    loaded = load(nano_models.whole(GLM), models)
    monkeypatch.setattr(ops, "select_pools", newest_pools)
    for case in nano_models.reference(GLM):
        prompt, output = case["prompt_ids"], case["greedy_ids"]
        scores = torch.log_softmax(logits_of(loaded, prompt + output[:-1])[len(prompt) - 1 :], dim=-1)
        pairs = zip(scores, case["top5_logprobs"], strict=True)
        apart = max(abs(float(row[int(t)]) - value) for row, top in pairs for t, value in top)
        beyond = len(prompt) + len(output) - 1 > 256 + 3  # what is selected without scoring
        assert apart > 0.05 if beyond else apart < 5e-3, f"{case['kind']}: {apart:.4f}"


@pytest.mark.parametrize("length", [640, pytest.param(4096, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [QWEN, GLM])
def test_long_text_equals_transformers(name: str, length: int, models: dict[Path, LoadedModel]) -> None:
    """Every position's five best against the oracle itself, far beyond what is always selected."""
    transformers = pytest.importorskip("transformers", reason="the oracle is not installed")
    folder = nano_models.whole(name)
    kind = {QWEN: "Qwen3_5ForConditionalGeneration", GLM: "Glm5NextForConditionalGeneration"}[name]
    if not (folder / "model.safetensors.index.json").exists():
        pytest.skip("the oracle's class needs the checkpoint with its vision placeholder")
    loaded = load(folder, models)
    tokens = filler_of(nano_models.tokenizer_of(folder))[3000 : 3000 + length]
    oracle = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        expected = torch.log_softmax(oracle.eval()(input_ids=torch.tensor([tokens])).logits[0].float(), dim=-1)
    got = torch.log_softmax(logits_of(loaded, tokens), dim=-1)
    best = expected.topk(5, dim=-1)
    apart = (got.gather(1, best.indices) - best.values).abs().max(dim=1).values
    sure = best.values[:, 0] - best.values[:, 1] > NEAR_TIE
    print(f"{name}, {length} tokens: top five within {float(apart.max()):.2e} nat, near ties {int((~sure).sum())}")
    assert torch.equal(got.argmax(-1)[sure], best.indices[:, 0][sure])
    assert float(apart.max()) < 1e-3
