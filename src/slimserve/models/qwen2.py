"""Qwen2 and Qwen2.5 (arXiv:2407.10671): a dense decoder with biases on query, key and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slimserve.errors import RefusalError
from slimserve.models.dense import DenseConfig, dense_from_gguf
from slimserve.models.geometry import Shapes, check_groups, head_dim_of, layer_windows
from slimserve.models.rope_config import rope_from_hf, usable_context
from slimserve.models.values import HARMLESS_HF_KEYS, MAX_CONTEXT, ConfigValues

DEFAULT_THETA = 10_000.0


def from_hf(config: Mapping[str, Any], shapes: Shapes) -> DenseConfig:
    """Read a config.json of model_type qwen2."""
    values = ConfigValues(config, "config.json")
    num_layers = values.integer("num_hidden_layers", maximum=10_000)
    num_heads = values.integer("num_attention_heads")
    hidden = values.integer("hidden_size")
    head_dim = head_dim_of(values, hidden, num_heads)
    stated = values.integer("max_position_embeddings", 32_768, maximum=MAX_CONTEXT)
    theta = values.number("rope_theta", DEFAULT_THETA, above=1.0)
    section = values.mapping("rope_parameters") or values.mapping("rope_scaling")
    values.raw("rope_scaling")
    rope = rope_from_hf(section, theta=theta, head_dim=head_dim, max_context=stated)
    values.require("hidden_act", "silu", "swish")
    window = values.optional_integer("sliding_window")
    first_window_layer = values.integer("max_window_layers", 28, minimum=0)
    if not values.boolean("use_sliding_window", False):
        window = None
    sliding_by_default = tuple(layer >= first_window_layer for layer in range(num_layers))
    result = DenseConfig(
        architecture="qwen2",
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
        windows=layer_windows(values, num_layers, window, sliding_by_default),
        tied_head=values.boolean("tie_word_embeddings", False),
        qkv_bias=True,
    )
    values.require("use_mrope", False)
    values.finish(HARMLESS_HF_KEYS)
    return result


def from_gguf(metadata: Mapping[str, Any], shapes: Shapes) -> DenseConfig:
    """Read the `qwen2.*` keys of a GGUF file."""
    config = dense_from_gguf(metadata, shapes, "qwen2", default_theta=DEFAULT_THETA)
    if not config.qkv_bias:
        raise RefusalError(
            "the GGUF file says qwen2 but has no blk.0.attn_q.bias; Qwen2 has query, key and value biases"
        )
    return config
