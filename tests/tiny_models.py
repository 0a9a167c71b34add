"""transformers models of the dense architectures: tiny random ones with their files in both containers, and real ones
filled with the decoded weights of a GGUF file. gguf-py reads and writes, so nothing of SlimServe is its own oracle."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

EPS = 2.0**-16
"""Exact in float32, so that both containers state the same number."""

BASE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": EPS,
    "attn_implementation": "eager",
}


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
GEMMA_ROPE = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2-sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 70, "max_window_layers": 1}),
    "qwen2-yarn": ("qwen2", _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama": ("llama", {"num_key_value_heads": 4}),
    "llama-tied-wide-heads": ("llama", {"tie_word_embeddings": True, "head_dim": 32}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("llama", _rope("linear", factor=4.0)),
    "llama-llama3": ("llama", _rope("llama3", **LLAMA3)),
    "llama-yarn": ("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=16.0)),
    "llama-dynamic": ("llama", _rope("dynamic", factor=4.0)),
    "mistral-sliding": ("mistral", {"sliding_window": 40}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "gemma3": ("gemma3", {"sliding_window": 40, "num_hidden_layers": 6, "head_dim": 32, "query_pre_attn_scalar": 24}),
    "gemma3-scaled": (
        "gemma3",
        {
            "sliding_window": 70,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "final_logit_softcapping": 20.0,
            "tie_word_embeddings": False,
            **GEMMA_ROPE,
        },
    ),
}

_CLASSES = {
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
}


def build(case: str, **changes: Any) -> torch.nn.Module:
    """A float32 model of a case, with weights large enough that logits differ, and norms away from one."""
    family, settings = CASES[case]
    config_class, model_class = _CLASSES[family]
    config = config_class(**{**BASE, **settings, **changes})
    model = model_class(config).float().eval()
    generator = torch.Generator().manual_seed(sum(map(ord, case)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                centre = 0.0 if family == "gemma3" else 1.0
                parameter.copy_(centre + 0.3 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif "embed" in name:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(1.2 * noise / math.sqrt(parameter.shape[-1]))
    return model


def save_folder(model: torch.nn.Module, folder: Path, *, shards: bool = False) -> Path:
    """Write config.json and safetensors as transformers does."""
    model.save_pretrained(folder, max_shard_size="60KB" if shards else "5GB")
    return folder


_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def _gguf_name(name: str, family: str) -> str:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, kind = name.rsplit(".", 1)
    if stem in top:
        return f"{top[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    if rest == "post_attention_layernorm":
        rest = "post_attention_norm" if family == "gemma3" else "ffn_norm"
        return f"blk.{layer}.{rest}.{kind}"
    return f"blk.{layer}.{_GGUF_NAMES[rest]}.{kind}"


def _neighbours(array: np.ndarray, heads: int) -> np.ndarray:
    """The row order of Llama GGUF files: [heads, 2, D/2] -> [heads, D/2, 2]."""
    shape = array.shape
    return array.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def gguf_tensors(model: torch.nn.Module, family: str) -> dict[str, np.ndarray]:
    """Tensors under GGUF names and conventions."""
    config = model.config
    tensors: dict[str, np.ndarray] = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = parameter.detach().float().numpy().copy()
        if family in ("llama", "mistral") and ".q_proj." in name:
            array = _neighbours(array, config.num_attention_heads)
        if family in ("llama", "mistral") and ".k_proj." in name:
            array = _neighbours(array, config.num_key_value_heads)
        if family == "gemma3" and "norm" in name:
            array = array + np.float32(1.0)
        tensors[_gguf_name(name, family)] = array
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = _llama3_divisors(config)
    return tensors


def _llama3_divisors(config: Any) -> np.ndarray:
    """Divisors of the plain frequencies, written out from the definition of the scaling."""
    rope, dim = config.rope_parameters, config.head_dim
    plain = [rope["rope_theta"] ** (-2 * i / dim) for i in range(dim // 2)]
    divisors = []
    for frequency in plain:
        wavelength = 2 * math.pi / frequency
        original = rope["original_max_position_embeddings"]
        if wavelength < original / rope["high_freq_factor"]:
            divisors.append(1.0)
        elif wavelength > original / rope["low_freq_factor"]:
            divisors.append(rope["factor"])
        else:
            smooth = (original / wavelength - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            divisors.append(1.0 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, dtype=np.float32)


def gguf_metadata(model: torch.nn.Module, family: str) -> tuple[str, dict[str, Any]]:
    """(architecture, keys without their prefix)."""
    config = model.config
    keys: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
    }
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys["attention.key_length"] = keys["attention.value_length"] = head_dim
    rope = config.rope_parameters
    if family == "gemma3":
        keys["rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
        keys["attention.scale"] = float(config.query_pre_attn_scalar) ** -0.5
        keys["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config.layer_types]
        rope = rope["full_attention"]
        if config.final_logit_softcapping:
            keys["final_logit_softcapping"] = config.final_logit_softcapping
    keys["rope.freq_base"] = rope["rope_theta"]
    if rope["rope_type"] in ("linear", "yarn"):
        keys["rope.scaling.type"] = rope["rope_type"]
        keys["rope.scaling.factor"] = rope["factor"]
    if rope["rope_type"] == "yarn":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        if "beta_fast" in rope:
            keys["rope.scaling.yarn_beta_fast"] = rope["beta_fast"]
    if getattr(config, "sliding_window", None):
        keys["attention.sliding_window"] = config.sliding_window
    return {"mistral": "llama"}.get(family, family), keys


def save_gguf(model: torch.nn.Module, case: str, path: Path, *, quantize: str | None = None) -> Path:
    """Write a GGUF file with gguf-py; `quantize` names the format of the layers' matrices."""
    family = CASES[case][0]
    architecture, keys = gguf_metadata(model, family)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        name = f"{architecture}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    for name, array in gguf_tensors(model, family).items():
        if quantize is not None and name.startswith("blk.") and array.ndim == 2:
            kind = gguf.GGMLQuantizationType[quantize]
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _halves(array: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `_neighbours`."""
    shape = array.shape
    return array.reshape(heads, shape[0] // heads // 2, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def _config_of(reader: gguf.GGUFReader, family: str) -> Any:
    def key(name: str, default: Any = None) -> Any:
        entry = reader.get_field(f"{family}.{name}")
        return default if entry is None else entry.contents()

    names = {tensor.name: tensor for tensor in reader.tensors}
    settings = {
        "vocab_size": int(names["token_embd.weight"].shape[1]),
        "hidden_size": key("embedding_length"),
        "intermediate_size": key("feed_forward_length"),
        "num_hidden_layers": key("block_count"),
        "num_attention_heads": key("attention.head_count"),
        "num_key_value_heads": key("attention.head_count_kv"),
        "max_position_embeddings": key("context_length"),
        "rms_norm_eps": key("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in names,
        "attn_implementation": "eager",
    }
    if family == "gemma3":
        settings |= {
            "head_dim": key("attention.key_length"),
            "query_pre_attn_scalar": key("attention.key_length"),
            "sliding_window": key("attention.sliding_window"),
        }
    else:
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": key("rope.freq_base")}
    return _CLASSES[family][0](**settings)


def from_gguf_file(path: Path) -> torch.nn.Module:
    """A float32 transformers model with the weights of a GGUF file, decoded by gguf-py."""
    reader = gguf.GGUFReader(path)
    family = reader.get_field("general.architecture").contents()
    config = _config_of(reader, family)
    with torch.device("meta"):
        model = _CLASSES[family][1](config)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    state: dict[str, torch.Tensor] = {}
    for name in model.state_dict():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        tensor = stored.pop(_gguf_name(name, family))
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if family == "llama" and ".q_proj." in name:
            array = _halves(array, config.num_attention_heads)
        if family == "llama" and ".k_proj." in name:
            array = _halves(array, config.num_key_value_heads)
        if family == "gemma3" and "norm" in name:
            array = array - np.float32(1.0)
        state[name] = torch.from_numpy(np.ascontiguousarray(array))
    assert not stored, f"the oracle left tensors of the file unused: {sorted(stored)}"
    return _materialize(model, config, family, state)


def _materialize(model: torch.nn.Module, config: Any, family: str, state: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Put the weights in, and rebuild what transformers computes at construction (rotary frequencies, embed scale)."""
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    small = _CLASSES[family][1](_shrunk(config))
    for (name, buffer), (_, real) in zip(model.named_buffers(), small.named_buffers(), strict=True):
        assert buffer.shape == real.shape, name
        owner, attribute = name.rsplit(".", 1)
        value = real
        if attribute == "embed_scale":
            value = torch.tensor(config.hidden_size**0.5)
        model.get_submodule(owner).register_buffer(attribute, value, persistent=False)
    return model.float().eval()


def _shrunk(config: Any) -> Any:
    """The same configuration with few weights, whose buffers equal the large one's."""
    values = config.to_dict() | {"vocab_size": 8, "intermediate_size": 8, "attn_implementation": "eager"}
    return type(config)(**values)
