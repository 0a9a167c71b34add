"""Qwen3.5, 3.6 and 3.8 dense hybrids: gated delta net layers with a gated full-attention layer every few.

HF names norms by w with a factor (1 + w); GGUF has the one folded in, the value heads tiled and -exp(A_log) stored.
Tiled value heads are kept as they are: head h reads key head h mod Hk, so no packed row or column moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slimserve import ops
from slimserve.errors import FormatError, RefusalError
from slimserve.layers.attention import AttentionShape
from slimserve.layers.contract import BLOCK_TOKENS, Caches, LayerCache, StepInput
from slimserve.layers.embedding import Embedding, Head
from slimserve.layers.gated_attention import GatedAttention
from slimserve.layers.linear_attention import GatedDeltaNet, RecurrentShape
from slimserve.layers.mlp import Activation, GatedMLP
from slimserve.layers.norm import RMSNorm
from slimserve.layers.rotary import RopeSettings, Rotary
from slimserve.models.contract import BufferSpec, CacheKind, CacheSpec, ParameterSpec, Role, Transform
from slimserve.models.geometry import Shapes, gguf_vocab_size
from slimserve.models.parameters import Parameters
from slimserve.models.recurrent import recurrent_cache
from slimserve.models.tables import linear_spec, norm_spec
from slimserve.models.values import HARMLESS_HF_KEYS, MAX_CONTEXT, ConfigValues

ADD_ONE = Transform("add_one")
SQUEEZE = Transform("squeeze", 1)
NEGATIVE_EXP = Transform("negative_exp")


@dataclass(frozen=True, slots=True)
class Qwen35Config:
    """Shape and features; `full_layers` are the full-attention layers, `num_nextn` the MTP layers that the file holds.

    `hf_prefix` is what stands before "layers." in a safetensors name.
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
    rope_sections: tuple[int, ...]
    recurrent: RecurrentShape
    conv_width: int
    full_layers: tuple[int, ...]
    tied_head: bool
    num_nextn: int
    hf_prefix: str = "model.language_model"

    def parameters(self) -> Sequence[ParameterSpec]:
        """The parameter table."""
        hidden, hf = self.hidden_size, self.hf_prefix
        table = [
            ParameterSpec(
                "embedding", (self.vocab_size, hidden), Role.EMBEDDING, f"{hf}.embed_tokens.weight", "token_embd.weight"
            )
        ]
        for layer in range(self.num_layers):
            own, name, gguf = f"layers.{layer}", f"{hf}.layers.{layer}", f"blk.{layer}"
            table += self._norms_and_mlp(own, name, gguf, layer)
            if layer in self.full_layers:
                table += self._attention(own, name, gguf, layer)
            else:
                table += self._recurrent(own, name, gguf, layer)
        table.append(norm_spec("norm", hidden, f"{hf}.norm.weight", "output_norm.weight", hf_transform=ADD_ONE))
        if not self.tied_head:
            table.append(
                ParameterSpec("head.weight", (self.vocab_size, hidden), Role.HEAD, "lm_head.weight", "output.weight")
            )
        for index in range(self.num_nextn):
            table += self._nextn(index)
        return table

    def _norms_and_mlp(self, own: str, hf: str, gguf: str, layer: int) -> list[ParameterSpec]:
        hidden, inner = self.hidden_size, self.intermediate_size
        matrices = (
            ("gate", (inner, hidden), "mlp.gate_proj", "ffn_gate"),
            ("up", (inner, hidden), "mlp.up_proj", "ffn_up"),
            ("down", (hidden, inner), "mlp.down_proj", "ffn_down"),
        )
        return [
            norm_spec(
                f"{own}.input_norm", hidden, f"{hf}.input_layernorm.weight", f"{gguf}.attn_norm.weight",
                layer=layer, hf_transform=ADD_ONE,
            ),
            norm_spec(
                f"{own}.mlp_norm", hidden, f"{hf}.post_attention_layernorm.weight",
                f"{gguf}.post_attention_norm.weight", layer=layer, hf_transform=ADD_ONE,
            ),
            *_matrices(own, hf, gguf, layer, matrices),
        ]  # fmt: skip

    def _attention(self, own: str, hf: str, gguf: str, layer: int) -> list[ParameterSpec]:
        hidden, rows, kv_rows = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        matrices = (
            ("q", (2 * rows, hidden), "self_attn.q_proj", "attn_q"),
            ("k", (kv_rows, hidden), "self_attn.k_proj", "attn_k"),
            ("v", (kv_rows, hidden), "self_attn.v_proj", "attn_v"),
            ("o", (hidden, rows), "self_attn.o_proj", "attn_output"),
        )
        norms = [
            norm_spec(
                f"{own}.{name}_norm", self.head_dim, f"{hf}.self_attn.{name}_norm.weight",
                f"{gguf}.attn_{name}_norm.weight", layer=layer, hf_transform=ADD_ONE,
            )
            for name in ("q", "k")
        ]  # fmt: skip
        return [*_matrices(own, hf, gguf, layer, matrices), *norms]

    def _recurrent(self, own: str, hf: str, gguf: str, layer: int) -> list[ParameterSpec]:
        hidden, shape = self.hidden_size, self.recurrent
        value_rows = shape.heads * shape.value_dim
        matrices = (
            ("qkv", (shape.conv_dim, hidden), "linear_attn.in_proj_qkv", "attn_qkv"),
            ("z", (value_rows, hidden), "linear_attn.in_proj_z", "attn_gate"),
            ("b", (shape.heads, hidden), "linear_attn.in_proj_b", "ssm_beta"),
            ("a", (shape.heads, hidden), "linear_attn.in_proj_a", "ssm_alpha"),
            ("out", (hidden, value_rows), "linear_attn.out_proj", "ssm_out"),
        )

        def small(name: str, extents: tuple[int, ...], role: Role, hf_name: str, gguf_name: str, order: Transform):
            return ParameterSpec(
                f"{own}.{name}", extents, role, f"{hf}.linear_attn.{hf_name}", f"{gguf}.{gguf_name}", layer,
                keep=torch.float32, hf_transform=order,
            )  # fmt: skip

        none = Transform()
        return [
            *_matrices(own, hf, gguf, layer, matrices),
            small("conv", (shape.conv_dim, self.conv_width), Role.CONV, "conv1d.weight", "ssm_conv1d.weight", SQUEEZE),
            small("decay_rate", (shape.heads,), Role.SMALL, "A_log", "ssm_a", NEGATIVE_EXP),
            small("dt_bias", (shape.heads,), Role.SMALL, "dt_bias", "ssm_dt.bias", none),
            small("norm", (shape.value_dim,), Role.NORM, "norm.weight", "ssm_norm.weight", none),
        ]

    def _nextn(self, index: int) -> list[ParameterSpec]:
        layer, hidden = self.num_layers + index, self.hidden_size
        own, hf, gguf = f"mtp.{index}", f"mtp.layers.{index}", f"blk.{layer}"
        head = f"{gguf}.nextn"
        return [
            *self._norms_and_mlp(own, hf, gguf, layer),
            *self._attention(own, hf, gguf, layer),
            linear_spec(
                f"{own}.fc.weight", (hidden, 2 * hidden), "mtp.fc.weight", f"{head}.eh_proj.weight", layer=layer
            ),
            *(
                norm_spec(f"{own}.{name}", hidden, f"mtp.{hf_name}.weight", f"{head}.{gguf_name}.weight",
                          layer=layer, hf_transform=ADD_ONE)
                for name, hf_name, gguf_name in (
                    ("embedding_norm", "pre_fc_norm_embedding", "enorm"),
                    ("hidden_norm", "pre_fc_norm_hidden", "hnorm"),
                    ("norm", "norm", "shared_head_norm"),
                )
            ),
        ]  # fmt: skip

    def caches(self, kv_dtype: torch.dtype) -> Sequence[CacheSpec]:
        """The cache table of the trunk for a KV dtype."""
        recurrent_layers = tuple(layer for layer in range(self.num_layers) if layer not in self.full_layers)
        groups = []
        if self.full_layers:
            groups.append(CacheSpec("attention", CacheKind.ATTENTION, self.full_layers, page=self._page(kv_dtype)))
        if recurrent_layers:
            groups.append(recurrent_cache(recurrent_layers, self.recurrent, self.conv_width, per_channel=False))
        return tuple(groups)

    def drafter_caches(self, kv_dtype: torch.dtype) -> Sequence[CacheSpec]:
        """The cache table of the MTP layers, which follow the trunk's."""
        layers = tuple(range(self.num_layers, self.num_layers + self.num_nextn))
        return (CacheSpec("mtp", CacheKind.ATTENTION, layers, page=self._page(kv_dtype)),) if layers else ()

    def _page(self, kv_dtype: torch.dtype) -> tuple[BufferSpec, ...]:
        return tuple(
            BufferSpec(name, (self.num_kv_heads, BLOCK_TOKENS, self.head_dim), kv_dtype) for name in ("k", "v")
        )


