"""Pre-norm dense decoders: attention and a gated feed-forward, each added to the residual stream.

The Qwen2 and Llama families share this geometry; their files differ in how they read a configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slimserve.layers.attention import Attention, AttentionShape
from slimserve.layers.contract import Caches, StepInput
from slimserve.layers.embedding import Embedding, Head
from slimserve.layers.mlp import Activation, GatedMLP
from slimserve.layers.norm import RMSNorm
from slimserve.layers.rotary import RopeSettings, Rotary
from slimserve.models.contract import CacheSpec, ParameterSpec, Role, Transform
from slimserve.models.geometry import Shapes, check_groups, gguf_head_dim, gguf_vocab_size
from slimserve.models.parameters import Parameters
from slimserve.models.rope_config import rope_from_gguf, usable_context
from slimserve.models.tables import NONE, attention_caches, bias_spec, linear_spec, norm_spec
from slimserve.models.values import MAX_CONTEXT, ConfigValues

HARMLESS_GGUF_KEYS = ("tensor_data_layout",)


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """A dense decoder's shape and features.

    `windows` holds each layer's sliding window (tokens read, own included) or None. `rope_factors`: the file
    carries its own divisors of the rotary frequencies. `gguf_interleaved`: the GGUF converter reordered
    query and key rows from halves to neighbours.
    """

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
    windows: tuple[int | None, ...]
    tied_head: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    rope_factors: bool = False
    gguf_interleaved: bool = False

    def parameters(self) -> Sequence[ParameterSpec]:
        """The parameter table."""
        table = [
            ParameterSpec(
                "embedding",
                (self.vocab_size, self.hidden_size),
                Role.EMBEDDING,
                "model.embed_tokens.weight",
                "token_embd.weight",
            )
        ]
        if self.rope_factors:
            table.append(
                ParameterSpec(
                    "rope_factors",
                    (self.rope.rotary_dim // 2,),
                    Role.SMALL,
                    "",
                    "rope_freqs.weight",
                    keep=torch.float32,
                )
            )
        for layer in range(self.num_layers):
            table += self._layer_parameters(layer)
        table.append(norm_spec("norm", self.hidden_size, "model.norm.weight", "output_norm.weight"))
        if not self.tied_head:
            table.append(
                ParameterSpec(
                    "head.weight", (self.vocab_size, self.hidden_size), Role.HEAD, "lm_head.weight", "output.weight"
                )
            )
        return table

    def _layer_parameters(self, layer: int) -> list[ParameterSpec]:
        hidden, inner = self.hidden_size, self.intermediate_size
        q_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        q_order = Transform("halves_from_neighbours", self.num_heads) if self.gguf_interleaved else NONE
        k_order = Transform("halves_from_neighbours", self.num_kv_heads) if self.gguf_interleaved else NONE
        own, hf, gguf = f"layers.{layer}", f"model.layers.{layer}", f"blk.{layer}"
        table = [
            norm_spec(
                f"{own}.input_norm", hidden, f"{hf}.input_layernorm.weight", f"{gguf}.attn_norm.weight", layer=layer
            ),
            norm_spec(
                f"{own}.mlp_norm",
                hidden,
                f"{hf}.post_attention_layernorm.weight",
                f"{gguf}.ffn_norm.weight",
                layer=layer,
            ),
        ]
        matrices = (
            ("q", (q_rows, hidden), "self_attn.q_proj", "attn_q", q_order, self.qkv_bias),
            ("k", (kv_rows, hidden), "self_attn.k_proj", "attn_k", k_order, self.qkv_bias),
            ("v", (kv_rows, hidden), "self_attn.v_proj", "attn_v", NONE, self.qkv_bias),
            ("o", (hidden, q_rows), "self_attn.o_proj", "attn_output", NONE, self.output_bias),
            ("gate", (inner, hidden), "mlp.gate_proj", "ffn_gate", NONE, self.mlp_bias),
            ("up", (inner, hidden), "mlp.up_proj", "ffn_up", NONE, self.mlp_bias),
            ("down", (hidden, inner), "mlp.down_proj", "ffn_down", NONE, self.mlp_bias),
        )
        for name, shape, hf_name, gguf_name, order, has_bias in matrices:
            own_name, hf_name, gguf_name = f"{own}.{name}", f"{hf}.{hf_name}", f"{gguf}.{gguf_name}"
            table.append(
                linear_spec(
                    f"{own_name}.weight",
                    shape,
                    f"{hf_name}.weight",
                    f"{gguf_name}.weight",
                    layer=layer,
                    gguf_transform=order,
                )
            )
            if has_bias:
                table.append(
                    bias_spec(
                        f"{own_name}.bias",
                        shape[0],
                        f"{hf_name}.bias",
                        f"{gguf_name}.bias",
                        layer=layer,
                        gguf_transform=order,
                    )
                )
        return table

    def caches(self, kv_dtype: torch.dtype) -> Sequence[CacheSpec]:
        """The cache table for a KV dtype."""
        return attention_caches(self.windows, self.num_kv_heads, self.head_dim, kv_dtype)


class DenseLayer:
    """One decoder layer."""

    __slots__ = ("attention", "input_norm", "mlp", "mlp_norm")

    def __init__(self, config: DenseConfig, layer: int, rotary: Rotary, parameters: Parameters) -> None:
        own = f"layers.{layer}"
        shape = AttentionShape(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            scale=config.head_dim**-0.5,
            window=config.windows[layer],
        )
        self.input_norm = RMSNorm(parameters.tensor(f"{own}.input_norm"), config.norm_eps)
        self.attention = Attention(
            shape, parameters.linear(f"{own}.q", f"{own}.k", f"{own}.v"), parameters.linear(f"{own}.o"), rotary
        )
        self.mlp_norm = RMSNorm(parameters.tensor(f"{own}.mlp_norm"), config.norm_eps)
        self.mlp = GatedMLP(
            parameters.linear(f"{own}.gate", f"{own}.up"), parameters.linear(f"{own}.down"), Activation.SILU
        )


class DenseModel:
    """The forward of a dense decoder; `taps` lists layers whose completed output a drafter reads."""

    def __init__(self, config: DenseConfig, parameters: Parameters) -> None:
        self.config = config
        rotary = Rotary(config.rope, parameters.device, factors=parameters.optional("rope_factors"))
        self.embedding = Embedding(parameters.table("embedding"), parameters.dtype)
        self.layers = [DenseLayer(config, layer, rotary, parameters) for layer in range(config.num_layers)]
        self.norm = RMSNorm(parameters.tensor("norm"), config.norm_eps)
        self.head = Head(parameters.head("head", tied_to="embedding" if config.tied_head else None))
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
            x = layer.attention(x, step, storage)
            x, residual = layer.mlp_norm.add(x, residual)
            x = layer.mlp(x)
        x, residual = self.norm.add(x, residual)
        if tapped is not None and len(self.layers) - 1 in self.taps:
            tapped.append(residual)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [L, H] -> float32 logits [L, V]."""
        return self.head(hidden)


