"""Dense architectures against transformers on tiny random configurations, from both containers."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models
import torch
from step_driver import StepDriver

from slimserve.ops import Activations, NumericsConfig
from slimserve.weights.loader import LoadedModel, load_model

FLOAT = NumericsConfig(cpu_activations=Activations.FLOAT)
LENGTH = 150
"""Tokens of the oracle prompt: three pages, past every window of the cases."""
TOLERANCE = 2e-4
WITHOUT_GGUF = {
    "qwen2-sliding": "GGUF has no key for windows on some layers of Qwen2",
    "llama-dynamic": "GGUF has no dynamic scaling",
}


def prompt(seed: int, vocab_size: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (LENGTH,), generator=generator).tolist()


def oracle_logits(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float()


def load(path: Path) -> LoadedModel:
    return load_model(path, numerics=FLOAT)


def one_shot(loaded: LoadedModel, tokens: list[int]) -> torch.Tensor:
    driver = StepDriver(loaded.model)
    return driver.step([(driver.new(), tokens)], every_logit=True)


def in_pieces(loaded: LoadedModel, tokens: list[int], pieces: list[int]) -> torch.Tensor:
    driver = StepDriver(loaded.model)
    sequence, out, start = driver.new(), [], 0
    for size in pieces:
        out.append(driver.step([(sequence, tokens[start : start + size])], every_logit=True))
        start += size
    assert start == len(tokens)
    return torch.cat(out)


@pytest.mark.parametrize("case", tiny_models.CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    model = tiny_models.build(case)
    loaded = load(tiny_models.save_folder(model, tmp_path))
    tokens = prompt(1, model.config.vocab_size)
    expected = oracle_logits(model, tokens)
    assert expected.std() > 0.5, "the oracle's logits must differ enough to be worth comparing"
    got = one_shot(loaded, tokens)
    assert (got - expected).abs().max() < TOLERANCE
    token_by_token = in_pieces(loaded, tokens, [1] * LENGTH)
    assert torch.equal(token_by_token, got)
    assert torch.equal(in_pieces(loaded, tokens, [63, 2, 70, 15]), got)


@pytest.mark.parametrize("case", [case for case in tiny_models.CASES if case not in WITHOUT_GGUF])
def test_both_containers_agree(case: str, tmp_path: Path) -> None:
    model = tiny_models.build(case)
    from_folder = load(tiny_models.save_folder(model, tmp_path / "folder", shards=True))
    from_gguf = load(tiny_models.save_gguf(model, case, tmp_path / "model.gguf"))
    tokens = prompt(2, model.config.vocab_size)
    a, b = one_shot(from_folder, tokens), one_shot(from_gguf, tokens)
    # The same float32 weights lie at other addresses, and the reference product may sum by alignment.
    assert (a - b).abs().max() < 1e-4
    assert from_folder.fingerprint != from_gguf.fingerprint


@pytest.mark.parametrize("case", ["llama", "llama-biases", "gemma3"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_packed_rows_are_reordered_exactly(case: str, kind: str, tmp_path: Path) -> None:
    model = tiny_models.build(case)
    path = tiny_models.save_gguf(model, case, tmp_path / "model.gguf", quantize=kind)
    loaded = load(path)
    with torch.no_grad():
        rounded = {}
        for name, value in model.state_dict().items():
            if value.dim() == 2 and ".layers." in name:
                rounded[name] = torch.from_numpy(_round_trip(value.numpy(), kind))
        model.load_state_dict(rounded, strict=False)
    tokens = prompt(3, model.config.vocab_size)
    assert (one_shot(loaded, tokens) - oracle_logits(model, tokens)).abs().max() < TOLERANCE
    assert {entry.format for entry in loaded.memory if entry.role.value == "linear"} == {kind}


def _round_trip(array, kind: str):  # type: ignore[no-untyped-def]
    import gguf

    quantization = gguf.GGMLQuantizationType[kind]
    return gguf.quants.dequantize(gguf.quants.quantize(array, quantization), quantization)


def test_rows_stand_alone(tmp_path: Path) -> None:
    model = tiny_models.build("gemma3")
    loaded = load(tiny_models.save_folder(model, tmp_path))
    prompts = [prompt(seed, 131)[: 20 + 17 * seed] for seed in range(6)]
    driver = StepDriver(loaded.model, num_pages=96)
    alone = [one_shot(loaded, tokens)[-1] for tokens in prompts]
    together = driver.step([(driver.new(), tokens) for tokens in prompts])
    for index, logits in enumerate(alone):
        assert torch.equal(together[index], logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_files_stay_as_they_are(dtype: torch.dtype, tmp_path: Path) -> None:
    loaded = load(tiny_models.save_folder(tiny_models.build("qwen2-tied").to(dtype), tmp_path))
    oracle = tiny_models.build("qwen2-tied")
    oracle.load_state_dict({name: value.to(dtype).float() for name, value in oracle.state_dict().items()})
    tokens = prompt(4, oracle.config.vocab_size)
    assert (one_shot(loaded, tokens) - oracle_logits(oracle, tokens)).abs().max() < TOLERANCE
    stored = {entry.role.value: entry.format for entry in loaded.memory}
    assert stored["linear"] == stored["embedding"] == {torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    assert stored["norm"] == "F32"


@pytest.mark.parametrize("case", ["llama-biases", "gemma3-scaled"])
def test_bfloat16_activations(case: str, tmp_path: Path) -> None:
    model = tiny_models.build(case)
    folder = tiny_models.save_folder(model, tmp_path)
    loaded = load_model(folder, numerics=NumericsConfig(activation_dtype=torch.bfloat16))
    tokens = prompt(6, model.config.vocab_size)
    expected = oracle_logits(model, tokens)
    whole, pieces = one_shot(loaded, tokens), in_pieces(loaded, tokens, [1, 64, 5, 80])
    assert whole.dtype is torch.float32
    assert torch.equal(whole, pieces)
    error = (whole - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.05, "bfloat16 rounds, and no more than that"