def _matrices(
    own: str, hf: str, gguf: str, layer: int, rows: Sequence[tuple[str, tuple[int, int], str, str]]
) -> list[ParameterSpec]:
    return [
        linear_spec(f"{own}.{name}.weight", shape, f"{hf}.{hf_name}.weight", f"{gguf}.{gguf_name}.weight", layer=layer)
        for name, shape, hf_name, gguf_name in rows
    ]


class Qwen35Block:
    """One decoder layer: a mixer (gated delta net or gated attention) and an MLP, pre-norm residuals."""

    def __init__(self, config: Qwen35Config, own: str, full: bool, rotary: Rotary, parameters: Parameters) -> None:
        self.input_norm = RMSNorm(parameters.tensor(f"{own}.input_norm"), config.norm_eps)
        self.attention = _attention(config, own, rotary, parameters) if full else None
        self.recurrent = None if full else _recurrent(config, own, parameters)
        self.mlp_norm = RMSNorm(parameters.tensor(f"{own}.mlp_norm"), config.norm_eps)
        self.mlp = GatedMLP(
            parameters.linear(f"{own}.gate", f"{own}.up"), parameters.linear(f"{own}.down"), Activation.SILU
        )

    def __call__(self, x: torch.Tensor, step: StepInput, cache: LayerCache) -> torch.Tensor:
        """Mixer of normalised x [T, H] -> [T, H]."""
        if self.attention is not None:
            assert cache.attention is not None, "the cache table names attention storage for full layers"
            return self.attention(x, step, cache.attention)
        assert self.recurrent is not None and cache.recurrent is not None, "other layers are recurrent"
        return self.recurrent(x, step, cache.recurrent)


