"""Hybrid architectures against transformers on tiny random configurations with every layer kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_hybrids
import torch
from hybrid_driver import HybridDriver

from slimserve.ops import Activations, NumericsConfig
from slimserve.weights.loader import LoadedModel, load_model

FLOAT = NumericsConfig(cpu_activations=Activations.FLOAT)
TOLERANCE = 5e-4
"""Relative to the largest logit."""
LENGTHS = [1, 2, 3, 4, 18, 19, 20, 21, 63, 64, 65, 130, 300]
"""Around the indexer's dense limit (16 + 3), chunk boundaries, and several chunks."""


def tokens_of(seed: int, length: int) -> list[int]:
    return torch.randint(1, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def one_shot(loaded: LoadedModel, tokens: list[int]) -> torch.Tensor:
    driver = HybridDriver(loaded.model)
    return driver.step([(driver.new(), tokens)], every_logit=True)


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[tiny_hybrids.Oracle, LoadedModel]:
    oracle = tiny_hybrids.build_qwen()
    folder = tiny_hybrids.save_folder(oracle, tiny_hybrids.qwen_tensors(oracle), tmp_path_factory.mktemp("qwen"))
    return oracle, load_model(folder, numerics=FLOAT)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> tuple[tiny_hybrids.Oracle, LoadedModel]:
    oracle = tiny_hybrids.build_glm()
    folder = tiny_hybrids.save_folder(oracle, tiny_hybrids.glm_tensors(oracle), tmp_path_factory.mktemp("glm"))
    return oracle, load_model(folder, numerics=FLOAT)


@pytest.mark.parametrize("name", ["qwen", "glm"])
def test_logits_equal_transformers(name: str, request: pytest.FixtureRequest) -> None:
    oracle, loaded = request.getfixturevalue(name)
    worst = 0.0
    for length in LENGTHS:
        tokens = tokens_of(length, length)
        # Left padding on the oracle's side only where it counts pools from the first real token.
        expected = oracle.logits(tokens, padding=5 if length % 2 else 0)
        assert length == 1 or expected.std() > 0.3, "the oracle's logits must differ enough to be worth comparing"
        worst = max(worst, difference(one_shot(loaded, tokens), expected))
    print(f"{name}: largest relative difference {worst:.2e}")
    assert worst < TOLERANCE


@pytest.mark.parametrize("name", ["qwen", "glm"])
def test_any_cut_gives_the_same_bits(name: str, request: pytest.FixtureRequest) -> None:
    _, loaded = request.getfixturevalue(name)
    tokens = tokens_of(5, 150)
    expected = one_shot(loaded, tokens)
    for pieces in ([1] * 150, [63, 2, 70, 15], [16] * 9 + [6]):
        driver = HybridDriver(loaded.model)
        sequence, got, start = driver.new(), [], 0
        for size in pieces:
            got.append(driver.step([(sequence, tokens[start : start + size])], every_logit=True))
            start += size
        assert torch.equal(torch.cat(got), expected)


@pytest.mark.parametrize("name", ["qwen", "glm"])
def test_greedy_continuation(name: str, request: pytest.FixtureRequest) -> None:
    """64 greedy tokens equal, or split where the oracle's two best are within 1e-3."""
    oracle, loaded = request.getfixturevalue(name)
    prompt = tokens_of(9, 40)
    driver = HybridDriver(loaded.model)
    own = driver.greedy(prompt, 64)
    expected = oracle.logits(prompt + own[:-1])[len(prompt) - 1 :]
    for step, token in enumerate(own):
        best = expected[step].topk(2)
        if int(best.indices[0]) != token:
            margin = float(best.values[0] - expected[step, token])
            print(f"{name}: step {step} differs at a margin of {margin:.2e}")
            assert margin < 1e-3


def test_shared_indexer_layers(tmp_path: Path) -> None:
    linear, indexed = "linear_attention", "indexed_attention"
    oracle = tiny_hybrids.build_glm(
        layer_types=[linear] * 3 + [indexed] * 2 + [linear] * 2 + [indexed],
        indexer_types=["full"] * 4 + ["shared"] + ["full"] * 3,
    )
    tensors = tiny_hybrids.glm_tensors(oracle)
    assert not any("layers.4.self_attn.indexer" in name for name in tensors)
    loaded = load_model(tiny_hybrids.save_folder(oracle, tensors, tmp_path), numerics=FLOAT)
    tokens = tokens_of(3, 120)
    assert difference(one_shot(loaded, tokens), oracle.logits(tokens)) < TOLERANCE


def test_qwen_gguf_equals_folder(qwen: tuple[tiny_hybrids.Oracle, LoadedModel], tmp_path: Path) -> None:
    oracle, loaded = qwen
    from_gguf = load_model(tiny_hybrids.save_qwen_gguf(oracle, tmp_path / "tiny.gguf"), numerics=FLOAT)
    tokens = tokens_of(2, 140)
    assert difference(one_shot(from_gguf, tokens), one_shot(loaded, tokens)) < 1e-4


@pytest.mark.parametrize("form", ["glm5-next", "glm5next"])
def test_glm_gguf_equals_folder(form: str, glm: tuple[tiny_hybrids.Oracle, LoadedModel], tmp_path: Path) -> None:
    oracle, loaded = glm
    from_gguf = load_model(tiny_hybrids.save_glm_gguf(oracle, tmp_path / "tiny.gguf", form), numerics=FLOAT)
    tokens = tokens_of(2, 140)
    assert difference(one_shot(from_gguf, tokens), one_shot(loaded, tokens)) < 1e-4
