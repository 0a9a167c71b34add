"""A tiny random DFlash2 drafter: its files, and what it computes, in float64 from the published description."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

CONFIG: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 2.0**-20,
    "sliding_window": 100,
    "layer_types": ["sliding_attention"] * 3,
    "is_causal": False,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "num_target_layers": 8,
    "dflash_config": {
        "block_size": 8,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "mask_token_id": 250,
        "selector_rank": 8,
        "selector_top_k": 16,
        "target_layer_ids": [1, 3, 6],
    },
}


def tensors(config: dict[str, Any] = CONFIG, seed: int = 5) -> dict[str, torch.Tensor]:
    """Random float32 weights under the published names; norms and convolutions away from their defaults."""
    generator = torch.Generator().manual_seed(seed)
    section = config["dflash_config"]
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    rows = config["num_attention_heads"] * config["head_dim"]
    kv_rows = config["num_key_value_heads"] * config["head_dim"]
    groups, rank = hidden // section["conv_group_size"], section["selector_rank"]

    def matrix(*shape: int, scale: float = 1.2) -> torch.Tensor:
        return scale * torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

    def norm(size: int) -> torch.Tensor:
        return 1.0 + 0.3 * torch.randn(size, generator=generator)

    found = {
        "fc.weight": matrix(hidden, len(section["target_layer_ids"]) * hidden),
        "hidden_norm.weight": norm(hidden),
        "norm.weight": norm(hidden),
        "candidate_selector.predecessor_codebook": matrix(vocab, rank, scale=3.0),
        "candidate_selector.successor_codebook": matrix(vocab, rank, scale=3.0),
        "candidate_selector.hidden_projection.weight": matrix(rank, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        own = f"layers.{layer}"
        found |= {
            f"{own}.input_layernorm.weight": norm(hidden),
            f"{own}.post_attention_layernorm.weight": norm(hidden),
            f"{own}.self_attn.q_proj.weight": matrix(rows, hidden),
            f"{own}.self_attn.k_proj.weight": matrix(kv_rows, hidden),
            f"{own}.self_attn.v_proj.weight": matrix(kv_rows, hidden),
            f"{own}.self_attn.o_proj.weight": matrix(hidden, rows),
            f"{own}.self_attn.q_norm.weight": norm(config["head_dim"]),
            f"{own}.self_attn.k_norm.weight": norm(config["head_dim"]),
            f"{own}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{own}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{own}.mlp.down_proj.weight": matrix(hidden, inner),
        }
        for name in ("attention_conv", "mlp_conv"):
            found[f"{own}.{name}.base_kernel"] = torch.randn(2, 2, hidden, generator=generator)
            found[f"{own}.{name}.kernel_projection.weight"] = matrix(4 * groups, hidden, scale=0.7)
    return found


def save_folder(folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any] = CONFIG) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


GGUF_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection": "attn_conv_proj", "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
}  # fmt: skip


def save_gguf(path: Path, weights: dict[str, torch.Tensor], config: dict[str, Any] = CONFIG) -> Path:
    import gguf

    section = config["dflash_config"]
    writer = gguf.GGUFWriter(str(path), "dflash")
    for key, value in (
        ("block_count", config["num_hidden_layers"]), ("embedding_length", config["hidden_size"]),
        ("feed_forward_length", config["intermediate_size"]), ("context_length", config["max_position_embeddings"]),
        ("attention.head_count", config["num_attention_heads"]),
        ("attention.head_count_kv", config["num_key_value_heads"]), ("attention.key_length", config["head_dim"]),
        ("attention.value_length", config["head_dim"]), ("attention.sliding_window", config["sliding_window"]),
        ("block_size", section["block_size"]), ("conv_kernel_size", 2), ("conv_group_size", 16),
        ("selector_rank", section["selector_rank"]), ("selector_top_k", section["selector_top_k"]),
    ):  # fmt: skip
        writer.add_uint32(f"dflash.{key}", value)
    writer.add_array("dflash.target_layers", [layer + 1 for layer in section["target_layer_ids"]])
    writer.add_bool("dflash.attention.causal", False)
    writer.add_float32("dflash.rope.freq_base", 10000.0)
    writer.add_float32("dflash.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    writer.add_uint32("tokenizer.ggml.mask_token_id", section["mask_token_id"])
    top = {
        "fc.weight": "fc.weight", "hidden_norm.weight": "enc.output_norm.weight", "norm.weight": "output_norm.weight",
        "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
        "candidate_selector.successor_codebook": "selector_successor.weight",
        "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    }  # fmt: skip
    for name, value in weights.items():
        if name in top:
            writer.add_tensor(top[name], value.numpy())
            continue
        _, layer, rest = name.split(".", 2)
        plain = rest.removesuffix(".weight")
        suffix = "" if plain.endswith("base_kernel") else ".weight"
        writer.add_tensor(f"blk.{layer}.{GGUF_NAMES[plain]}{suffix}", value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Reference:
    """The forward in float64, one sequence, nothing paged."""

    def __init__(self, weights: dict[str, torch.Tensor], config: dict[str, Any] = CONFIG) -> None:
        self.w = {name: value.double() for name, value in weights.items()}
        self.config = config
        self.eps = config["rms_norm_eps"]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.w[name]

    def rope(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [T, heads, D]; halves."""
        half = x.shape[-1] // 2
        theta = self.config["rope_parameters"]["rope_theta"]
        angles = positions.double()[:, None, None] / theta ** (torch.arange(half, dtype=torch.float64) / half)
        first, second = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def keys_values(self, rows: torch.Tensor, positions: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        own, dim = f"layers.{layer}.self_attn", self.config["head_dim"]
        k = self.norm((rows @ self.w[f"{own}.k_proj.weight"].T).unflatten(1, (-1, dim)), f"{own}.k_norm.weight")
        return self.rope(k, positions), (rows @ self.w[f"{own}.v_proj.weight"].T).unflatten(1, (-1, dim))

    def context(self, tapped: torch.Tensor) -> torch.Tensor:
        """tapped [n, taps * H] -> context rows [n, H]."""
        return self.norm(tapped.double() @ self.w["fc.weight"].T, "hidden_norm.weight")

    def convolve(self, x: torch.Tensor, base: torch.Tensor, dynamic: torch.Tensor) -> torch.Tensor:
        """base [taps, H], dynamic [T, taps, groups]."""
        group = self.config["dflash_config"]["conv_group_size"]
        out = torch.zeros_like(x)
        for t in range(x.shape[0]):
            for tap in range(2):
                if t - tap >= 0:
                    out[t] += (base[tap] + dynamic[t, tap].repeat_interleave(group)) * x[t - tap]
        return out

    def layer(self, x: torch.Tensor, rows: torch.Tensor, layer: int) -> torch.Tensor:
        """Block stream x [1 + K, H] at the positions behind context rows [n, H] -> the stream after the layer."""
        own = f"layers.{layer}"
        count, start = x.shape[0], rows.shape[0]
        positions = torch.arange(start, start + count)
        h = self.norm(x, f"{own}.input_layernorm.weight")
        dynamic = (h @ self.w[f"{own}.attention_conv.kernel_projection.weight"].T).view(count, 2, 2, -1)
        base = self.w[f"{own}.attention_conv.base_kernel"]
        mixed = self.attention(self.convolve(h, base[0], dynamic[:, 0]), rows, positions, layer)
        x = x + self.convolve(mixed, base[1], dynamic[:, 1])
        h = self.norm(x, f"{own}.post_attention_layernorm.weight")
        dynamic = (h @ self.w[f"{own}.mlp_conv.kernel_projection.weight"].T).view(count, 2, 2, -1)
        base = self.w[f"{own}.mlp_conv.base_kernel"]
        h = self.convolve(h, base[0], dynamic[:, 0])
        gate, up = h @ self.w[f"{own}.mlp.gate_proj.weight"].T, h @ self.w[f"{own}.mlp.up_proj.weight"].T
        fed = (gate * torch.sigmoid(gate) * up) @ self.w[f"{own}.mlp.down_proj.weight"].T
        return x + self.convolve(fed, base[1], dynamic[:, 1])

    def attention(self, u: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, layer: int) -> torch.Tensor:
        own, config, dim = f"layers.{layer}.self_attn", self.config, self.config["head_dim"]
        q = self.norm((u @ self.w[f"{own}.q_proj.weight"].T).unflatten(1, (-1, dim)), f"{own}.q_norm.weight")
        q = self.rope(q, positions)
        before = torch.arange(rows.shape[0])
        old_k, old_v = self.keys_values(rows, before, layer)
        new_k, new_v = self.keys_values(u, positions, layer)
        k, v, at = torch.cat((old_k, new_k)), torch.cat((old_v, new_v)), torch.cat((before, positions))
        share = config["num_attention_heads"] // config["num_key_value_heads"]
        window = config["sliding_window"] if config["layer_types"][layer] == "sliding_attention" else 1 << 40
        out = torch.zeros_like(q)
        for t, position in enumerate(positions.tolist()):
            seen = at > position - window
            if config["is_causal"]:
                seen &= at <= position
            for head in range(q.shape[1]):
                weights = torch.softmax((k[seen, head // share] @ q[t, head]) * dim**-0.5, dim=0)
                out[t, head] = weights @ v[seen, head // share]
        return out.flatten(1) @ self.w[f"{own}.o_proj.weight"].T

    def select(self, logits: torch.Tensor, hidden: torch.Tensor, anchor: int) -> list[int]:
        """Greedy walk over the best candidates; logits [K, V] and hidden [K, H] of the mask rows."""
        before = self.w["candidate_selector.predecessor_codebook"]
        behind = self.w["candidate_selector.successor_codebook"]
        tokens, last = [], anchor
        for row, state in zip(logits, hidden, strict=True):
            candidates = row.topk(self.config["dflash_config"]["selector_top_k"]).indices
            mixed = before[last] * (state @ self.w["candidate_selector.hidden_projection.weight"].T)
            scores = row[candidates] + behind[candidates] @ mixed
            last = int(candidates[scores.argmax()])
            tokens.append(last)
        return tokens