def _attention(config: Qwen35Config, own: str, rotary: Rotary, parameters: Parameters) -> GatedAttention:
    return GatedAttention(
        AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, scale=config.head_dim**-0.5),
        parameters.linear(f"{own}.q", f"{own}.k", f"{own}.v"),
        parameters.linear(f"{own}.o"),
        rotary,
        RMSNorm(parameters.tensor(f"{own}.q_norm"), config.norm_eps),
        RMSNorm(parameters.tensor(f"{own}.k_norm"), config.norm_eps),
    )


def _recurrent(config: Qwen35Config, own: str, parameters: Parameters) -> GatedDeltaNet:
    return GatedDeltaNet(
        config.recurrent,
        parameters.linear(f"{own}.qkv"),
        parameters.linear(f"{own}.z"),
        parameters.linear(f"{own}.b", f"{own}.a"),
        parameters.tensor(f"{own}.conv"),
        parameters.tensor(f"{own}.decay_rate"),
        parameters.tensor(f"{own}.dt_bias"),
        RMSNorm(parameters.tensor(f"{own}.norm"), config.norm_eps),
        parameters.linear(f"{own}.out"),
    )


class Qwen35Model:
    """The forward of the trunk; `taps` lists layers whose completed output a drafter reads."""

    def __init__(self, config: Qwen35Config, parameters: Parameters) -> None:
        self.config = config
        rotary = Rotary(config.rope, parameters.device, sections=config.rope_sections)
        self.embedding = Embedding(parameters.table("embedding"), parameters.dtype)
        self.layers = [
            Qwen35Block(config, f"layers.{layer}", layer in config.full_layers, rotary, parameters)
            for layer in range(config.num_layers)
        ]
        self.norm = RMSNorm(parameters.tensor("norm"), config.norm_eps)
        self.head = Head(parameters.head("head", tied_to="embedding" if config.tied_head else None))
        self.nextn = [Qwen35NextN(config, index, rotary, self, parameters) for index in range(config.num_nextn)]
        self.taps: tuple[int, ...] = ()

    def __call__(self, step: StepInput, caches: Caches, tapped: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Hidden states after the final norm [T, H]; appends the output [T, H] of each layer in `taps` to `tapped`."""
        residual = self.embedding(step.token_ids)  # [T, H]
        x = self.layers[0].input_norm(residual)
        for index, layer in enumerate(self.layers):
            x, residual = layer.mlp_norm.add(layer(x, step, caches[index]), residual)
            x = layer.mlp(x)
            following = self.layers[index + 1].input_norm if index + 1 < len(self.layers) else self.norm
            x, residual = following.add(x, residual)
            if tapped is not None and index in self.taps:
                tapped.append(residual)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [L, H] -> float32 logits [L, V]."""
        return self.head(hidden)


class Qwen35NextN:
    """One MTP layer: fc(cat(norm_e(embed(next token)), norm_h(h))) through a full-attention block, then a norm.

    h is the trunk's state after its final norm; embedding and head are the trunk's.
    """

    def __init__(
        self, config: Qwen35Config, index: int, rotary: Rotary, trunk: Qwen35Model, parameters: Parameters
    ) -> None:
        own = f"mtp.{index}"
        self.layer_index = config.num_layers + index
        self.embedding = trunk.embedding
        self.block = Qwen35Block(config, own, True, rotary, parameters)
        self.fc = parameters.linear(f"{own}.fc")
        self.embedding_norm = RMSNorm(parameters.tensor(f"{own}.embedding_norm"), config.norm_eps)
        self.hidden_norm = RMSNorm(parameters.tensor(f"{own}.hidden_norm"), config.norm_eps)
        self.norm = RMSNorm(parameters.tensor(f"{own}.norm"), config.norm_eps)

    def __call__(
        self, next_token_ids: torch.Tensor, hidden: torch.Tensor, step: StepInput, caches: Caches
    ) -> torch.Tensor:
        """next_token_ids [T] (token at position + 1), hidden [T, H] -> normalised draft hidden [T, H]."""
        joined = torch.cat(
            [self.embedding_norm(self.embedding(next_token_ids)), self.hidden_norm(hidden)], dim=1
        )  # [T, 2 H]
        residual = ops.linear(joined, self.fc)
        x = self.block.input_norm(residual)
        x, residual = self.block.mlp_norm.add(self.block(x, step, caches[self.layer_index]), residual)
        return self.norm.add(self.block.mlp(x), residual)[0]


_IGNORED_HF_KEYS = (
    *HARMLESS_HF_KEYS,
    "mamba_ssm_dtype",
    "mtp_use_dedicated_embeddings",
    "pad_token_id",
    "mlp_only_layers",
)


def from_hf(config: Mapping[str, Any], shapes: Shapes) -> Qwen35Config:
    """Read a config.json of model_type qwen3_5 (with a text_config) or qwen3_5_text (flat)."""
    outer = ConfigValues(config, "config.json")
    text = outer.mapping("text_config") or config
    values = ConfigValues(text, "config.json text_config" if text is not config else "config.json")
    num_layers = values.integer("num_hidden_layers", maximum=10_000)
    num_heads = values.integer("num_attention_heads")
    head_dim = values.integer("head_dim", 256)
    interval = values.integer("full_attention_interval", 4)
    kinds = values.raw("layer_types")
    if kinds is None:
        kinds = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(num_layers)]
    full_layers = _full_layers(kinds, num_layers)
    rope, sections = _rope_from_hf(values, head_dim)
    values.require("hidden_act", "silu")
    values.require("attention_bias", False)
    values.require("attn_output_gate", True)
    prefix = "model.language_model" if any(name.startswith("model.language_model.") for name in shapes) else "model"
    stated_nextn = values.optional_integer("mtp_num_hidden_layers", minimum=0) or 0
    result = Qwen35Config(
        architecture="qwen3_5",
        vocab_size=values.integer("vocab_size"),
        hidden_size=values.integer("hidden_size"),
        num_layers=num_layers,
        max_context=values.integer("max_position_embeddings", 262_144, maximum=MAX_CONTEXT),
        intermediate_size=values.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=values.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        norm_eps=values.number("rms_norm_eps", 1e-6),
        rope=rope,
        rope_sections=sections,
        recurrent=_recurrent_shape(
            values.integer("linear_num_key_heads", 16),
            values.integer("linear_num_value_heads", 32),
            values.integer("linear_key_head_dim", 128),
            values.integer("linear_value_head_dim", 128),
        ),
        conv_width=values.integer("linear_conv_kernel_dim", 4, maximum=8),
        full_layers=full_layers,
        tied_head=values.boolean("tie_word_embeddings", False) and "lm_head.weight" not in shapes,
        num_nextn=stated_nextn if any(name.startswith("mtp.") for name in shapes) else 0,
        hf_prefix=prefix,
    )
    if result.num_nextn > 1:
        raise RefusalError(f"config.json: mtp_num_hidden_layers {result.num_nextn} is not supported; only 1 is")
    values.finish(_IGNORED_HF_KEYS)
    return result


