"""Tiny random hybrids with an MTP layer, and what such a layer computes, directly, from its published tensors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

NANO = Path(__file__).resolve().parents[2] / "shared" / "nano"


def save_tiny(kind: str, folder: Path) -> Path:
    """A folder of tiny_hybrids' `kind` (qwen or glm) with an MTP layer: a copy of a trunk layer with random inputs."""
    import tiny_hybrids

    oracle = getattr(tiny_hybrids, f"build_{kind}")()
    tensors = getattr(tiny_hybrids, f"{kind}_tensors")(oracle)
    hidden = oracle.text.config.hidden_size
    generator = torch.Generator().manual_seed(8)
    joined = torch.randn(hidden, 2 * hidden, generator=generator) / math.sqrt(hidden)
    centre = 0.0 if kind == "qwen" else 1.0

    def norm() -> torch.Tensor:
        return centre + 0.3 * torch.randn(hidden, generator=generator)

    source, target = ("model.layers.3.", "mtp.layers.0.") if kind == "qwen" else ("model.layers.7.", "model.layers.8.")
    copied = {name.replace(source, target): value.clone() for name, value in tensors.items() if name.startswith(source)}
    tensors |= {name: value for name, value in copied.items() if "hc_" not in name}
    if kind == "qwen":
        tensors["mtp.fc.weight"] = joined
        names = ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight")
    else:
        tensors["model.layers.8.eh_proj.weight"] = joined
        names = tuple(f"model.layers.8.{name}.weight" for name in ("enorm", "hnorm", "shared_head.norm"))
    tensors |= {name: norm() for name in names}
    tiny_hybrids.save_folder(oracle, tensors, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["mtp_num_hidden_layers" if kind == "qwen" else "num_nextn_predict_layers"] = 1
    path.write_text(json.dumps(config), encoding="utf-8")
    return folder


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder, float32."""
    from safetensors import safe_open

    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                if "visual" not in name:
                    found[name] = file.get_tensor(name).float()
    return found


class DirectMTP:
    """The MTP layer of a checkpoint in plain float32 torch: full attention over everything, nothing cached."""

    def __init__(self, folder: Path) -> None:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.config: dict[str, Any] = config.get("text_config") or config
        self.w = read_tensors(folder)
        self.qwen = "qwen3_5" in self.config["model_type"]
        embedding = "embed_tokens.weight"
        self.prefix = next(name.removesuffix(embedding) for name in self.w if name.endswith(embedding))
        self.own = "mtp.layers.0" if self.qwen else f"{self.prefix}layers.{self.config['num_hidden_layers']}"
        self.eps = self.config["rms_norm_eps"]

    def norm(self, x: torch.Tensor, name: str, eps: float | None = None) -> torch.Tensor:
        scale = self.w[name] + (1.0 if self.qwen else 0.0)
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + (eps or self.eps)) * scale

    def __call__(self, following: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """following [n] (token p + 1 of entry p) and hidden [n, H] -> the layer's outputs [n, H]."""
        embedded = self.w[f"{self.prefix}embed_tokens.weight"][torch.tensor(following)]
        names = (
            ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
            if self.qwen
            else tuple(f"{self.own}.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
        )
        joined = torch.cat((self.norm(embedded, f"{names[0]}.weight"), self.norm(hidden, f"{names[1]}.weight")), dim=1)
        x = joined @ self.w[f"{names[2]}.weight"].T
        h = self.norm(x, f"{self.own}.input_layernorm.weight")
        x = x + (self.gated_attention(h) if self.qwen else self.latent_attention(h))
        h = self.norm(x, f"{self.own}.post_attention_layernorm.weight")
        x = x + (self.mlp(h, f"{self.own}.mlp", None) if self.qwen else self.experts(h))
        return self.norm(x, f"{names[3]}.weight")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        head = self.w.get("lm_head.weight")
        return hidden @ (self.w[f"{self.prefix}embed_tokens.weight"] if head is None else head).T

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.w[f"{self.own}.{name}.weight"].T

    def gated_attention(self, h: torch.Tensor) -> torch.Tensor:
        config, count = self.config, h.shape[0]
        heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        q, gate = self.linear(h, "self_attn.q_proj").view(count, heads, 2, dim).unbind(2)
        k = self.linear(h, "self_attn.k_proj").view(count, kv_heads, dim)
        v = self.linear(h, "self_attn.v_proj").view(count, kv_heads, dim).repeat_interleave(heads // kv_heads, dim=1)
        q = self.rope(self.norm(q, f"{self.own}.self_attn.q_norm.weight"))
        k = self.rope(self.norm(k, f"{self.own}.self_attn.k_norm.weight")).repeat_interleave(heads // kv_heads, dim=1)
        out = self.attend(q, k, v, dim**-0.5) * torch.sigmoid(gate)
        return self.linear(out.reshape(count, -1), "self_attn.o_proj")

    def rope(self, x: torch.Tensor) -> torch.Tensor:
        section = self.config["rope_parameters"]
        turned = int(x.shape[-1] * section["partial_rotary_factor"])
        half = turned // 2
        angles = torch.arange(x.shape[0])[:, None, None] / section["rope_theta"] ** (torch.arange(half) / half)
        first, second, rest = x[..., :half], x[..., half:turned], x[..., turned:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)

    @staticmethod
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        unseen = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).triu(1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, -torch.inf).softmax(-1), v)

    def latent_attention(self, h: torch.Tensor) -> torch.Tensor:
        """Everything selected: right as long as no more tokens are visible than the indexer takes."""
        config, count = self.config, h.shape[0]
        assert count <= config["index_topk"] + config["index_kpool"] - 1
        heads, qk, value = config["num_attention_heads"], config["qk_nope_head_dim"], config["v_head_dim"]
        rank = self.norm(self.linear(h, "self_attn.q_a_proj"), f"{self.own}.self_attn.q_a_layernorm.weight")
        q = self.linear(rank, "self_attn.q_b_proj").view(count, heads, qk)
        latent = self.norm(
            self.linear(h, "self_attn.kv_a_proj_with_mqa"), f"{self.own}.self_attn.kv_a_layernorm.weight"
        )
        k, v = self.linear(latent, "self_attn.kv_b_proj").view(count, heads, qk + value).split((qk, value), dim=-1)
        return self.linear(self.attend(q, k, v, qk**-0.5).reshape(count, -1), "self_attn.o_proj")

    def mlp(self, h: torch.Tensor, name: str, limit: float | None) -> torch.Tensor:
        gate, up = h @ self.w[f"{name}.gate_proj.weight"].T, h @ self.w[f"{name}.up_proj.weight"].T
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (torch.nn.functional.silu(gate) * up) @ self.w[f"{name}.down_proj.weight"].T

    def experts(self, h: torch.Tensor) -> torch.Tensor:
        config = self.config
        limit = config.get("swiglu_limit")
        scores = torch.sigmoid(h @ self.w[f"{self.own}.mlp.gate.weight"].T)
        bias = self.w[f"{self.own}.mlp.gate.e_score_correction_bias"]
        chosen = (scores + bias).topk(config["num_experts_per_tok"], dim=-1).indices
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * config["routed_scaling_factor"]
        out = self.mlp(h, f"{self.own}.mlp.shared_experts", limit)
        for t in range(h.shape[0]):
            for expert, weight in zip(chosen[t].tolist(), weights[t], strict=True):
                out[t] += weight * self.mlp(h[t : t + 1], f"{self.own}.mlp.experts.{expert}", limit)[0]
        return out
