"""Configurations as publishers ship them are read without complaint, and mean what they say."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch

from slimserve.errors import RefusalError, SlimServeError
from slimserve.layers.rotary import RopeKind, RopeSettings
from slimserve.models import gemma3, llama, qwen2
from slimserve.models.contract import CacheKind
from slimserve.models.registry import ARCHITECTURES, find_gguf, find_hf

LLAMA_31_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "vocab_size": 49152,
}
MISTRAL_7B: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN25_05B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GEMMA3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
}


def test_llama_31() -> None:
    config = llama.from_hf(LLAMA_31_8B, {})
    assert (config.head_dim, config.max_context, config.tied_head) == (128, 131072, False)
    assert config.rope.kind is RopeKind.LLAMA3
    weights = sum(torch.Size(spec.shape).numel() for spec in config.parameters())
    assert weights == 8_030_261_248


def test_smollm2() -> None:
    config = llama.from_hf(SMOLLM2, {})
    assert sum(torch.Size(spec.shape).numel() for spec in config.parameters()) == 134_515_008


def test_mistral_windows() -> None:
    (group,) = llama.from_hf(MISTRAL_7B, {}).caches(torch.bfloat16)
    assert (group.kind, group.window, len(group.layers)) == (CacheKind.WINDOW, 4096, 32)
    assert group.page_bytes() == 32 * 2 * 8 * 64 * 128 * 2
    unmentioned = {key: value for key, value in MISTRAL_7B.items() if key != "sliding_window"}
    assert llama.from_hf(unmentioned, {}).windows == (4096,) * 32
    (group,) = llama.from_hf(MISTRAL_7B | {"sliding_window": None}, {}).caches(torch.bfloat16)
    assert (group.kind, group.window) == (CacheKind.ATTENTION, None)


def test_qwen25() -> None:
    config = qwen2.from_hf(QWEN25_05B, {})
    assert set(config.windows) == {None}
    assert sum(torch.Size(spec.shape).numel() for spec in config.parameters()) == 494_032_768
    long = QWEN25_05B | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}
    assert qwen2.from_hf(long, {}).max_context == 131072
    with pytest.raises(RefusalError, match="dual_chunk_attention_config"):
        qwen2.from_hf(QWEN25_05B | {"dual_chunk_attention_config": {"chunk_size": 262144}}, {})


def test_gemma3_text_of_a_multimodal_checkpoint() -> None:
    config = gemma3.from_hf(GEMMA3_4B, {"language_model.model.embed_tokens.weight": (262208, 2560)})
    full, window = config.caches(torch.bfloat16)
    assert full.layers == (5, 11, 17, 23, 29)
    assert (window.window, len(window.layers)) == (1024, 29)
    assert (config.rope.factor, config.rope.theta, config.local_rope.theta) == (8.0, 1e6, 1e4)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    names = {spec.hf_name for spec in config.parameters()}
    assert "language_model.model.layers.33.post_feedforward_layernorm.weight" in names


def test_gemma3_sizes_in_gguf() -> None:
    keys = {
        "context_length": 131072,
        "embedding_length": 5376,
        "block_count": 62,
        "feed_forward_length": 21504,
        "attention.head_count": 32,
        "attention.head_count_kv": 16,
        "attention.key_length": 128,
        "attention.value_length": 128,
        "attention.sliding_window": 1024,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    }
    config = gemma3.from_gguf(
        {f"gemma3.{key}": value for key, value in keys.items()}, {"token_embd.weight": (262208, 5376)}
    )
    assert config.query_scalar == 168.0
    assert [layer for layer, window in enumerate(config.windows) if window is None][:2] == [5, 11]


@pytest.mark.parametrize(
    "config", [LLAMA_31_8B, SMOLLM2, MISTRAL_7B, QWEN25_05B, GEMMA3_4B], ids=["l", "s", "m", "q", "g"]
)
def test_tables_are_consistent(config: dict[str, Any]) -> None:
    architecture = find_hf(config)
    parsed = architecture.from_hf(config, {})
    names = [spec.name for spec in parsed.parameters()]
    assert len(set(names)) == len(names)
    for attribute in ("hf_name", "gguf_name"):
        used = [getattr(spec, attribute) for spec in parsed.parameters()]
        assert len(set(used)) == len(used)
    layers = sorted(layer for group in parsed.caches(torch.bfloat16) for layer in group.layers)
    assert layers == list(range(parsed.num_layers))


JUNK = (None, True, 0, -1, 3, 2**40, 1e300, float("nan"), "x", [], [1], {}, {"a": 1}, b"x", [None], {"factor": "x"})
GGUF_KEYS = {
    "block_count": 2,
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.sliding_window": 64,
    "attention.sliding_window_pattern": 3,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.scale": 0.25,
    "rope.freq_base": 1e4,
    "rope.freq_base_swa": 1e4,
    "rope.dimension_count": 16,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 2.0,
    "rope.scaling.original_context_length": 128,
    "rope.scaling.attn_factor": 1.0,
    "final_logit_softcapping": 30.0,
    "vocab_size": 131,
}


def built(config: Any) -> None:
    """Everything that is computed from a configuration before weights are read."""
    assert config.parameters() and config.caches(torch.float32)
    assert 0 < config.max_context <= 1 << 31
    for settings in (config.rope, getattr(config, "local_rope", config.rope)):
        assert settings.inverse_frequencies().shape == (settings.rotary_dim // 2,)


@pytest.mark.parametrize("config", [LLAMA_31_8B, MISTRAL_7B, QWEN25_05B, GEMMA3_4B], ids=["l", "m", "q", "g"])
def test_damaged_config_json_is_read_or_refused(config: dict[str, Any]) -> None:
    refused = 0
    small = {"num_hidden_layers": 2}
    for key in [*config, "rope_parameters", "layer_types", "head_dim", "sliding_window_pattern"]:
        for junk in JUNK:
            damaged = config | small | {key: junk}
            try:
                built(find_hf(damaged).from_hf(damaged, {}))
            except SlimServeError as error:
                assert "\n" not in str(error)
                refused += 1
    assert refused > 50
    for key in ("full_attention", "factor", "rope_type", "low_freq_factor", "original_max_position_embeddings"):
        for kind in ("llama3", "yarn", "linear", "dynamic"):
            for junk in JUNK:
                section = {"rope_type": kind, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
                damaged = config | {"rope_parameters": section | {key: junk}}
                with contextlib.suppress(SlimServeError):
                    built(find_hf(damaged).from_hf(damaged, {}))


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gemma3"])
def test_damaged_gguf_keys_are_read_or_refused(architecture: str) -> None:
    refused = 0
    shapes = {"token_embd.weight": (131, 64), "blk.0.attn_q.bias": (64,)}
    foreign = {} if architecture == "gemma3" else {"swa", "pattern", "softcapping", "attention.scale"}
    keys = {k: v for k, v in GGUF_KEYS.items() if not any(word in k for word in foreign)}
    reader = find_gguf(architecture).from_gguf
    built(reader({f"{architecture}.{key}": value for key, value in keys.items()}, shapes))
    for key in keys:
        for junk in (*JUNK, np.array([1, 2]), np.array([], dtype=np.int32), np.float32(2.0), np.uint8(7)):
            damaged = {f"{architecture}.{name}": value for name, value in (keys | {key: junk}).items()}
            try:
                built(reader(damaged, shapes))
            except SlimServeError as error:
                assert "\n" not in str(error)
                refused += 1
    assert refused > 100


def test_every_architecture_has_its_own_names() -> None:
    for attribute in ("hf_architectures", "gguf_names"):
        names = [name for entry in ARCHITECTURES for name in getattr(entry, attribute)]
        assert len(set(names)) == len(names)
    with pytest.raises(RefusalError, match="supported: "):
        find_gguf("falcon")


def test_yarn_scale_matches_its_definition() -> None:
    settings = RopeSettings(1e4, 64, RopeKind.YARN, factor=4.0, original_context=2048)
    assert settings.scale() == pytest.approx(1.1386294)
    frequencies = settings.inverse_frequencies()
    plain = RopeSettings(1e4, 64).inverse_frequencies()
    assert torch.equal(frequencies[0], plain[0])
    torch.testing.assert_close(frequencies[-1], plain[-1] / 4)
