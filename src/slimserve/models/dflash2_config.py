"""DFlash2 block drafters: configuration from config.json or GGUF keys, parameter table and cache table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slimserve.errors import FormatError, RefusalError
from slimserve.layers.contract import BLOCK_TOKENS
from slimserve.layers.rotary import RopeSettings
from slimserve.models.contract import BufferSpec, CacheKind, CacheSpec, ParameterSpec, Role
from slimserve.models.geometry import Shapes, check_groups, head_dim_of, layer_windows
from slimserve.models.rope_config import rope_from_gguf, rope_from_hf
from slimserve.models.tables import linear_spec, norm_spec
from slimserve.models.values import HARMLESS_HF_KEYS, MAX_CONTEXT, ConfigValues

CONV_TAPS = 2
"""Rows that the grouped convolution mixes: a row and the one before it in its block."""


@dataclass(frozen=True, slots=True)
class DFlash2Config:
    """Shape and features of a block drafter.

    `taps` are the target's layers (0-based) whose completed outputs it reads; `windows` holds each layer's sliding
    window or None; `block_size` counts the anchor and the tokens drafted at most. `causal`: rows of a block see only
    earlier ones. `own_head`: the file brings its own output matrix.
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
    causal: bool
    taps: tuple[int, ...]
    block_size: int
    mask_token_id: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int
    embedding_scale: float
    output_multiplier: float
    softcap: float | None
    own_head: bool

    @property
    def max_draft(self) -> int:
        """Most tokens of a block behind its anchor."""
        return self.block_size - 1

    def parameters(self) -> Sequence[ParameterSpec]:
        """The parameter table."""
        hidden, vocab, rank = self.hidden_size, self.vocab_size, self.selector_rank
        table = [
            linear_spec("fc.weight", (hidden, len(self.taps) * hidden), "fc.weight", "fc.weight"),
            norm_spec("hidden_norm", hidden, "hidden_norm.weight", "enc.output_norm.weight"),
            norm_spec("norm", hidden, "norm.weight", "output_norm.weight"),
        ]
        for layer in range(self.num_layers):
            table += self._layer(layer)
        for name, gguf in (("predecessor", "selector_predecessor"), ("successor", "selector_successor")):
            table.append(
                ParameterSpec(
                    f"selector.{name}", (vocab, rank), Role.EMBEDDING, f"candidate_selector.{name}_codebook",
                    f"{gguf}.weight",
                )
            )  # fmt: skip
        table.append(
            linear_spec(
                "selector.hidden.weight", (rank, hidden), "candidate_selector.hidden_projection.weight",
                "selector_hidden.weight",
            )
        )  # fmt: skip
        if self.own_head:
            table.append(ParameterSpec("head.weight", (vocab, hidden), Role.HEAD, "lm_head.weight", "output.weight"))
        return table

    def _layer(self, layer: int) -> list[ParameterSpec]:
        hidden, inner = self.hidden_size, self.intermediate_size
        rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        own, hf, gguf = f"layers.{layer}", f"layers.{layer}", f"blk.{layer}"
        matrices = (
            ("q", (rows, hidden), "self_attn.q_proj", "attn_q"),
            ("k", (kv_rows, hidden), "self_attn.k_proj", "attn_k"),
            ("v", (kv_rows, hidden), "self_attn.v_proj", "attn_v"),
            ("o", (hidden, rows), "self_attn.o_proj", "attn_output"),
            ("gate", (inner, hidden), "mlp.gate_proj", "ffn_gate"),
            ("up", (inner, hidden), "mlp.up_proj", "ffn_up"),
            ("down", (hidden, inner), "mlp.down_proj", "ffn_down"),
        )
        norms = (
            ("input_norm", hidden, "input_layernorm", "attn_norm"),
            ("mlp_norm", hidden, "post_attention_layernorm", "ffn_norm"),
            ("q_norm", self.head_dim, "self_attn.q_norm", "attn_q_norm"),
            ("k_norm", self.head_dim, "self_attn.k_norm", "attn_k_norm"),
        )
        table = [
            linear_spec(f"{own}.{name}.weight", shape, f"{hf}.{hf_name}.weight", f"{gguf}.{gguf_name}.weight",
                        layer=layer)
            for name, shape, hf_name, gguf_name in matrices
        ]  # fmt: skip
        table += [
            norm_spec(f"{own}.{name}", size, f"{hf}.{hf_name}.weight", f"{gguf}.{gguf_name}.weight", layer=layer)
            for name, size, hf_name, gguf_name in norms
        ]
        groups = hidden // self.conv_group_size
        for name, hf_name, gguf_name in (
            ("attention_conv", "attention_conv", "attn_conv"),
            ("mlp_conv", "mlp_conv", "ffn_conv"),
        ):
            table.append(
                ParameterSpec(
                    f"{own}.{name}.base", (2, CONV_TAPS, hidden), Role.CONV, f"{hf}.{hf_name}.base_kernel",
                    f"{gguf}.{gguf_name}_base", layer, keep=torch.float32,
                )
            )  # fmt: skip
            table.append(
                linear_spec(
                    f"{own}.{name}.projection.weight", (2 * CONV_TAPS * groups, hidden),
                    f"{hf}.{hf_name}.kernel_projection.weight", f"{gguf}.{gguf_name}_proj.weight", layer=layer,
                )
            )  # fmt: skip
        return table

    def caches(self, kv_dtype: torch.dtype) -> tuple[CacheSpec, ...]:
        """The cache table with layers numbered from 0."""
        return self.drafter_caches(kv_dtype, 0)

    def drafter_caches(self, kv_dtype: torch.dtype, first_layer: int) -> tuple[CacheSpec, ...]:
        """The cache table; layers are numbered from first_layer, behind the target's."""
        page = tuple(
            BufferSpec(name, (self.num_kv_heads, BLOCK_TOKENS, self.head_dim), kv_dtype) for name in ("k", "v")
        )
        groups = []
        for window in sorted(set(self.windows), key=lambda window: window or 0):
            layers = tuple(first_layer + i for i, own in enumerate(self.windows) if own == window)
            if window is None:
                groups.append(CacheSpec("dflash2", CacheKind.ATTENTION, layers, page=page))
            else:
                groups.append(CacheSpec("dflash2_window", CacheKind.WINDOW, layers, page=page, window=window))
        return tuple(groups)