def _full_layers(kinds: Any, num_layers: int) -> tuple[int, ...]:
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise FormatError(f"config.json: layer_types must list {num_layers} layers")
    unknown = sorted({str(kind) for kind in kinds} - {"full_attention", "linear_attention"})
    if unknown:
        raise RefusalError(f"config.json: layer type {unknown[0][:40]!r} is not supported for qwen3_5")
    return tuple(index for index, kind in enumerate(kinds) if kind == "full_attention")


def _recurrent_shape(key_heads: int, heads: int, key_dim: int, value_dim: int, tiled: bool = False) -> RecurrentShape:
    if heads % key_heads:
        raise FormatError(f"{heads} value heads are no multiple of {key_heads} key heads")
    return RecurrentShape(key_heads, heads, key_dim, value_dim, tiled)


def _rope_from_hf(values: ConfigValues, head_dim: int) -> tuple[RopeSettings, tuple[int, ...]]:
    section = values.mapping("rope_parameters") or values.mapping("rope_scaling") or {}
    values.raw("rope_scaling")
    rope = ConfigValues(section, "config.json rope_parameters")
    rope.require("rope_type", "default")
    rope.require("type", "default")
    fraction = rope.number("partial_rotary_factor", values.number("partial_rotary_factor", 0.25))
    theta = rope.number("rope_theta", values.number("rope_theta", 1e7))
    sections = rope.raw("mrope_section") or []
    rope.require("mrope_interleaved", True)
    rope.finish()
    return RopeSettings(theta, int(head_dim * fraction)), _sections(sections, "config.json mrope_section")


