"""Latent attention without positions (NoPE MLA, arXiv:2405.04434) over the pools that an indexer selects.

The absorbed form serves every row, prefill and decode alike, so a token's bits never depend on how its prompt was
cut: q~_h = Wk_h^T q_h attends to the cached latent c, and o_h = Wv_h z_h. The expanded form (K_h = Wk_h c,
V_h = Wv_h c) is its oracle in the tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slimserve import ops
from slimserve.layers.contract import IndexerStorage, LatentStorage, StepInput
from slimserve.layers.norm import RMSNorm
from slimserve.ops import HeadWeight, LinearWeight

KEY_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Geometry: query heads of `qk_dim`, a latent of `latent_dim`, value heads of `value_dim`."""

    num_heads: int
    qk_dim: int
    value_dim: int
    latent_dim: int


class PooledIndexer:
    """Scores pools of tokens against a query and keeps the best (DeepSeek sparse attention with key pooling).

    Keys are LayerNorm(wk x); a pool's key is the softmax-weighted mean of its members, weights from their gates.
    Everything after the projections is float32.
    """

    def __init__(
        self,
        num_heads: int,
        dim: int,
        top_pools: int,
        query: LinearWeight,
        key: LinearWeight,
        key_norm: tuple[torch.Tensor, torch.Tensor],
        head_weights: LinearWeight,
        gate: LinearWeight,
        ape: torch.Tensor,
    ) -> None:
        self.num_heads = num_heads
        self.dim = dim
        self.top_pools = top_pools
        self.query = query
        self.key = key
        self.key_norm = key_norm
        self.head_weights = head_weights
        self.gate = gate
        self.ape = ape

    def __call__(self, x: torch.Tensor, q_latent: torch.Tensor, step: StepInput, cache: IndexerStorage) -> torch.Tensor:
        """x [T, H], q_latent [T, q_lora_rank] -> chosen pools [T, top_pools] int32."""
        group = step.groups[cache.group]
        keys = ops.layer_norm(ops.linear(x, self.key, out_dtype=torch.float32), *self.key_norm, KEY_NORM_EPS)
        gates = ops.linear(x, self.gate, out_dtype=torch.float32)
        ops.update_pools(
            keys,
            gates,
            self.ape,
            cache.keys,
            cache.raw,
            group.block_table,
            group.open_index,
            step.row_offsets,
            step.start_positions,
        )
        queries = ops.linear(q_latent, self.query).view(x.shape[0], self.num_heads, self.dim)
        weights = ops.linear(x, self.head_weights, out_dtype=torch.float32) * self.num_heads**-0.5
        return ops.select_pools(
            queries,
            weights,
            cache.keys,
            group.block_table,
            step.row_offsets,
            step.start_positions,
            top_pools=self.top_pools,
            scale=self.dim**-0.5,
            max_context=step.max_context,
        )


class LatentAttention:
    """softmax(q k^T scale) v over cached latents, restricted to the indexer's pools and the open pool's tail."""

    def __init__(
        self,
        shape: LatentShape,
        pool: int,
        q_a: LinearWeight,
        q_norm: RMSNorm,
        q_b: LinearWeight,
        kv_a: LinearWeight,
        kv_norm: RMSNorm,
        absorb_k: HeadWeight,
        expand_v: HeadWeight,
        output: LinearWeight,
        indexer: PooledIndexer | None,
    ) -> None:
        self.shape = shape
        self.pool = pool
        self.q_a = q_a
        self.q_norm = q_norm
        self.q_b = q_b
        self.kv_a = kv_a
        self.kv_norm = kv_norm
        self.absorb_k = absorb_k
        self.expand_v = expand_v
        self.output = output
        self.indexer = indexer

    def __call__(
        self,
        x: torch.Tensor,
        step: StepInput,
        cache: LatentStorage,
        indexer_cache: IndexerStorage | None,
        pools: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, H] -> ([T, H], chosen pools); a layer without an indexer reads `pools` of the previous full layer."""
        shape, num_tokens = self.shape, x.shape[0]
        q_latent = self.q_norm(ops.linear(x, self.q_a))
        q = ops.linear(q_latent, self.q_b).view(num_tokens, shape.num_heads, shape.qk_dim)
        group = step.groups[cache.group]
        ops.write_latents(self.kv_norm(ops.linear(x, self.kv_a)), cache.latent, group.slots)
        if self.indexer is not None:
            assert indexer_cache is not None, "the cache table names indexer storage for full layers"
            pools = self.indexer(x, q_latent, step, indexer_cache)
        assert pools is not None, "the first latent layer has an indexer"
        z = ops.latent_attention(
            ops.head_linear(q, self.absorb_k),
            cache.latent,
            group.block_table,
            pools,
            step.row_offsets,
            step.start_positions,
            scale=shape.qk_dim**-0.5,
            pool=self.pool,
            max_context=step.max_context,
        )  # [T, heads, latent_dim]
        out = ops.head_linear(z, self.expand_v)  # [T, heads, value_dim]
        return ops.linear(out.view(num_tokens, -1), self.output), pools
