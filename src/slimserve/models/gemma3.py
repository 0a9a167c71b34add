"""Gemma 3, text (arXiv:2503.19786): norms on both sides of each block, sliding and full attention in a pattern.

Norm weights are stored as weight - 1 in safetensors (undone at load) and whole in GGUF files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slimserve.errors import RefusalError
from slimserve.layers.attention import Attention, AttentionShape
from slimserve.layers.contract import Caches, StepInput
from slimserve.layers.embedding import Embedding, Head
from slimserve.layers.mlp import Activation, GatedMLP
from slimserve.layers.norm import RMSNorm
from slimserve.layers.rotary import RopeSettings, Rotary
from slimserve.models.contract import CacheSpec, ParameterSpec, Role, Transform
from slimserve.models.geometry import Shapes, check_groups, gguf_head_dim, gguf_vocab_size, layer_windows
from slimserve.models.parameters import Parameters
from slimserve.models.rope_config import rope_from_gguf, rope_from_hf, usable_context
from slimserve.models.tables import attention_caches, linear_spec, norm_spec
from slimserve.models.values import HARMLESS_HF_KEYS, MAX_CONTEXT, ConfigValues

GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
PATTERN = 6
"""Every sixth layer attends to everything where a file does not say otherwise."""

PLUS_ONE = Transform("add_one")
HF_PREFIXES = ("model.", "model.language_model.", "language_model.model.")
HARMLESS_HF = (
    *HARMLESS_HF_KEYS,
    "boi_token_index",
    "eoi_token_index",
    "image_token_index",
    "mm_tokens_per_image",
    "vision_config",
)
LAYERS_OF_27B = 62
"""The 27B scales queries by its hidden size per head, the other sizes by their head size; GGUF files omit it."""


@dataclass(frozen=True, slots=True)
class Gemma3Config:
    """Shape and features; `rope` rotates full-attention layers, `local_rope` the sliding ones."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_context: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeSettings
    local_rope: RopeSettings
    windows: tuple[int | None, ...]
    query_scalar: float
    tied_head: bool
    attention_softcap: float | None = None
    final_softcap: float | None = None
    hf_prefix: str = "model."

    def parameters(self) -> Sequence[ParameterSpec]:
        """The parameter table."""
        table = [
            ParameterSpec(
                "embedding",
                (self.vocab_size, self.hidden_size),
                Role.EMBEDDING,
                f"{self.hf_prefix}embed_tokens.weight",
                "token_embd.weight",
            )
        ]
        for layer in range(self.num_layers):
            table += self._layer_parameters(layer)
        table.append(
            norm_spec(
                "norm", self.hidden_size, f"{self.hf_prefix}norm.weight", "output_norm.weight", hf_transform=PLUS_ONE
            )
        )
        if not self.tied_head:
            shape = (self.vocab_size, self.hidden_size)
            table.append(ParameterSpec("head.weight", shape, Role.HEAD, "lm_head.weight", "output.weight"))
        return table

    def _layer_parameters(self, layer: int) -> list[ParameterSpec]:
        hidden, inner = self.hidden_size, self.intermediate_size
        q_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        own, hf, gguf = f"layers.{layer}", f"{self.hf_prefix}layers.{layer}", f"blk.{layer}"
        norms = (
            ("input_norm", hidden, "input_layernorm", "attn_norm"),
            ("q_norm", self.head_dim, "self_attn.q_norm", "attn_q_norm"),
            ("k_norm", self.head_dim, "self_attn.k_norm", "attn_k_norm"),
            ("attention_out_norm", hidden, "post_attention_layernorm", "post_attention_norm"),
            ("mlp_norm", hidden, "pre_feedforward_layernorm", "ffn_norm"),
            ("mlp_out_norm", hidden, "post_feedforward_layernorm", "post_ffw_norm"),
        )
        matrices = (
            ("q", (q_rows, hidden), "self_attn.q_proj", "attn_q"),
            ("k", (kv_rows, hidden), "self_attn.k_proj", "attn_k"),
            ("v", (kv_rows, hidden), "self_attn.v_proj", "attn_v"),
            ("o", (hidden, q_rows), "self_attn.o_proj", "attn_output"),
            ("gate", (inner, hidden), "mlp.gate_proj", "ffn_gate"),
            ("up", (inner, hidden), "mlp.up_proj", "ffn_up"),
            ("down", (hidden, inner), "mlp.down_proj", "ffn_down"),
        )
        table = [
            norm_spec(
                f"{own}.{name}",
                size,
                f"{hf}.{hf_name}.weight",
                f"{gguf}.{gguf_name}.weight",
                layer=layer,
                hf_transform=PLUS_ONE,
            )
            for name, size, hf_name, gguf_name in norms
        ]
        table += [
            linear_spec(
                f"{own}.{name}.weight", shape, f"{hf}.{hf_name}.weight", f"{gguf}.{gguf_name}.weight", layer=layer
            )
            for name, shape, hf_name, gguf_name in matrices
        ]
        return table

    def caches(self, kv_dtype: torch.dtype) -> Sequence[CacheSpec]:
        """The cache table for a KV dtype."""
        return attention_caches(self.windows, self.num_kv_heads, self.head_dim, kv_dtype)