def _sections(stated: Any, where: str) -> tuple[int, ...]:
    """Pairs of the three rotary axes; a fourth of zero (as GGUF writes it) is dropped, none means text only."""
    entries: list[Any] = list(stated) if isinstance(stated, Sequence) and not isinstance(stated, str) else [None]
    valid = all(isinstance(entry, int) and 0 <= entry < 1 << 16 for entry in entries)
    if not valid or (entries and (len(entries) not in (3, 4) or any(entries[3:]))):
        raise FormatError(f"{where} is {str(stated)[:60]}, expected three whole numbers")
    return tuple(entries[:3])


def from_gguf(metadata: Mapping[str, Any], shapes: Shapes) -> Qwen35Config:
    """Read the `qwen35.*` keys of a GGUF file."""
    values = ConfigValues(metadata, "GGUF metadata", "qwen35.")
    nextn = values.integer("nextn_predict_layers", 0, minimum=0)
    blocks = values.integer("block_count", maximum=10_000)
    num_layers = blocks - nextn
    if num_layers < 1:
        raise FormatError(f"GGUF metadata: {blocks} blocks with {nextn} nextn layers leave no model")
    interval = values.integer("full_attention_interval", 4)
    recurrent_layers = values.raw("attention.recurrent_layers")
    if recurrent_layers is None:
        full = tuple(i for i in range(num_layers) if (i + 1) % interval == 0)
    else:
        full = tuple(i for i in range(num_layers) if not recurrent_layers[i])
    key_dim = values.integer("ssm.state_size", 128)
    heads = values.integer("ssm.time_step_rank")
    inner = values.integer("ssm.inner_size")
    if inner % heads:
        raise FormatError(f"GGUF metadata: ssm.inner_size {inner} is no multiple of {heads} value heads")
    head_dim = values.integer("attention.key_length", 256)
    values.require("attention.value_length", head_dim)
    sections = values.raw("rope.dimension_sections") or []
    result = Qwen35Config(
        architecture="qwen35",
        vocab_size=gguf_vocab_size(values, shapes),
        hidden_size=values.integer("embedding_length"),
        num_layers=num_layers,
        max_context=values.integer("context_length", 262_144, maximum=MAX_CONTEXT),
        intermediate_size=values.uniform_integer("feed_forward_length", blocks),
        num_heads=values.uniform_integer("attention.head_count", blocks),
        num_kv_heads=_kv_heads(values, blocks),
        head_dim=head_dim,
        norm_eps=values.number("attention.layer_norm_rms_epsilon", 1e-6),
        rope=RopeSettings(values.number("rope.freq_base", 1e7), values.integer("rope.dimension_count", head_dim // 4)),
        rope_sections=_sections(sections, "GGUF metadata: qwen35.rope.dimension_sections"),
        recurrent=_recurrent_shape(values.integer("ssm.group_count"), heads, key_dim, inner // heads, tiled=True),
        conv_width=values.integer("ssm.conv_kernel", 4, maximum=8),
        full_layers=full,
        tied_head="output.weight" not in shapes,
        num_nextn=nextn if f"blk.{num_layers}.nextn.eh_proj.weight" in shapes else 0,
    )
    if result.num_nextn > 1:
        raise RefusalError(f"GGUF metadata: {result.num_nextn} nextn layers are not supported; only 1 is")
    values.finish(("tensor_data_layout",))
    return result


def _kv_heads(values: ConfigValues, blocks: int) -> int:
    """Key-value heads of the attention layers; recurrent layers may state 0."""
    counts = {count for count in values.per_layer_integer("attention.head_count_kv", blocks) if count}
    if len(counts) != 1:
        raise RefusalError(f"GGUF metadata: attention.head_count_kv differs between layers ({sorted(counts)})")
    return counts.pop()
