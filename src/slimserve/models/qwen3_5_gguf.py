"""qwen3_5 as a GGUF file (`general.architecture` qwen35): what `from_gguf` reads, written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slimserve.errors import RefusalError
from slimserve.models.qwen3_5 import Qwen35Config

NAME = "qwen35"


def gguf_form(config: Qwen35Config) -> Qwen35Config:
    """The same model as its file holds it: value heads in tiled order."""
    return replace(config, architecture=NAME, recurrent=replace(config.recurrent, tiled=True), hf_prefix="")


def gguf_metadata(config: Qwen35Config) -> dict[str, Any]:
    """The keys from which `from_gguf` reads `gguf_form(config)` back; RefusalError for what they cannot say."""
    interval = config.full_layers[0] + 1 if config.full_layers else config.num_layers + 1
    if config.full_layers != tuple(i for i in range(config.num_layers) if (i + 1) % interval == 0):
        raise RefusalError(f"full attention in layers {config.full_layers} is no interval, which this GGUF form needs")
    shape = config.recurrent
    sections = [*config.rope_sections, 0, 0, 0, 0][:4]
    values: dict[str, Any] = {
        "block_count": config.num_layers + config.num_nextn,
        "nextn_predict_layers": config.num_nextn,
        "context_length": config.max_context,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "rope.dimension_count": config.rope.rotary_dim,
        "rope.dimension_sections": sections,
        "rope.freq_base": float(config.rope.theta),
        "ssm.conv_kernel": config.conv_width,
        "ssm.inner_size": shape.heads * shape.value_dim,
        "ssm.state_size": shape.key_dim,
        "ssm.time_step_rank": shape.heads,
        "ssm.group_count": shape.key_heads,
        "full_attention_interval": interval,
    }
    return {"general.architecture": NAME, **{f"{NAME}.{key}": value for key, value in values.items()}}
