"""Tiny random hybrid models of transformers with every layer kind, their files in both containers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers.configuration_utils import ALLOWED_LAYER_TYPES
from transformers.models.glm5_next import modeling_glm5_next as glm
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

EPS = 2.0**-16
INDEXED = "indexed_attention" if "indexed_attention" in ALLOWED_LAYER_TYPES else "deepseek_sparse_attention"
"""What this version of transformers calls a sparse layer."""

QWEN: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": EPS,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
GLM: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 0,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "index_topk": 16,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "index_kpool": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 2,
    "hc_mult": 4,
    "mlp_layer_types": ["dense"] + ["sparse"] * 7,
    "layer_types": (["linear_attention"] * 3 + [INDEXED]) * 2,
    "indexer_types": ["full"] * 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": EPS,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


class Oracle(torch.nn.Module):
    """A transformers text model with its head: tokens [1, T] (and a left-padding mask) -> logits [T, V]."""

    def __init__(self, text: torch.nn.Module, prefix: str) -> None:
        super().__init__()
        self.text = text
        self.prefix = prefix
        self.lm_head = torch.nn.Linear(text.config.hidden_size, text.config.vocab_size, bias=False)

    @torch.inference_mode()
    def logits(self, tokens: list[int], *, padding: int = 0) -> torch.Tensor:
        ids = torch.tensor([[0] * padding + tokens])
        mask = torch.tensor([[0] * padding + [1] * len(tokens)])
        hidden = self.text(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        return self.lm_head(hidden)[0, padding:]


def randomise(model: torch.nn.Module, seed: int, *, norm_centre: float) -> None:
    """Weights that make logits differ; norms, decay, biases and coefficients away from their defaults."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "linear_attn.norm" in name or "o_norm" in name:
                parameter.copy_(1.0 + 0.3 * noise)
            elif "k_norm.bias" in name or name.endswith(("dt_bias", "base", "ape")):
                parameter.copy_(0.5 * noise)
            elif "norm" in name:
                parameter.copy_(norm_centre + 0.3 * noise)
            elif "A_log" in name:
                parameter.copy_(0.5 * noise)
            elif name.endswith("scale"):
                parameter.copy_(1.0 + 0.3 * noise)
            elif "embed" in name:
                parameter.copy_(0.7 * noise)
            else:
                parameter.copy_(1.2 * noise / math.sqrt(parameter.shape[-1]))
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))


def build_qwen(**changes: Any) -> Oracle:
    config = qwen.Qwen3_5TextConfig(**{**QWEN, **changes})
    config._attn_implementation = "eager"
    oracle = Oracle(qwen.Qwen3_5TextModel(config).float().eval(), "model")
    randomise(oracle, 11, norm_centre=0.0)
    return oracle


def build_glm(**changes: Any) -> Oracle:
    config = glm.Glm5NextTextConfig(**{**GLM, **changes})
    config._attn_implementation = "eager"
    oracle = Oracle(glm.Glm5NextTextModel(config).float().eval(), "model")
    randomise(oracle, 12, norm_centre=1.0)
    return oracle


def qwen_tensors(oracle: Oracle) -> dict[str, torch.Tensor]:
    """HF names of a text-only checkpoint."""
    tensors = {f"model.{name}": value.clone() for name, value in oracle.text.state_dict().items()}
    tensors["lm_head.weight"] = oracle.lm_head.weight.detach().clone()
    return {name: value for name, value in tensors.items() if "inv_freq" not in name}


def glm_tensors(oracle: Oracle) -> dict[str, torch.Tensor]:
    """The published names: transformers' own renames on load are undone here by hand."""
    tensors: dict[str, torch.Tensor] = {"lm_head.weight": oracle.lm_head.weight.detach().clone()}
    rows = oracle.text.config.linear_num_heads * oracle.text.config.linear_head_dim
    for name, value in oracle.text.state_dict().items():
        full = f"model.{name}".replace("forget_gate.", "")
        for site in ("attn", "ffn"):
            for part in ("fn", "base", "scale"):
                full = full.replace(f"{site}_hc.{part}", f"hc_{site}_{part}")
        if "self_attn.conv1d" in full:
            for part, piece in zip("qkv", value.split(rows), strict=True):
                tensors[full.replace("conv1d", f"{part}_conv1d")] = piece.clone()
        elif full.endswith("experts.gate_up_proj"):
            half = value.shape[1] // 2
            for expert in range(value.shape[0]):
                stem = full.replace("gate_up_proj", f"{expert}.")
                tensors[f"{stem}gate_proj.weight"] = value[expert, :half].clone()
                tensors[f"{stem}up_proj.weight"] = value[expert, half:].clone()
        elif full.endswith("experts.down_proj"):
            for expert in range(value.shape[0]):
                tensors[full.replace("down_proj", f"{expert}.down_proj.weight")] = value[expert].clone()
        else:
            tensors[full] = value.clone()
    return tensors