_IGNORED_HF_KEYS = (*HARMLESS_HF_KEYS, "max_window_layers", "num_target_layers", "tie_word_embeddings")


def from_hf(config: Mapping[str, Any], shapes: Shapes) -> DFlash2Config:
    """Read a config.json with a `dflash_config` object."""
    outer = ConfigValues(config, "config.json")
    section = outer.mapping("dflash_config")
    if section is None:
        raise FormatError("config.json has no dflash_config, so it does not describe a DFlash drafter")
    own = ConfigValues(section, "config.json dflash_config")
    num_layers = outer.integer("num_hidden_layers", maximum=1000)
    hidden, num_heads = outer.integer("hidden_size"), outer.integer("num_attention_heads")
    head_dim = head_dim_of(outer, hidden, num_heads)
    context = outer.integer("max_position_embeddings", 262_144, maximum=MAX_CONTEXT)
    theta = outer.number("rope_theta", 1e7, above=1.0)
    rope = rope_from_hf(
        outer.mapping("rope_parameters") or outer.mapping("rope_scaling"), theta=theta, head_dim=head_dim,
        max_context=context,
    )  # fmt: skip
    outer.raw("rope_scaling")
    window = outer.optional_integer("sliding_window")
    use_window = outer.boolean("use_sliding_window", True)
    outer.require("hidden_act", "silu")
    outer.require("attention_bias", False)
    vocab = outer.integer("vocab_size")
    _refuse_small_vocabulary(outer.optional_integer("draft_vocab_size"), vocab)
    block_size = own.optional_integer("block_size") or outer.optional_integer("block_size") or 8
    outer.raw("block_size")
    causal = own.boolean("causal", outer.boolean("is_causal", False))
    outer.raw("is_causal")
    result = DFlash2Config(
        architecture="dflash2",
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=num_layers,
        max_context=context,
        intermediate_size=outer.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=check_groups(num_heads, outer.integer("num_key_value_heads", num_heads), "config.json"),
        head_dim=head_dim,
        norm_eps=outer.number("rms_norm_eps", 1e-6),
        rope=rope,
        windows=layer_windows(outer, num_layers, window, (use_window and window is not None,) * num_layers),
        causal=causal,
        taps=_taps(own.raw("target_layer_ids"), "config.json: dflash_config.target_layer_ids", 0),
        block_size=block_size,
        mask_token_id=own.integer("mask_token_id", minimum=0),
        conv_group_size=own.integer("conv_group_size", 16),
        selector_rank=own.integer("selector_rank", 0, minimum=0),
        selector_top_k=own.integer("selector_top_k", 16),
        embedding_scale=own.number("input_embedding_scale", outer.number("input_embedding_scale", 1.0)),
        output_multiplier=own.number("output_multiplier", outer.number("output_multiplier", 1.0)),
        softcap=own.optional_number("final_logit_softcapping") or outer.optional_number("final_logit_softcapping"),
        own_head="lm_head.weight" in shapes,
    )
    outer.raw("final_logit_softcapping")
    own.require("conv_kernel_size", CONV_TAPS)
    own.finish(())
    outer.finish(_IGNORED_HF_KEYS)
    return _checked(result)


