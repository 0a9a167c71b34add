"""The loader refuses what does not fit, naming it; nothing in a file or a configuration is silently unused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file

from slimserve.errors import FormatError, RefusalError, SlimServeError, UsageError
from slimserve.weights.loader import load_model


def folder(tmp_path: Path, case: str = "llama") -> Path:
    return tiny_models.save_folder(tiny_models.build(case, num_hidden_layers=1), tmp_path)


def edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    config.update(changes)
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not Ellipsis}))


def edit_tensors(path: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(path / "model.safetensors")
    for name, value in changes.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.layers.0.mlp.up_proj.weight": None}, ["1 missing", "model.layers.0.mlp.up_proj.weight"]),
        ({"model.layers.0.mlp.extra.weight": torch.zeros(2)}, ["not part of", "mlp.extra.weight"]),
        ({"model.norm.weight": torch.zeros(65)}, ["misshaped", "model.norm.weight is 65, expected 64"]),
        ({"model.norm.weight": torch.full((64,), torch.nan)}, ["model.norm.weight holds nan at element 0"]),
        ({"model.norm.weight": torch.full((64,), torch.inf)}, ["model.norm.weight holds inf"]),
        ({"model.layers.1.input_layernorm.weight": torch.ones(64)}, ["not part of", "layers.1.input_layernorm"]),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, change: dict[str, Any], words: list[str]) -> None:
    path = folder(tmp_path)
    edit_tensors(path, **change)
    with pytest.raises(FormatError) as caught:
        load_model(path)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("case", "changes", "words"),
    [
        ("llama", {"hidden_act": "relu"}, ["hidden_act", "relu"]),
        ("llama", {"new_trick": 3}, ["new_trick = 3"]),
        ("llama", {"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "LlamaForCausalLM"]),
        ("llama", {"architectures": ..., "model_type": "rwkv"}, ["rwkv"]),
        ("llama", {"hidden_size": "64"}, ["hidden_size", "whole number"]),
        ("llama", {"hidden_size": True}, ["hidden_size"]),
        ("llama", {"num_hidden_layers": 2**62}, ["num_hidden_layers"]),
        ("llama", {"num_hidden_layers": ...}, ["has no num_hidden_layers"]),
        ("llama", {"rms_norm_eps": -1.0}, ["rms_norm_eps"]),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, ["longrope"]),
        ("llama", {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, ["spiral", "yarn"]),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ("llama", {"rope_parameters": {"rope_type": "default", "twist": 2}}, ["twist"]),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 0}}, ["factor"]),
        ("qwen2", {"layer_types": ["mamba"]}, ["mamba"]),
        ("qwen2", {"layer_types": ["full_attention"] * 2}, ["layer_types"]),
        ("gemma3", {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ("gemma3", {"hidden_activation": "gelu"}, ["hidden_activation"]),
        ("gemma3", {"attention_bias": True}, ["attention_bias"]),
        ("llama", {"quantization_config": {"quant_method": "abacus"}}, ["abacus"]),
    ],
)
def test_configurations_that_are_not_supported(
    tmp_path: Path, case: str, changes: dict[str, Any], words: list[str]
) -> None:
    path = folder(tmp_path, case)
    edit_config(path, **changes)
    with pytest.raises(SlimServeError) as caught:
        load_model(path)
    for word in words:
        assert word in str(caught.value)
    assert isinstance(caught.value, FormatError | RefusalError)


def test_old_rope_form_and_model_type_alone(tmp_path: Path) -> None:
    path = folder(tmp_path)
    edit_config(
        path,
        architectures=...,
        rope_parameters=...,
        rope_theta=5000.0,
        rope_scaling={"type": "linear", "factor": 2.0},
    )
    rope = load_model(path).config.rope
    assert (rope.theta, rope.factor, rope.kind.value) == (5000.0, 2.0, "linear")


def test_a_tied_head_that_is_stored_again_is_ignored_by_name(tmp_path: Path) -> None:
    path = folder(tmp_path, "qwen2-tied")
    edit_tensors(path, **{"lm_head.weight": torch.zeros(131, 64)})
    loaded = load_model(path)
    assert loaded.ignored == ("lm_head.weight",)


def write(path: Path, architecture: str, keys: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        else:
            writer.add_uint32(key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"llama.expert_count": 8}, ["expert_count"]),
        ({"llama.mystery": 1}, ["llama.mystery"]),
        ({"llama.rope.scaling.type": "longrope"}, ["longrope"]),
        ({"llama.rope.dimension_count": 8}, ["dimension_count 8"]),
        ({"llama.vocab_size": 130}, ["vocab_size 130", "131 rows"]),
        ({"llama.attention.head_count_kv": [1, 2]}, ["head_count_kv"]),
        ({"llama.attention.value_length": 8}, ["value_length"]),
        ({"llama.block_count": 2}, ["missing", "blk.1."]),
        ({"llama.block_count": 0}, ["block_count"]),
        ({"llama.attention.causal": False}, ["causal"]),
    ],
)
def test_gguf_keys_that_are_not_supported(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    model = tiny_models.build("llama", num_hidden_layers=1)
    architecture, keys = tiny_models.gguf_metadata(model, "llama")
    merged = {f"{architecture}.{key}": value for key, value in keys.items()} | changes
    path = write(tmp_path / "m.gguf", architecture, merged, tiny_models.gguf_tensors(model, "llama"))
    with pytest.raises(SlimServeError) as caught:
        load_model(path)
    for word in words:
        assert word in str(caught.value)


def test_unknown_gguf_architecture(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "bloom", {}, {"a": np.zeros(4, np.float32)})
    with pytest.raises(RefusalError, match=r"'bloom' is not supported; supported: gemma3, .*llama, qwen"):
        load_model(path)


def test_gguf_with_a_tensor_too_many(tmp_path: Path) -> None:
    model = tiny_models.build("llama", num_hidden_layers=1)
    architecture, keys = tiny_models.gguf_metadata(model, "llama")
    tensors = tiny_models.gguf_tensors(model, "llama") | {"blk.0.attn_qkv.weight": np.zeros((4, 4), np.float32)}
    path = write(tmp_path / "m.gguf", architecture, {f"llama.{k}": v for k, v in keys.items()}, tensors)
    with pytest.raises(FormatError, match=r"not part of this architecture: blk.0.attn_qkv.weight"):
        load_model(path)


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        load_model(tmp_path / "absent.gguf")
    with pytest.raises(UsageError, match="no model folder"):
        load_model(tmp_path)
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(UsageError, match="configuration"):
        load_model(tmp_path / "x.json")


def test_progress_and_memory_report(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    loaded = load_model(folder(tmp_path), progress=lambda done, total: seen.append((done, total)))
    total = sum(entry.num_bytes for entry in loaded.memory)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert sum(entry.num_tensors for entry in loaded.memory) == len(loaded.config.parameters())
    assert loaded.source.num_bytes == total
    assert loaded.resident_bytes >= total * 0.99


def test_fingerprint_follows_weights_and_configuration(tmp_path: Path) -> None:
    path = folder(tmp_path)
    first = load_model(path).fingerprint
    assert load_model(path).fingerprint == first
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"][3, 5] += 1.0
    save_file(tensors, path / "model.safetensors")
    second = load_model(path).fingerprint
    edit_config(path, rms_norm_eps=1e-3)
    assert len({first, second, load_model(path).fingerprint}) == 3
