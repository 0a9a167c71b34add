"""glm5_next as a GGUF file of the form ds4 (`general.architecture` glm5-next): what `from_gguf` reads, written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from slimserve.errors import RefusalError
from slimserve.models.glm5_config import Glm5Config
from slimserve.models.glm5_names import Naming


def gguf_form(config: Glm5Config) -> Glm5Config:
    """The same model under the names of the form; its parameter table names every tensor of the file."""
    return replace(config, architecture=Naming.DS4.value, naming=Naming.DS4, hf_prefix="")


def gguf_metadata(config: Glm5Config) -> dict[str, Any]:
    """The keys from which `from_gguf` reads `gguf_form(config)` back; RefusalError for what they cannot say."""
    _check(config)
    prefix = f"{Naming.DS4.value}."
    blocks = config.num_layers + config.num_nextn
    kinds = [int(layer in config.latent_layers or layer >= config.num_layers) for layer in range(blocks)]
    values: dict[str, Any] = {
        "block_count": blocks,
        "trunk_block_count": config.num_layers,
        "nextn_predict_layers": config.num_nextn,
        "context_length": np.uint64(config.max_context),
        "embedding_length": config.hidden_size,
        "vocab_size": config.vocab_size,
        "feed_forward_length": config.intermediate_size,
        "expert_feed_forward_length": config.expert_size,
        "expert_count": config.num_experts,
        "expert_used_count": config.top_k,
        "expert_shared_count": config.shared_size // config.expert_size,
        "expert_weights_scale": float(config.scaling),
        "expert_weights_norm": config.normalise,
        "leading_dense_block_count": len(config.dense_layers),
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "attention.head_count": config.latent.num_heads,
        "attention.key_length": config.latent.qk_dim,
        "attention.value_length": config.latent.value_dim,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.latent.latent_dim,
        "attention.rope_dimension_count": 0,
        "attention.indexer.head_count": config.index_heads,
        "attention.indexer.key_length": config.index_dim,
        "attention.indexer.top_k": config.top_pools * config.pool,
        "attention.indexer.pool_size": config.pool,
        "linear_attention.head_count": config.recurrent.heads,
        "linear_attention.head_dimension": config.recurrent.key_dim,
        "linear_attention.conv_kernel": config.conv_width,
        "linear_attention.gate_lower_bound": config.lower_bound,
        "layer_types": kinds,
        "hyper_connection.count": config.streams,
        "hyper_connection.sinkhorn_iterations": config.sinkhorn_iterations,
        "hyper_connection.epsilon": float(config.hyper_eps),
    }
    if config.limit is not None:
        values["swiglu_limit"] = float(config.limit)
    return {"general.architecture": Naming.DS4.value, **{f"{prefix}{key}": value for key, value in values.items()}}


def _check(config: Glm5Config) -> None:
    if config.lower_bound is None:
        raise RefusalError("an unbounded decay has no key in this GGUF form; keep the safetensors folder")
    if config.dense_layers != tuple(range(len(config.dense_layers))):
        raise RefusalError(f"dense layers {config.dense_layers} do not lead the model, which this GGUF form cannot say")
    if config.shared_size % config.expert_size:
        raise RefusalError(f"shared experts of {config.shared_size} are no whole experts of {config.expert_size}")