class Gemma3Layer:
    """One decoder layer: x += norm(attention(norm x)); x += norm(mlp(norm x))."""

    def __init__(self, config: Gemma3Config, layer: int, rotary: Rotary, parameters: Parameters) -> None:
        own = f"layers.{layer}"
        shape = AttentionShape(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            scale=config.query_scalar**-0.5,
            window=config.windows[layer],
            softcap=config.attention_softcap,
        )

        def norm(name: str) -> RMSNorm:
            return RMSNorm(parameters.tensor(f"{own}.{name}"), config.norm_eps)

        self.input_norm = norm("input_norm")
        self.attention = Attention(
            shape,
            parameters.linear(f"{own}.q", f"{own}.k", f"{own}.v"),
            parameters.linear(f"{own}.o"),
            rotary,
            q_norm=norm("q_norm"),
            k_norm=norm("k_norm"),
        )
        self.attention_out_norm = norm("attention_out_norm")
        self.mlp_norm = norm("mlp_norm")
        self.mlp = GatedMLP(
            parameters.linear(f"{own}.gate", f"{own}.up"), parameters.linear(f"{own}.down"), Activation.GELU_TANH
        )
        self.mlp_out_norm = norm("mlp_out_norm")


class Gemma3Model:
    """The forward of Gemma 3's text decoder; `taps` lists layers whose completed output a drafter reads."""

    def __init__(self, config: Gemma3Config, parameters: Parameters) -> None:
        self.config = config
        full = Rotary(config.rope, parameters.device)
        local = Rotary(config.local_rope, parameters.device)
        self.embedding = Embedding(
            parameters.table("embedding"), parameters.dtype, multiplier=math.sqrt(config.hidden_size)
        )
        self.layers = [
            Gemma3Layer(config, layer, full if config.windows[layer] is None else local, parameters)
            for layer in range(config.num_layers)
        ]
        self.norm = RMSNorm(parameters.tensor("norm"), config.norm_eps)
        self.head = Head(parameters.head("head", "embedding" if config.tied_head else None), config.final_softcap)
        self.taps: tuple[int, ...] = ()

    def __call__(self, step: StepInput, caches: Caches, tapped: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Hidden states after the final norm [T, H]; appends the output [T, H] of each layer in `taps` to `tapped`."""
        residual = self.embedding(step.token_ids)  # [T, H]
        x = self.layers[0].input_norm(residual)
        for index, layer in enumerate(self.layers):
            if index:
                x, residual = layer.input_norm.add(x, residual)
                if tapped is not None and index - 1 in self.taps:
                    tapped.append(residual)
            storage = caches[index].attention
            assert storage is not None, "the cache table names attention storage for every layer"
            x = layer.attention_out_norm(layer.attention(x, step, storage))
            x, residual = layer.mlp_norm.add(x, residual)
            x = layer.mlp_out_norm(layer.mlp(x))
        x, residual = self.norm.add(x, residual)
        if tapped is not None and len(self.layers) - 1 in self.taps:
            tapped.append(residual)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [L, H] -> float32 logits [L, V]."""
        return self.head(hidden)


def from_hf(config: Mapping[str, Any], shapes: Shapes) -> Gemma3Config:
    """Read a config.json of model_type gemma3_text, or the text part of gemma3."""
    outer = ConfigValues(config, "config.json")
    text = outer.mapping("text_config")
    if text is not None:
        outer.boolean("tie_word_embeddings", True)
        outer.finish(HARMLESS_HF)
    values = outer if text is None else ConfigValues(text, "config.json text_config")
    num_layers = values.integer("num_hidden_layers", 26, maximum=10_000)
    num_heads = values.integer("num_attention_heads", 8)
    head_dim = values.integer("head_dim", 256, maximum=4096)
    stated = values.integer("max_position_embeddings", 131_072, maximum=MAX_CONTEXT)
    rope, local_rope = _ropes_from_hf(values, head_dim, stated)
    pattern = values.integer("sliding_window_pattern", values.integer("_sliding_window_pattern", PATTERN))
    values.require("hidden_activation", "gelu_pytorch_tanh")
    values.require("hidden_act", "gelu_pytorch_tanh")
    values.require("attention_bias", False)
    values.require("use_bidirectional_attention", False)
    result = Gemma3Config(
        architecture="gemma3",
        vocab_size=values.integer("vocab_size", 262_208),
        hidden_size=values.integer("hidden_size", 2304),
        num_layers=num_layers,
        max_context=usable_context(rope, stated),
        intermediate_size=values.integer("intermediate_size", 9216),
        num_heads=num_heads,
        num_kv_heads=check_groups(num_heads, values.integer("num_key_value_heads", 4), "config.json"),
        head_dim=head_dim,
        norm_eps=values.number("rms_norm_eps", 1e-6),
        rope=rope,
        local_rope=local_rope,
        windows=layer_windows(
            values,
            num_layers,
            values.optional_integer("sliding_window"),
            [bool((i + 1) % pattern) for i in range(num_layers)],
        ),
        query_scalar=values.number("query_pre_attn_scalar", 256),
        tied_head=values.boolean("tie_word_embeddings", True),
        attention_softcap=values.optional_number("attn_logit_softcapping"),
        final_softcap=values.optional_number("final_logit_softcapping"),
        hf_prefix=_hf_prefix(shapes),
    )
    values.finish(HARMLESS_HF)
    return result


def _hf_prefix(shapes: Shapes) -> str:
    for prefix in HF_PREFIXES:
        if f"{prefix}embed_tokens.weight" in shapes:
            return prefix
    return HF_PREFIXES[0]


def _ropes_from_hf(values: ConfigValues, head_dim: int, max_context: int) -> tuple[RopeSettings, RopeSettings]:
    """(full, sliding) settings, from `rope_parameters` per layer kind or from the older separate keys."""
    theta = values.number("rope_theta", GLOBAL_THETA, above=1.0)
    local_theta = values.number("rope_local_base_freq", LOCAL_THETA, above=1.0)
    per_kind = values.mapping("rope_parameters") or {}
    scaling = values.mapping("rope_scaling")
    unknown = sorted(set(per_kind) - {"full_attention", "sliding_attention"})
    if unknown:
        raise RefusalError(
            f"config.json: rope_parameters holds {unknown[:4]}, expected full_attention and sliding_attention"
        )
    full = rope_from_hf(
        per_kind.get("full_attention") or scaling, theta=theta, head_dim=head_dim, max_context=max_context
    )
    local = rope_from_hf(
        per_kind.get("sliding_attention"), theta=local_theta, head_dim=head_dim, max_context=max_context
    )
    return full, local


def from_gguf(metadata: Mapping[str, Any], shapes: Shapes) -> Gemma3Config:
    """Read the `gemma3.*` keys of a GGUF file."""
    values = ConfigValues(metadata, "GGUF metadata", "gemma3.")
    num_layers = values.integer("block_count", maximum=10_000)
    hidden = values.integer("embedding_length")
    num_heads = values.uniform_integer("attention.head_count", num_layers)
    head_dim = gguf_head_dim(values, hidden, num_heads)
    stated = values.integer("context_length", 8192, maximum=MAX_CONTEXT)
    rope = rope_from_gguf(values, head_dim=head_dim, max_context=stated, default_theta=GLOBAL_THETA)
    local_rope = RopeSettings(values.number("rope.freq_base_swa", LOCAL_THETA, above=1.0), head_dim)
    window = values.optional_integer("attention.sliding_window", minimum=0) or None
    values.require("attention.causal", True)
    default_scalar = hidden / num_heads if num_layers == LAYERS_OF_27B else float(head_dim)
    stated_scale = values.optional_number("attention.scale")
    result = Gemma3Config(
        architecture="gemma3",
        vocab_size=gguf_vocab_size(values, shapes),
        hidden_size=hidden,
        num_layers=num_layers,
        max_context=usable_context(rope, stated),
        intermediate_size=values.uniform_integer("feed_forward_length", num_layers),
        num_heads=num_heads,
        num_kv_heads=check_groups(
            num_heads, values.uniform_integer("attention.head_count_kv", num_layers, num_heads), "GGUF metadata"
        ),
        head_dim=head_dim,
        norm_eps=values.number("attention.layer_norm_rms_epsilon", 1e-6),
        rope=rope,
        local_rope=local_rope,
        windows=_gguf_windows(values, num_layers, window),
        query_scalar=default_scalar if stated_scale is None else stated_scale**-2,
        tied_head="output.weight" not in shapes,
        attention_softcap=values.optional_number("attn_logit_softcapping"),
        final_softcap=values.optional_number("final_logit_softcapping"),
    )
    values.finish()
    return result


def _gguf_windows(values: ConfigValues, num_layers: int, window: int | None) -> tuple[int | None, ...]:
    """Each layer's window; the pattern key is a period or one flag per layer."""
    pattern = values.raw("attention.sliding_window_pattern")
    if isinstance(pattern, Sequence) and not isinstance(pattern, str):
        if len(pattern) != num_layers:
            raise RefusalError(
                f"GGUF metadata: sliding_window_pattern has {len(pattern)} entries for {num_layers} layers"
            )
        return tuple(window if flag else None for flag in pattern)
    period = values.integer("attention.sliding_window_pattern", PATTERN)
    return tuple(window if (layer + 1) % period else None for layer in range(num_layers))