def save_folder(oracle: Oracle, tensors: dict[str, torch.Tensor], folder: Path) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    oracle.text.config.save_pretrained(folder)
    return folder


def save_qwen_gguf(oracle: Oracle, path: Path) -> Path:
    """Form qwen35: one folded into the norms, value heads tiled, -exp(A_log)."""
    config = oracle.text.config
    key_heads, heads = config.linear_num_key_heads, config.linear_num_value_heads
    repeat, dim = heads // key_heads, config.linear_value_head_dim
    key_rows = key_heads * config.linear_key_head_dim
    writer = gguf.GGUFWriter(str(path), "qwen35")
    put = writer.add_uint32
    for key, value in (
        ("block_count", config.num_hidden_layers), ("embedding_length", config.hidden_size),
        ("feed_forward_length", config.intermediate_size), ("context_length", config.max_position_embeddings),
        ("attention.head_count", config.num_attention_heads), ("attention.head_count_kv", config.num_key_value_heads),
        ("attention.key_length", config.head_dim), ("attention.value_length", config.head_dim),
        ("rope.dimension_count", config.head_dim // 4), ("ssm.conv_kernel", config.linear_conv_kernel_dim),
        ("ssm.inner_size", heads * dim), ("ssm.state_size", config.linear_key_head_dim),
        ("ssm.time_step_rank", heads), ("ssm.group_count", key_heads), ("full_attention_interval", 4),
    ):  # fmt: skip
        put(f"qwen35.{key}", value)
    writer.add_array("qwen35.rope.dimension_sections", [2, 1, 1, 0])
    writer.add_float32("qwen35.rope.freq_base", 10000.0)
    writer.add_float32("qwen35.attention.layer_norm_rms_epsilon", EPS)
    names = {
        "input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "post_attention_norm.weight",
        "linear_attn.in_proj_qkv.weight": "attn_qkv.weight", "linear_attn.in_proj_z.weight": "attn_gate.weight",
        "linear_attn.in_proj_a.weight": "ssm_alpha.weight", "linear_attn.in_proj_b.weight": "ssm_beta.weight",
        "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias",
        "linear_attn.conv1d.weight": "ssm_conv1d.weight", "linear_attn.norm.weight": "ssm_norm.weight",
        "linear_attn.out_proj.weight": "ssm_out.weight", "self_attn.q_proj.weight": "attn_q.weight",
        "self_attn.k_proj.weight": "attn_k.weight", "self_attn.v_proj.weight": "attn_v.weight",
        "self_attn.o_proj.weight": "attn_output.weight", "self_attn.q_norm.weight": "attn_q_norm.weight",
        "self_attn.k_norm.weight": "attn_k_norm.weight", "mlp.gate_proj.weight": "ffn_gate.weight",
        "mlp.up_proj.weight": "ffn_up.weight", "mlp.down_proj.weight": "ffn_down.weight",
    }  # fmt: skip

    def tiled(value: np.ndarray, width: int) -> np.ndarray:
        """Value heads from grouped [key head, repeat] to tiled [repeat, key head] along axis 0."""
        return value.reshape(key_heads, repeat, width, -1).swapaxes(0, 1).reshape(value.shape)

    for name, tensor in qwen_tensors(oracle).items():
        value = tensor.float().numpy()
        if name in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"):
            top = {"lm_head.weight": "output.weight", "model.embed_tokens.weight": "token_embd.weight"}
            writer.add_tensor(top.get(name, "output_norm.weight"), value + 1.0 if "norm" in name else value)
            continue
        _, _, layer, rest = name.split(".", 3)
        if "norm" in rest and rest != "linear_attn.norm.weight":
            value = value + 1.0
        if rest == "linear_attn.A_log":
            value = tiled(-np.exp(value), 1)
        elif rest in ("linear_attn.dt_bias", "linear_attn.in_proj_a.weight", "linear_attn.in_proj_b.weight"):
            value = tiled(value, 1)
        elif rest == "linear_attn.in_proj_z.weight":
            value = tiled(value, dim)
        elif rest in ("linear_attn.in_proj_qkv.weight", "linear_attn.conv1d.weight"):
            value = value.squeeze(1) if "conv1d" in rest else value
            value = np.concatenate([value[: 2 * key_rows], tiled(value[2 * key_rows :], dim)])
        elif rest == "linear_attn.out_proj.weight":
            value = tiled(np.ascontiguousarray(value.T), dim).T
        writer.add_tensor(f"blk.{layer}.{names[rest]}", np.ascontiguousarray(value, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def save_glm_gguf(oracle: Oracle, path: Path, form: str) -> Path:
    """Form glm5-next (ds4) or glm5next (llama.cpp)."""
    from slimserve.models import glm5_names as names

    config, ds4 = oracle.text.config, form == "glm5-next"
    heads, qk = config.num_attention_heads, config.qk_nope_head_dim
    writer = gguf.GGUFWriter(str(path), form)
    sparse = [int(kind != "linear_attention") for kind in config.layer_types]
    integers = {
        "block_count": config.num_hidden_layers, "embedding_length": config.hidden_size, "nextn_predict_layers": 0,
        "feed_forward_length": config.intermediate_size, "context_length": config.max_position_embeddings,
        "expert_feed_forward_length": config.moe_intermediate_size, "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok, "expert_shared_count": 1, "leading_dense_block_count": 1,
        "attention.head_count": heads, "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank, "attention.indexer.head_count": config.index_n_heads,
        "attention.indexer.key_length": config.index_head_dim, "attention.indexer.top_k": config.index_topk,
        "hyper_connection.count": 4, "hyper_connection.sinkhorn_iterations": 20,
    }  # fmt: skip
    floats = {"expert_weights_scale": 2.5, "hyper_connection.epsilon": 1e-6,
              "attention.layer_norm_rms_epsilon": EPS}  # fmt: skip
    if ds4:
        integers |= {"attention.key_length": qk, "attention.value_length": config.v_head_dim,
                     "attention.rope_dimension_count": 0, "attention.indexer.pool_size": 4,
                     "linear_attention.head_count": 2, "linear_attention.head_dimension": 16,
                     "linear_attention.conv_kernel": 4}  # fmt: skip
        floats |= {"swiglu_limit": 10.0, "linear_attention.gate_lower_bound": -5.0}
        writer.add_array(f"{form}.layer_types", sparse)
    else:
        integers |= {"attention.key_length": config.kv_lora_rank, "attention.value_length": config.kv_lora_rank,
                     "attention.key_length_mla": qk, "attention.value_length_mla": config.v_head_dim,
                     "rope.dimension_count": 0, "ssm.conv_kernel": 4, "kda.head_dim": 16, "expert_gating_func": 2,
                     "attention.indexer.kpool": 4}  # fmt: skip
        floats |= {"swiglu_clamp_exp": 10.0, "kda.gate_lower_bound": -5.0, "attention.layer_norm_epsilon": 1e-6}
        writer.add_bool(f"{form}.attention.indexer.kpool_select_tail", True)
        writer.add_array(f"{form}.attention.head_count_kv", sparse)
    writer.add_bool(f"{form}.expert_weights_norm", True)
    for key, value in integers.items():
        writer.add_uint32(f"{form}.{key}", value)
    for key, number in floats.items():
        writer.add_float32(f"{form}.{key}", number)
    tables = (names.KDA, names.LATENT, names.INDEXER, names.HYPER, names.DENSE, names.ROUTER, names.SHARED, names.NORMS)
    known = {n.hf: (n.ds4 if ds4 else n.llama_cpp) for table in tables for n in table.values() if n.hf}
    experts: dict[str, list[np.ndarray]] = {}
    for name, tensor in glm_tensors(oracle).items():
        value = tensor.float().numpy()
        if name in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"):
            top = {"lm_head.weight": "output.weight", "model.embed_tokens.weight": "token_embd.weight"}
            writer.add_tensor(top.get(name, "output_norm.weight"), value)
            continue
        _, _, layer, rest = name.split(".", 3)
        stem = f"blk.{layer}"
        if ".experts." in rest:
            part = rest.rsplit(".", 2)[1].removesuffix("_proj")
            experts.setdefault(f"{stem}.ffn_{part}_exps.weight", []).append(value)
        elif rest == "self_attn.kv_b_proj.weight":
            both = value.reshape(heads, qk + config.v_head_dim, -1)
            writer.add_tensor(f"{stem}.attn_k_b.weight", np.ascontiguousarray(both[:, :qk].swapaxes(1, 2)))
            writer.add_tensor(f"{stem}.attn_v_b.weight", np.ascontiguousarray(both[:, qk:]))
        else:
            if rest == "self_attn.A_log" and not ds4:
                value = -np.exp(value)
            if rest == "self_attn.dt_bias":
                value = value.reshape(-1)
            kda_output = rest == "self_attn.o_proj.weight" and not sparse[int(layer)]
            known_name = known[rest] if not kda_output else names.KDA["o"].gguf(names.Naming(form))
            writer.add_tensor(f"{stem}.{known_name}", value)
    for name, parts in experts.items():
        writer.add_tensor(name, np.stack(parts))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