def from_gguf(metadata: Mapping[str, Any], shapes: Shapes) -> DFlash2Config:
    """Read the `dflash.*` keys of a GGUF file; its target_layers count from 1 (the input of the next layer)."""
    values = ConfigValues(metadata, "GGUF metadata", "dflash.")
    num_layers = values.integer("block_count", maximum=1000)
    num_heads = values.integer("attention.head_count")
    head_dim = values.integer("attention.key_length", 128)
    values.require("attention.value_length", head_dim)
    context = values.integer("context_length", 262_144, maximum=MAX_CONTEXT)
    window = values.optional_integer("attention.sliding_window", minimum=0) or None
    pattern = values.raw("attention.sliding_window_pattern")
    sliding = [bool(kind) for kind in pattern] if isinstance(pattern, list) else [window is not None] * num_layers
    if len(sliding) != num_layers:
        raise FormatError(f"GGUF metadata: dflash.attention.sliding_window_pattern must list {num_layers} layers")
    fc = shapes.get("selector_predecessor.weight", (0, 0))
    result = DFlash2Config(
        architecture="dflash2",
        vocab_size=fc[0],
        hidden_size=values.integer("embedding_length"),
        num_layers=num_layers,
        max_context=context,
        intermediate_size=values.integer("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=check_groups(num_heads, values.integer("attention.head_count_kv", num_heads), "GGUF metadata"),
        head_dim=head_dim,
        norm_eps=values.number("attention.layer_norm_rms_epsilon", 1e-6),
        rope=rope_from_gguf(values, head_dim=head_dim, max_context=context, default_theta=1e7),
        windows=tuple(window if slides else None for slides in sliding),
        causal=values.boolean("attention.causal", False),
        taps=_taps(values.raw("target_layers"), "GGUF metadata: dflash.target_layers", 1),
        block_size=values.integer("block_size", 8),
        mask_token_id=ConfigValues(metadata, "GGUF metadata").integer("tokenizer.ggml.mask_token_id", minimum=0),
        conv_group_size=values.integer("conv_group_size", 16),
        selector_rank=values.integer("selector_rank", 0, minimum=0),
        selector_top_k=values.integer("selector_top_k", 16),
        embedding_scale=values.number("embedding_scale", 1.0),
        output_multiplier=values.number("logit_scale", 1.0),
        softcap=values.optional_number("final_logit_softcapping"),
        own_head="output.weight" in shapes,
    )
    values.require("conv_kernel_size", CONV_TAPS)
    values.require("expert_count", 0)
    values.finish(("tensor_data_layout", "vocab_size"))
    return _checked(result)


def _taps(value: Any, where: str, base: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(layer, int) for layer in value):
        raise FormatError(f"{where} must list the target's layers whose outputs the drafter reads")
    taps = tuple(layer - base for layer in value)
    if taps[0] < 0 or list(taps) != sorted(set(taps)):
        raise RefusalError(f"{where} is {value}; layers must rise, each at least {base}")
    return taps


def _refuse_small_vocabulary(draft_vocab_size: int | None, vocab_size: int) -> None:
    if draft_vocab_size not in (None, vocab_size):
        raise RefusalError(
            f"config.json: a draft vocabulary of {draft_vocab_size} of {vocab_size} tokens is not supported; use a "
            "drafter with the target's whole vocabulary"
        )


def _checked(config: DFlash2Config) -> DFlash2Config:
    if not config.selector_rank:
        raise RefusalError(
            "the drafter has no candidate selector (DFlash 1), which is not supported; use a DFlash2 one"
        )
    if config.hidden_size % config.conv_group_size:
        raise FormatError(
            f"hidden size {config.hidden_size} is no multiple of the convolution's groups of {config.conv_group_size}"
        )
    if config.block_size < 2:
        raise FormatError(f"block_size is {config.block_size}; a block is an anchor and at least one draft")
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise FormatError(f"mask_token_id {config.mask_token_id} is not in the vocabulary of {config.vocab_size}")
    return config
