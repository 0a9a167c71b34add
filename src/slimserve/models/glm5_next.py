"""GLM-5.3-Flash: KDA and sparse latent attention, hyper-connections, a mixture of experts, one MTP layer."""

from __future__ import annotations

import torch

from slimserve import ops
from slimserve.layers.contract import Caches, LayerCache, StepInput
from slimserve.layers.embedding import Embedding, Head
from slimserve.layers.experts import MixtureOfExperts
from slimserve.layers.hyper_connections import HyperConnection
from slimserve.layers.latent_attention import LatentAttention, PooledIndexer
from slimserve.layers.linear_attention import KimiDeltaAttention
from slimserve.layers.mlp import Activation, GatedMLP
from slimserve.layers.norm import RMSNorm
from slimserve.models.glm5_config import Glm5Config
from slimserve.models.glm5_names import Naming
from slimserve.models.parameters import Parameters
from slimserve.ops import HeadWeight
from slimserve.quant.decode import dequantize
from slimserve.quant.formats import BF16, F32
from slimserve.quant.tensor import PackedTensor


class Glm5Layer:
    """Norms, mixer (KDA or latent attention) and feed-forward (dense or experts) of one layer."""

    def __init__(self, config: Glm5Config, layer: int, parameters: Parameters) -> None:
        own = f"layers.{layer}"
        self.input_norm = RMSNorm(parameters.tensor(f"{own}.input_norm"), config.norm_eps)
        self.mlp_norm = RMSNorm(parameters.tensor(f"{own}.mlp_norm"), config.norm_eps)
        is_latent = layer in config.latent_layers or layer >= config.num_layers
        self.latent = _latent(config, layer, parameters) if is_latent else None
        self.kda = None if is_latent else _kda(config, own, parameters)
        dense = layer in config.dense_layers
        self.mlp = _mlp(config, own, parameters) if dense else _experts(config, own, parameters)

    def mixer(
        self, x: torch.Tensor, step: StepInput, cache: LayerCache, pools: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [T, H] -> ([T, H], pools that the layer's attention read, for later layers without an indexer)."""
        if self.latent is not None:
            assert cache.latent is not None, "the cache table names latent storage for latent layers"
            return self.latent(x, step, cache.latent, cache.indexer, pools)
        assert self.kda is not None and cache.recurrent is not None, "other layers are recurrent"
        return self.kda(x, step, cache.recurrent), pools


def _kda(config: Glm5Config, own: str, parameters: Parameters) -> KimiDeltaAttention:
    conv = torch.cat([parameters.tensor(f"{own}.{name}_conv") for name in ("q", "k", "v")])
    return KimiDeltaAttention(
        config.recurrent,
        parameters.linear(f"{own}.q", f"{own}.k", f"{own}.v"),
        parameters.linear(f"{own}.beta"),
        (parameters.linear(f"{own}.f_a"), parameters.linear(f"{own}.f_b")),
        (parameters.linear(f"{own}.g_a"), parameters.linear(f"{own}.g_b")),
        conv,
        parameters.tensor(f"{own}.decay_rate"),
        parameters.tensor(f"{own}.dt_bias"),
        config.lower_bound,
        RMSNorm(parameters.tensor(f"{own}.o_norm"), config.norm_eps),
        parameters.linear(f"{own}.o"),
    )


def _latent(config: Glm5Config, layer: int, parameters: Parameters) -> LatentAttention:
    own = f"layers.{layer}"
    absorb_k, expand_v = _per_head_weights(config, own, parameters)
    return LatentAttention(
        config.latent,
        config.pool,
        parameters.linear(f"{own}.q_a"),
        RMSNorm(parameters.tensor(f"{own}.q_a_norm"), config.norm_eps),
        parameters.linear(f"{own}.q_b"),
        parameters.linear(f"{own}.kv_a"),
        RMSNorm(parameters.tensor(f"{own}.kv_a_norm"), config.norm_eps),
        absorb_k,
        expand_v,
        parameters.linear(f"{own}.o"),
        _indexer(config, own, parameters) if config.has_indexer(layer) else None,
    )


def _per_head_weights(config: Glm5Config, own: str, parameters: Parameters) -> tuple[HeadWeight, HeadWeight]:
    """Per head: Wk^T [latent, qk] and Wv [value, latent]. HF stores Wk untransposed, so it is decoded and turned."""
    shape = config.latent
    if config.naming is not Naming.HF:
        absorb_k, expand_v = (parameters.packed(f"{own}.{name}.weight") for name in ("k_b", "v_b"))
    else:
        rows = shape.qk_dim + shape.value_dim
        packed = parameters.packed(f"{own}.kv_b.weight")
        dtype, storage = (torch.float32, F32) if packed.format is F32 else (torch.bfloat16, BF16)
        plain = dequantize(packed, dtype).view(shape.num_heads, rows, shape.latent_dim)
        keys = plain[:, : shape.qk_dim].transpose(1, 2).contiguous()
        values = plain[:, shape.qk_dim :].contiguous()
        absorb_k, expand_v = (PackedTensor(storage, tuple(t.shape), t, packed.name) for t in (keys, values))
    return parameters.heads(f"{own}.absorb_k", absorb_k), parameters.heads(f"{own}.expand_v", expand_v)


def _indexer(config: Glm5Config, own: str, parameters: Parameters) -> PooledIndexer:
    return PooledIndexer(
        config.index_heads,
        config.index_dim,
        config.top_pools,
        parameters.linear(f"{own}.indexer.q_b"),
        parameters.linear(f"{own}.indexer.k"),
        (parameters.tensor(f"{own}.indexer.k_norm"), parameters.tensor(f"{own}.indexer.k_norm_bias")),
        parameters.linear(f"{own}.indexer.head_weights"),
        parameters.linear(f"{own}.indexer.gate"),
        parameters.tensor(f"{own}.indexer.ape"),
    )


def _mlp(config: Glm5Config, own: str, parameters: Parameters) -> GatedMLP:
    gate_up = parameters.linear(f"{own}.gate", f"{own}.up")
    return GatedMLP(gate_up, parameters.linear(f"{own}.down"), Activation.SILU, limit=config.limit)


def _experts(config: Glm5Config, own: str, parameters: Parameters) -> MixtureOfExperts:
    experts = parameters.experts(f"{own}.experts", [f"{own}.experts.gate", f"{own}.experts.up"], f"{own}.experts.down")
    return MixtureOfExperts(
        parameters.linear_float32(f"{own}.router"),
        parameters.tensor(f"{own}.router_bias"),
        experts,
        _mlp(config, f"{own}.shared", parameters) if config.shared_size else None,
        top_k=config.top_k,
        normalise=config.normalise,
        scaling=config.scaling,
        limit=config.limit,
    )


def _hyper(config: Glm5Config, own: str, parameters: Parameters) -> HyperConnection:
    return HyperConnection(
        parameters.linear_float32(f"{own}.fn"),
        parameters.tensor(f"{own}.base"),
        parameters.tensor(f"{own}.scale"),
        norm_eps=config.norm_eps,
        eps=config.hyper_eps,
        iterations=config.sinkhorn_iterations,
    )


class Glm5Model:
    """The forward of the trunk; `taps` lists layers whose completed output (mean over streams) a drafter reads."""

    def __init__(self, config: Glm5Config, parameters: Parameters) -> None:
        self.config = config
        self.embedding = Embedding(parameters.table("embedding"), parameters.dtype)
        self.layers = [Glm5Layer(config, layer, parameters) for layer in range(config.num_layers)]
        self.hyper_attention = [_hyper(config, f"layers.{i}.hc_attn", parameters) for i in range(config.num_layers)]
        self.hyper_mlp = [_hyper(config, f"layers.{i}.hc_ffn", parameters) for i in range(config.num_layers)]
        self.norm = RMSNorm(parameters.tensor("norm"), config.norm_eps)
        self.head = Head(parameters.head("head", tied_to="embedding" if config.tied_head else None))
        nextn_layers = range(config.num_layers, config.num_layers + config.num_nextn)
        self.nextn = [Glm5NextN(config, layer, self.embedding, parameters) for layer in nextn_layers]
        self.taps: tuple[int, ...] = ()

    def __call__(self, step: StepInput, caches: Caches, tapped: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Hidden states after the final norm [T, H]; appends the output [T, H] of each layer in `taps` to `tapped`."""
        embedded = self.embedding(step.token_ids)  # [T, H]
        streams = embedded[:, None].repeat(1, self.config.streams, 1)  # [T, S, H]
        pools: torch.Tensor | None = None
        for index, layer in enumerate(self.layers):

            def mixer(x: torch.Tensor, layer: Glm5Layer = layer, cache: LayerCache = caches[index]) -> torch.Tensor:
                nonlocal pools
                out, pools = layer.mixer(x, step, cache, pools)
                return out

            streams = self.hyper_attention[index](streams, layer.input_norm, mixer)
            streams = self.hyper_mlp[index](streams, layer.mlp_norm, layer.mlp)
            if tapped is not None and index in self.taps:
                tapped.append(mean_of_streams(streams))
        return self.norm(mean_of_streams(streams))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [L, H] -> float32 logits [L, V]."""
        return self.head(hidden)


def mean_of_streams(streams: torch.Tensor) -> torch.Tensor:
    """Mean over the streams [T, S, H] -> [T, H], added in their order."""
    total = streams[:, 0].float()
    for index in range(1, streams.shape[1]):
        total = total + streams[:, index]
    return (total / streams.shape[1]).to(streams.dtype)


class Glm5NextN:
    """The MTP layer: eh(cat(norm_e(embed(next token)), norm_h(h))) through an ordinary pre-norm layer, then a norm.

    h is the trunk's state after its final norm; embedding and head are the trunk's; no hyper-connections.
    """

    def __init__(self, config: Glm5Config, layer: int, embedding: Embedding, parameters: Parameters) -> None:
        own = f"layers.{layer}"
        self.layer_index = layer
        self.embedding = embedding
        self.layer = Glm5Layer(config, layer, parameters)
        self.eh = parameters.linear(f"{own}.eh")
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
        residual = ops.linear(joined, self.eh)
        mixed, _ = self.layer.mixer(self.layer.input_norm(residual), step, caches[self.layer_index], None)
        x, residual = self.layer.mlp_norm.add(mixed, residual)
        return self.norm.add(self.layer.mlp(x), residual)[0]
