"""The Llama family (arXiv:2302.13971, 2407.21783): Llama 1-3, Mistral 7B (arXiv:2310.06825), SmolLM2.

GGUF files of this family hold query and key rows reordered so that the two members of a rotary pair are
neighbours. Rows are whole blocks, so the order is undone exactly at load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slimserve.models.dense import DenseConfig, dense_from_gguf
from slimserve.models.geometry import Shapes, check_groups, head_dim_of, layer_windows
from slimserve.models.rope_config import rope_from_hf, usable_context
from slimserve.models.values import HARMLESS_HF_KEYS, MAX_CONTEXT, ConfigValues

DEFAULT_THETA = 10_000.0
MISTRAL_WINDOW = 4096
"""Mistral's window where config.json does not mention one; null there means full attention."""


def from_hf(config: Mapping[str, Any], shapes: Shapes) -> DenseConfig:
    """Read a config.json of model_type llama or mistral."""
    values = ConfigValues(config, "config.json")
    mistral = config.get("model_type") == "mistral"
    num_layers = values.integer("num_hidden_layers", maximum=10_000)
    num_heads = values.integer("num_attention_heads")
    hidden = values.integer("hidden_size")
    head_dim = head_dim_of(values, hidden, num_heads)
    stated = values.integer("max_position_embeddings", 131_072 if mistral else 2048, maximum=MAX_CONTEXT)
    theta = values.number("rope_theta", DEFAULT_THETA, above=1.0)
    section = values.mapping("rope_parameters") or values.mapping("rope_scaling")
    values.raw("rope_scaling")
    rope = rope_from_hf(section, theta=theta, head_dim=head_dim, max_context=stated)
    values.require("hidden_act", "silu", "swish")
    values.require("rope_interleaved", False)
    window = _window_of(values, config) if mistral else None
    attention_bias = False if mistral else values.boolean("attention_bias", False)
    result = DenseConfig(
        architecture="llama",
        vocab_size=values.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=num_layers,
        max_context=usable_context(rope, stated),
        intermediate_size=values.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=check_groups(num_heads, values.integer("num_key_value_heads", num_heads), "config.json"),
        head_dim=head_dim,
        norm_eps=values.number("rms_norm_eps", 1e-6),
        rope=rope,
        windows=layer_windows(values, num_layers, window, (True,) * num_layers),
        tied_head=values.boolean("tie_word_embeddings", False),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=False if mistral else values.boolean("mlp_bias", False),
    )
    values.finish(HARMLESS_HF_KEYS)
    return result


def _window_of(values: ConfigValues, config: Mapping[str, Any]) -> int | None:
    stated = values.optional_integer("sliding_window")
    return stated if "sliding_window" in config else MISTRAL_WINDOW


def from_gguf(metadata: Mapping[str, Any], shapes: Shapes) -> DenseConfig:
    """Read the `llama.*` keys of a GGUF file."""
    config = dense_from_gguf(metadata, shapes, "llama", default_theta=DEFAULT_THETA)
    return replace(config, gguf_interleaved=True)
