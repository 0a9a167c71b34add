"""Small editions of the catalog's large records: the same layers and format maps, a few hundred columns."""

from __future__ import annotations

from dataclasses import replace

from slimserve.models.format_map import FormatRule
from slimserve.profiles.registry import find_record
from slimserve.weights.synthetic import SyntheticModel

QWEN = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "max_position_embeddings": 4096,
}
GLM = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 256,
    "q_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "index_topk": 64,
    "index_head_dim": 64,
    "index_n_heads": 4,
    "linear_num_heads": 4,
    "linear_head_dim": 64,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 4096,
}
NAMES = ("qwen35-4b", "qwen38-nvfp4-1", "glm53f-q2-1")


def tiny(name: str, seed: int = 0) -> SyntheticModel:
    """A tiny edition of a record's synthetic model."""
    record = find_record(name)
    config = dict(record.model.config)
    config.update(GLM if name.startswith("glm") else QWEN)
    if "rope_parameters" in config:
        config["rope_parameters"] = {**config["rope_parameters"], "mrope_section": [3, 3, 2]}
    present = tuple(word.replace("layers.45.", "layers.5.") for word in record.model.present)
    return SyntheticModel(name, config, tuple(_nearer(rule) for rule in record.model.formats), present, seed)


def _nearer(rule: FormatRule) -> FormatRule:
    """Layer lists of deep models reach past a tiny one: their first layers stand for them."""
    return replace(rule, layers="0-5") if rule.layers == "0-55" else rule