def dense_from_gguf(metadata: Mapping[str, Any], shapes: Shapes, prefix: str, *, default_theta: float) -> DenseConfig:
    """Read the keys that Qwen2 and Llama GGUF files share."""
    values = ConfigValues(metadata, "GGUF metadata", f"{prefix}.")
    num_layers = values.integer("block_count", maximum=10_000)
    hidden = values.integer("embedding_length")
    num_heads = values.uniform_integer("attention.head_count", num_layers)
    head_dim = gguf_head_dim(values, hidden, num_heads)
    stated = values.integer("context_length", 2048, maximum=MAX_CONTEXT)
    rope = rope_from_gguf(values, head_dim=head_dim, max_context=stated, default_theta=default_theta)
    window = values.optional_integer("attention.sliding_window", minimum=0) or None
    for key, allowed in _GGUF_FEATURES.items():
        values.require(key, *allowed)
    result = DenseConfig(
        architecture=prefix,
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
        windows=(window,) * num_layers,
        tied_head="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        output_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_down.bias" in shapes,
        rope_factors="rope_freqs.weight" in shapes,
    )
    values.finish(HARMLESS_GGUF_KEYS)
    return result


_GGUF_FEATURES: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "attention.scale": (),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "use_parallel_residual": (False,),
    "logit_scale": (1.0,),
    "residual_scale": (1.0,),
    "embedding_scale": (1.0,),
}
"""Features that a file of this family may ask for and this forward does not have, with the values that mean "off"."""
