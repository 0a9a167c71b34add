"""glm5_next's configuration: what config.json and the two GGUF forms say, its parameter table and its cache table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slimserve.errors import FormatError, RefusalError
from slimserve.layers.contract import BLOCK_TOKENS
from slimserve.layers.latent_attention import LatentShape
from slimserve.layers.linear_attention import RecurrentShape
from slimserve.models import glm5_names as names
from slimserve.models.contract import BufferSpec, CacheKind, CacheSpec, ParameterSpec, Role, Transform
from slimserve.models.geometry import Shapes, gguf_vocab_size
from slimserve.models.glm5_names import Name, Naming
from slimserve.models.recurrent import MAX_DRAFT_TOKENS, recurrent_cache
from slimserve.models.values import HARMLESS_HF_KEYS, MAX_CONTEXT, ConfigValues

SQUEEZE = Transform("squeeze", 1)
NEGATIVE_EXP = Transform("negative_exp")
NONE = Transform()


@dataclass(frozen=True, slots=True)
class Glm5Config:
    """Shape and features of GLM-5.3-Flash models.

    `latent_layers` are the sparse latent-attention layers, all others are KDA; `indexer_layers` those of them with an
    indexer of their own; `dense_layers` those with a dense feed-forward. `num_nextn` MTP layers follow the trunk.
    `lower_bound` None selects the unbounded decay. `top_pools` pools of `pool` tokens are attended to.
    """

    architecture: str
    naming: Naming
    hf_prefix: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_context: int
    norm_eps: float
    latent: LatentShape
    q_lora_rank: int
    recurrent: RecurrentShape
    conv_width: int
    lower_bound: float | None
    latent_layers: tuple[int, ...]
    indexer_layers: tuple[int, ...]
    dense_layers: tuple[int, ...]
    index_heads: int
    index_dim: int
    top_pools: int
    pool: int
    intermediate_size: int
    expert_size: int
    shared_size: int
    num_experts: int
    top_k: int
    scaling: float
    normalise: bool
    limit: float | None
    streams: int
    hyper_eps: float
    sinkhorn_iterations: int
    tied_head: bool
    num_nextn: int

    def parameters(self) -> Sequence[ParameterSpec]:
        """The parameter table."""
        hidden, hf = self.hidden_size, self.hf_prefix
        table = [
            ParameterSpec(
                "embedding", (self.vocab_size, hidden), Role.EMBEDDING, f"{hf}.embed_tokens.weight", "token_embd.weight"
            ),
            ParameterSpec(
                "norm", (hidden,), Role.NORM, f"{hf}.norm.weight", "output_norm.weight", keep=torch.float32
            ),
        ]  # fmt: skip
        if not self.tied_head:
            table.append(
                ParameterSpec("head.weight", (self.vocab_size, hidden), Role.HEAD, "lm_head.weight", "output.weight")
            )
        for layer in range(self.num_layers):
            table += self._layer(layer)
            table += self._hyper(layer)
        for layer in range(self.num_layers, self.num_layers + self.num_nextn):
            table += self._layer(layer)
            table += self._nextn(layer)
        return table

    def _spec(
        self, layer: int, name: str, key: Name, shape: tuple[int, ...], role: Role = Role.LINEAR, *,
        hf_transform: Transform = NONE, gguf_transform: Transform = NONE, keep: torch.dtype | None = None,
    ) -> ParameterSpec:  # fmt: skip
        if role not in (Role.LINEAR, Role.EXPERT):
            keep = torch.float32
        return ParameterSpec(
            f"layers.{layer}.{name}", shape, role, f"{self.hf_prefix}.layers.{layer}.{key.hf}",
            f"blk.{layer}.{key.gguf(self.naming)}", layer, keep=keep,
            hf_transform=hf_transform, gguf_transform=gguf_transform,
        )  # fmt: skip

    def _layer(self, layer: int) -> list[ParameterSpec]:
        hidden = (self.hidden_size,)
        table = [self._spec(layer, name, key, hidden, Role.NORM) for name, key in names.NORMS.items()]
        is_latent = layer in self.latent_layers or layer >= self.num_layers
        table += self._latent(layer) if is_latent else self._kda(layer)
        return table + (self._dense(layer) if layer in self.dense_layers else self._moe(layer))

    def _kda(self, layer: int) -> list[ParameterSpec]:
        hidden, shape = self.hidden_size, self.recurrent
        rows, rank = shape.heads * shape.key_dim, shape.key_dim
        shapes: dict[str, tuple[int, ...]] = {
            "q": (rows, hidden), "k": (rows, hidden), "v": (rows, hidden), "f_a": (rank, hidden), "f_b": (rows, rank),
            "g_a": (rank, hidden), "g_b": (rows, rank), "beta": (shape.heads, hidden), "o": (hidden, rows),
        }  # fmt: skip
        table = [self._spec(layer, f"{name}.weight", names.KDA[name], extents) for name, extents in shapes.items()]
        for name in ("q_conv", "k_conv", "v_conv"):
            table.append(
                self._spec(layer, name, names.KDA[name], (rows, self.conv_width), Role.CONV,
                           hf_transform=SQUEEZE, gguf_transform=SQUEEZE)
            )  # fmt: skip
        raw = NEGATIVE_EXP if self.naming is Naming.DS4 else NONE
        return [
            *table,
            self._spec(layer, "dt_bias", names.KDA["dt_bias"], (rows,), Role.SMALL),
            self._spec(layer, "decay_rate", names.KDA["decay_rate"], (shape.heads,), Role.SMALL,
                       hf_transform=NEGATIVE_EXP, gguf_transform=raw),
            self._spec(layer, "o_norm", names.KDA["o_norm"], (shape.value_dim,), Role.NORM),
        ]  # fmt: skip

    def _latent(self, layer: int) -> list[ParameterSpec]:
        hidden, shape = self.hidden_size, self.latent
        heads, rank = shape.num_heads, self.q_lora_rank
        shapes: dict[str, tuple[int, ...]] = {
            "q_a": (rank, hidden), "q_b": (heads * shape.qk_dim, rank), "kv_a": (shape.latent_dim, hidden),
            "o": (hidden, heads * shape.value_dim),
        }  # fmt: skip
        if self.naming is Naming.HF:
            shapes["kv_b"] = (heads * (shape.qk_dim + shape.value_dim), shape.latent_dim)
        else:
            shapes["k_b"] = (heads, shape.latent_dim, shape.qk_dim)
            shapes["v_b"] = (heads, shape.value_dim, shape.latent_dim)
        table = [self._spec(layer, f"{name}.weight", names.LATENT[name], extents) for name, extents in shapes.items()]
        table.append(self._spec(layer, "q_a_norm", names.LATENT["q_a_norm"], (rank,), Role.NORM))
        table.append(self._spec(layer, "kv_a_norm", names.LATENT["kv_a_norm"], (shape.latent_dim,), Role.NORM))
        return table + (self._indexer(layer) if self.has_indexer(layer) else [])

    def has_indexer(self, layer: int) -> bool:
        """Whether a latent layer scores pools itself; MTP layers always do."""
        return layer in self.indexer_layers or layer >= self.num_layers

    def _indexer(self, layer: int) -> list[ParameterSpec]:
        dim, hidden = self.index_dim, self.hidden_size
        table = [
            ("q_b.weight", "q_b", (self.index_heads * dim, self.q_lora_rank), Role.LINEAR),
            ("k.weight", "k", (dim, hidden), Role.LINEAR),
            ("k_norm", "k_norm", (dim,), Role.NORM),
            ("k_norm_bias", "k_norm_bias", (dim,), Role.BIAS),
            ("head_weights.weight", "head_weights", (self.index_heads, hidden), Role.LINEAR),
            ("ape", "ape", (self.pool, dim), Role.SMALL),
            ("gate.weight", "gate", (dim, hidden), Role.LINEAR),
        ]
        return [self._spec(layer, f"indexer.{own}", names.INDEXER[key], shape, role) for own, key, shape, role in table]

    def _dense(self, layer: int) -> list[ParameterSpec]:
        return self._mlp(layer, "", names.DENSE, self.intermediate_size)

    def _mlp(self, layer: int, prefix: str, keys: Mapping[str, Name], inner: int) -> list[ParameterSpec]:
        hidden = self.hidden_size
        shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        return [self._spec(layer, f"{prefix}{part}.weight", keys[part], shape) for part, shape in shapes.items()]

    def _moe(self, layer: int) -> list[ParameterSpec]:
        hidden, inner, count = self.hidden_size, self.expert_size, self.num_experts
        shapes = {"gate": (count, inner, hidden), "up": (count, inner, hidden), "down": (count, hidden, inner)}
        stack = Transform("stack_experts", count)
        table = [
            self._spec(layer, f"experts.{part}", names.EXPERTS[part], shape, Role.EXPERT, hf_transform=stack)
            for part, shape in shapes.items()
        ]
        table.append(self._spec(layer, "router.weight", names.ROUTER["router"], (count, hidden), Role.ROUTER))
        table.append(self._spec(layer, "router_bias", names.ROUTER["router_bias"], (count,), Role.ROUTER))
        return table + (self._mlp(layer, "shared.", names.SHARED, self.shared_size) if self.shared_size else [])

    def _hyper(self, layer: int) -> list[ParameterSpec]:
        rows = (2 + self.streams) * self.streams
        shapes = {"fn": (rows, self.streams * self.hidden_size), "base": (rows,), "scale": (3,)}
        table = []
        for name, key in names.HYPER.items():
            part = name.rpartition(".")[2]
            role = Role.LINEAR if part == "fn" else Role.SMALL
            own = f"{name}.weight" if part == "fn" else name
            table.append(self._spec(layer, own, key, shapes[part], role))
        return table

    def _nextn(self, layer: int) -> list[ParameterSpec]:
        hidden = self.hidden_size
        table = [self._spec(layer, "eh.weight", names.NEXTN["eh"], (hidden, 2 * hidden))]
        for name in ("embedding_norm", "hidden_norm", "norm"):
            table.append(self._spec(layer, name, names.NEXTN[name], (hidden,), Role.NORM))
        return table

    def caches(self, kv_dtype: torch.dtype) -> Sequence[CacheSpec]:
        """The cache table of the trunk for a KV dtype."""
        kda_layers = tuple(layer for layer in range(self.num_layers) if layer not in self.latent_layers)
        groups = list(self._sparse_caches("", self.latent_layers, self.indexer_layers, kv_dtype))
        if kda_layers:
            groups.append(recurrent_cache(kda_layers, self.recurrent, self.conv_width, per_channel=True))
        return tuple(groups)

    def drafter_caches(self, kv_dtype: torch.dtype) -> Sequence[CacheSpec]:
        """The cache table of the MTP layers, which follow the trunk's."""
        layers = tuple(range(self.num_layers, self.num_layers + self.num_nextn))
        return self._sparse_caches("mtp_", layers, layers, kv_dtype)

    def _sparse_caches(
        self, prefix: str, latent_layers: tuple[int, ...], indexer_layers: tuple[int, ...], kv_dtype: torch.dtype
    ) -> tuple[CacheSpec, ...]:
        """Latents in the KV dtype; pooled keys and the open pool's raw rows in bfloat16 or better, never fp8."""
        if not latent_layers:
            return ()
        index_dtype = torch.float32 if kv_dtype is torch.float32 else torch.bfloat16
        ring = MAX_DRAFT_TOKENS + 1 + self.pool
        return (
            CacheSpec(
                f"{prefix}latent",
                CacheKind.LATENT,
                latent_layers,
                page=(BufferSpec("latent", (BLOCK_TOKENS, self.latent.latent_dim), kv_dtype),),
            ),
            CacheSpec(
                f"{prefix}indexer",
                CacheKind.INDEXER,
                indexer_layers,
                page=(BufferSpec("keys", (BLOCK_TOKENS // self.pool, self.index_dim), index_dtype),),
                open=(BufferSpec("raw", (ring, 2 * self.index_dim), torch.float32),),
            ),
        )


_IGNORED_HF_KEYS = (
    *HARMLESS_HF_KEYS,
    "first_k_dense_replace",
    "head_dim",
    "index_kpool_compress",
    "n_group",
    "output_router_logits",
    "qk_head_dim",
    "rope_interleave",
    "rope_parameters",
    "rope_theta",
    "router_aux_loss_coef",
)
"""Read elsewhere, training only, or about rotary positions, which these models do not have."""


def from_hf(config: Mapping[str, Any], shapes: Shapes) -> Glm5Config:
    """Read a config.json of model_type glm5_next (with a text_config) or glm5_next_text (flat)."""
    outer = ConfigValues(config, "config.json")
    text = outer.mapping("text_config") or config
    values = ConfigValues(text, "config.json text_config" if text is not config else "config.json")
    num_layers = values.integer("num_hidden_layers", maximum=10_000)
    prefix = "model.language_model" if any(name.startswith("model.language_model.") for name in shapes) else "model"
    stated_nextn = values.optional_integer("num_nextn_predict_layers", minimum=0) or 0
    has_nextn = f"{prefix}.layers.{num_layers}.eh_proj.weight" in shapes
    latent_layers = _latent_layers(values, num_layers)
    num_heads = values.integer("num_attention_heads")
    values.require("num_key_value_heads", num_heads)
    values.require("qk_rope_head_dim", 0)
    values.require("n_group", 1)
    values.require("topk_group", 1)
    values.require("scoring_func", "sigmoid")
    values.require("topk_method", "noaux_tc")
    values.require("hidden_act", "silu")
    values.require("attention_bias", False)
    values.require("index_kpool_always_select_tail", True)
    expert_size = values.integer("moe_intermediate_size")
    pool = values.integer("index_kpool", 16, maximum=BLOCK_TOKENS)
    recurrent, conv_width, lower_bound = _linear_from_hf(values)
    result = Glm5Config(
        architecture="glm5_next",
        naming=Naming.HF,
        hf_prefix=prefix,
        vocab_size=values.integer("vocab_size"),
        hidden_size=values.integer("hidden_size"),
        num_layers=num_layers,
        max_context=values.integer("max_position_embeddings", 1_048_576, maximum=MAX_CONTEXT),
        norm_eps=values.number("rms_norm_eps", 1e-5),
        latent=LatentShape(
            num_heads,
            values.integer("qk_nope_head_dim"),
            values.integer("v_head_dim"),
            values.integer("kv_lora_rank"),
        ),
        q_lora_rank=values.integer("q_lora_rank"),
        recurrent=recurrent,
        conv_width=conv_width,
        lower_bound=lower_bound,
        latent_layers=latent_layers,
        indexer_layers=_indexer_layers(values, num_layers, latent_layers),
        dense_layers=_dense_layers(values, num_layers),
        index_heads=values.integer("index_n_heads"),
        index_dim=values.integer("index_head_dim"),
        top_pools=values.integer("index_topk") // pool,
        pool=pool,
        intermediate_size=values.integer("intermediate_size"),
        expert_size=expert_size,
        shared_size=values.integer("n_shared_experts", 1, minimum=0) * expert_size,
        num_experts=values.integer("n_routed_experts"),
        top_k=values.integer("num_experts_per_tok"),
        scaling=values.number("routed_scaling_factor", 1.0),
        normalise=values.boolean("norm_topk_prob", True),
        limit=values.optional_number("swiglu_limit"),
        streams=values.integer("hc_mult", 4),
        hyper_eps=values.number("hc_eps", 1e-6),
        sinkhorn_iterations=values.integer("hc_sinkhorn_iters", 20),
        tied_head=values.boolean("tie_word_embeddings", False) and "lm_head.weight" not in shapes,
        num_nextn=stated_nextn if has_nextn else 0,
    )
    values.finish(_IGNORED_HF_KEYS)
    return _checked(result)


def _checked(config: Glm5Config) -> Glm5Config:
    if config.num_nextn > 1:
        raise RefusalError(f"{config.num_nextn} nextn layers are not supported; only 1 is")
    if BLOCK_TOKENS % config.pool or config.top_pools < 1:
        raise RefusalError(f"pools of {config.pool} tokens ({config.top_pools} selected) do not divide {BLOCK_TOKENS}")
    first = config.latent_layers[0] if config.latent_layers else None
    if first is not None and first not in config.indexer_layers:
        raise FormatError(f"layer {first} is the first latent layer and has no indexer to select for it")
    if config.top_k > config.num_experts:
        raise FormatError(f"{config.top_k} experts per token of {config.num_experts}")
    return config


def _latent_layers(values: ConfigValues, num_layers: int) -> tuple[int, ...]:
    kinds = values.raw("layer_types")
    if kinds is None:
        return tuple(layer for layer in range(num_layers) if layer % 4 == 3)
    sparse = {"indexed_attention", "full_attention", "deepseek_sparse_attention"}
    if not isinstance(kinds, list) or len(kinds) < num_layers:
        raise FormatError(f"config.json: layer_types must list {num_layers} layers")
    unknown = sorted({str(kind) for kind in kinds} - sparse - {"linear_attention"})
    if unknown:
        raise RefusalError(f"config.json: layer type {unknown[0][:40]!r} is not supported for glm5_next")
    return tuple(index for index, kind in enumerate(kinds[:num_layers]) if kind in sparse)


def _indexer_layers(values: ConfigValues, num_layers: int, latent_layers: tuple[int, ...]) -> tuple[int, ...]:
    """Latent layers with an indexer: by `indexer_types`, a pattern of F and S, or a frequency and an offset."""
    kinds, pattern = values.raw("indexer_types"), values.raw("index_topk_pattern")
    frequency = values.integer("index_topk_freq", 1)
    offset = values.integer("index_skip_topk_offset", 2, minimum=0)
    if isinstance(kinds, list) and len(kinds) >= num_layers:
        full = {index for index, kind in enumerate(kinds) if kind == "full"}
    elif isinstance(pattern, str) and len(pattern) >= num_layers:
        full = {index for index, kind in enumerate(pattern) if kind == "F"}
    elif kinds is None and pattern is None:
        full = {layer for layer in range(num_layers) if max(layer - offset + 1, 0) % frequency == 0}
    else:
        raise FormatError(f"config.json: indexer_types or index_topk_pattern must cover {num_layers} layers")
    return tuple(layer for layer in latent_layers if layer in full)


def _dense_layers(values: ConfigValues, num_layers: int) -> tuple[int, ...]:
    kinds = values.raw("mlp_layer_types")
    first = values.integer("first_k_dense_replace", 3, minimum=0)
    if kinds is None:
        return tuple(range(min(first, num_layers)))
    if not isinstance(kinds, list) or len(kinds) < num_layers or set(kinds) - {"dense", "sparse"}:
        raise FormatError(f"config.json: mlp_layer_types must list dense or sparse for {num_layers} layers")
    return tuple(index for index, kind in enumerate(kinds[:num_layers]) if kind == "dense")


def _linear_from_hf(values: ConfigValues) -> tuple[RecurrentShape, int, float | None]:
    """Linear attention's shape, convolution width and decay bound; the nested form overrides the flat one."""
    nested = values.mapping("linear_attn_config")
    heads = values.integer("linear_num_heads", 64)
    dim = values.integer("linear_head_dim", 128)
    width = values.integer("linear_conv_kernel_dim", 4, maximum=8)
    bound = values.raw("linear_lower_bound")
    if nested is not None:
        inner = ConfigValues(nested, "config.json linear_attn_config")
        heads, dim = inner.integer("num_heads", heads), inner.integer("head_dim", dim)
        width = inner.integer("short_conv_kernel_size", width, maximum=8)
        stated = inner.raw("gate_lower_bound")
        bound = stated if stated is not None else bound
        if inner.boolean("safe_gate", False) and bound is None:
            bound = -5.0
        inner.finish(("kda_layers", "full_attn_layers"))
    if bound is not None and (not isinstance(bound, int | float) or not -100 < bound < 0):
        raise FormatError(f"config.json: linear_lower_bound is {bound!r}, expected a negative number")
    return RecurrentShape(heads, heads, dim, dim), width, None if bound is None else float(bound)


def from_gguf(metadata: Mapping[str, Any], shapes: Shapes) -> Glm5Config:
    """Read the keys of a glm5-next (ds4) or glm5next (llama.cpp) GGUF file."""
    naming = Naming(metadata["general.architecture"])
    values = ConfigValues(metadata, "GGUF metadata", f"{naming.value}.")
    blocks = values.integer("block_count", maximum=10_000)
    nextn = values.integer("nextn_predict_layers", 0, minimum=0)
    num_layers = values.integer("trunk_block_count", blocks - nextn)
    ds4 = naming is Naming.DS4
    if ds4:
        kinds = values.per_layer_integer("layer_types", blocks)
        heads = values.integer("linear_attention.head_count")
        recurrent = RecurrentShape(heads, heads, *(values.integer("linear_attention.head_dimension"),) * 2)
        conv_width = values.integer("linear_attention.conv_kernel", 4, maximum=8)
        bound = values.number("linear_attention.gate_lower_bound", -5.0, above=-100.0)
        key_dim, value_dim = values.integer("attention.key_length"), values.integer("attention.value_length")
        limit = values.optional_number("swiglu_limit")
        pool = values.integer("attention.indexer.pool_size", maximum=BLOCK_TOKENS)
    else:
        kinds = tuple(int(count > 0) for count in values.per_layer_integer("attention.head_count_kv", blocks))
        dim = values.integer("kda.head_dim")
        rows = shapes.get("blk.0.attn_q.weight", (0,))[0]
        recurrent = RecurrentShape(rows // dim, rows // dim, dim, dim)
        conv_width = values.integer("ssm.conv_kernel", 4, maximum=8)
        bound = values.number("kda.gate_lower_bound", -5.0, above=-100.0)
        key_dim = values.integer("attention.key_length_mla")
        value_dim = values.integer("attention.value_length_mla")
        values.integer("attention.key_length", 1), values.integer("attention.value_length", 1)
        values.number("attention.layer_norm_epsilon", 1e-6)
        limit = _uniform_limit(values)
        pool = values.integer("attention.indexer.kpool", maximum=BLOCK_TOKENS)
        values.require("attention.indexer.kpool_select_tail", True)
        values.require("expert_gating_func", 2)
    latent_layers = tuple(layer for layer in range(num_layers) if kinds[layer])
    values.require("rope.dimension_count", 0)
    values.require("attention.rope_dimension_count", 0)
    values.require("expert_group_count", 1, 0)
    values.require("expert_group_used_count", 1, 0)
    expert_size = values.integer("expert_feed_forward_length")
    result = Glm5Config(
        architecture=naming.value,
        naming=naming,
        hf_prefix="",
        vocab_size=gguf_vocab_size(values, shapes),
        hidden_size=values.integer("embedding_length"),
        num_layers=num_layers,
        max_context=values.integer("context_length", 1_048_576, maximum=MAX_CONTEXT),
        norm_eps=values.number("attention.layer_norm_rms_epsilon", 1e-5),
        latent=LatentShape(
            values.integer("attention.head_count"), key_dim, value_dim, values.integer("attention.kv_lora_rank")
        ),
        q_lora_rank=values.integer("attention.q_lora_rank"),
        recurrent=recurrent,
        conv_width=conv_width,
        lower_bound=bound,
        latent_layers=latent_layers,
        indexer_layers=tuple(layer for layer in latent_layers if f"blk.{layer}.indexer.attn_k.weight" in shapes),
        dense_layers=tuple(range(values.integer("leading_dense_block_count", 0, minimum=0))),
        index_heads=values.integer("attention.indexer.head_count"),
        index_dim=values.integer("attention.indexer.key_length"),
        top_pools=values.integer("attention.indexer.top_k") // pool,
        pool=pool,
        intermediate_size=values.integer("feed_forward_length"),
        expert_size=expert_size,
        shared_size=values.integer("expert_shared_count", 1, minimum=0) * expert_size,
        num_experts=values.integer("expert_count"),
        top_k=values.integer("expert_used_count"),
        scaling=values.number("expert_weights_scale", 1.0),
        normalise=values.boolean("expert_weights_norm", True),
        limit=limit,
        streams=values.integer("hyper_connection.count", 4),
        hyper_eps=values.number("hyper_connection.epsilon", 1e-6),
        sinkhorn_iterations=values.integer("hyper_connection.sinkhorn_iterations", 20),
        tied_head="output.weight" not in shapes,
        num_nextn=nextn if f"blk.{num_layers}.nextn.eh_proj.weight" in shapes else 0,
    )
    values.finish(("expert_shared_feed_forward_length", "tensor_data_layout"))
    return _checked(result)


def _uniform_limit(values: ConfigValues) -> float | None:
    """The one clamp of routed and shared experts, given as scalars or per layer."""
    found: set[float] = set()
    for key in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        stated = values.raw(key)
        entries = stated if isinstance(stated, Sequence) else [stated]
        found.update(float(entry) for entry in entries if entry)
    if len(found) > 1:
        raise RefusalError(f"GGUF metadata: SwiGLU limits differ between layers or experts ({sorted(found)[:4]})")
    return found.pop() if found else None
