"""Operations of hybrid models: linear attention, latent attention, the pooled indexer, hyper-connections, routing."""

from __future__ import annotations

import torch

from slimserve.ops.registry import pick
from slimserve.ops.resolver import Op


def gate_multiply(x: torch.Tensor, gate: torch.Tensor, *, silu: bool) -> torch.Tensor:
    """x * sigmoid(gate), or x * gate * sigmoid(gate) where `silu`; equal shapes, x's dtype."""
    result: torch.Tensor = pick(Op.GATE_MULTIPLY, x.device, x.dtype).entry.implementation(x, gate, silu=silu)
    return result


def log_decay(u: torch.Tensor, bias: torch.Tensor, rate: torch.Tensor, lower_bound: float | None) -> torch.Tensor:
    """Log decay of a gated delta rule from u [T, H] or [T, H, K]: float32, u's shape.

    lower_bound * sigmoid(-rate (u + bias)), or rate * softplus(u + bias) where lower_bound is None; rate [H] = -exp(A).
    """
    result: torch.Tensor = pick(Op.LOG_DECAY, u.device, u.dtype).entry.implementation(u, bias, rate, lower_bound)
    return result


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    open_conv: torch.Tensor,
    conv_tail: torch.Tensor,
    state_in: torch.Tensor,
    state_out: torch.Tensor,
    open_index: torch.Tensor,
    row_offsets: torch.Tensor,
    start_positions: torch.Tensor,
) -> torch.Tensor:
    """Depthwise causal convolution with SiLU over x [T, C], weight [C, W]; history in the open chunk: [T, C].

    Storage and index tensors are those of layers.contract.RecurrentStorage and GroupInput; both are updated.
    """
    result: torch.Tensor = pick(Op.CAUSAL_CONV, x.device, x.dtype).entry.implementation(
        x, weight, open_conv, conv_tail, state_in, state_out, open_index, row_offsets, start_positions
    )
    return result


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    open_k: torch.Tensor,
    open_g: torch.Tensor,
    open_d: torch.Tensor,
    state_in: torch.Tensor,
    state_out: torch.Tensor,
    open_index: torch.Tensor,
    row_offsets: torch.Tensor,
    start_positions: torch.Tensor,
    *,
    tiled: bool = False,
) -> torch.Tensor:
    """Gated delta rule of q, k [T, Hk, K], v [T, H, V], log decay g [T, H(, K)], beta [T, H]: float32 [T, H, V].

    A value head reads key head h // (H / Hk), or h mod Hk where `tiled`. Storage is updated (RecurrentStorage).
    """
    result: torch.Tensor = pick(Op.DELTA_RULE, q.device, q.dtype).entry.implementation(
        q,
        k,
        v,
        g,
        beta,
        state,
        open_k,
        open_g,
        open_d,
        state_in,
        state_out,
        open_index,
        row_offsets,
        start_positions,
        tiled=tiled,
    )
    return result


def hyper_pre(
    streams: torch.Tensor,
    mixes: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Collapsed input [T, H] of a hyper-connection site, and its coefficients post [T, S] and comb [T, S, S].

    streams [T, S, H]; mixes [T, (2 + S) S] float32, the projection of the flattened streams before normalisation.
    """
    collapsed, post, comb = pick(Op.HYPER_PRE, streams.device, streams.dtype).entry.implementation(
        streams, mixes, base, scale, norm_eps=norm_eps, eps=eps, iterations=iterations
    )
    return collapsed, post, comb


def hyper_post(streams: torch.Tensor, block_out: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """Streams after a site: post_j * y + sum_i comb[i, j] X_i; streams [T, S, H], y [T, H]."""
    result: torch.Tensor = pick(Op.HYPER_POST, streams.device, streams.dtype).entry.implementation(
        streams, block_out, post, comb
    )
    return result


def route(
    logits: torch.Tensor, bias: torch.Tensor, *, top_k: int, normalise: bool, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of each token by sigmoid(logits [T, E]) + bias [E]: ids [T, k] int32 and weights [T, k] float32.

    Total under NaN: ids are always in range.
    """
    ids, weights = pick(Op.ROUTE, logits.device, logits.dtype).entry.implementation(
        logits, bias, top_k=top_k, normalise=normalise, scaling=scaling
    )
    return ids, weights


def update_pools(
    keys: torch.Tensor,
    gates: torch.Tensor,
    ape: torch.Tensor,
    pages: torch.Tensor,
    raw: torch.Tensor,
    block_table: torch.Tensor,
    open_index: torch.Tensor,
    row_offsets: torch.Tensor,
    start_positions: torch.Tensor,
) -> None:
    """Write the pooled index keys that a step completes and the raw rows of the open pool (IndexerStorage)."""
    pick(Op.UPDATE_POOLS, keys.device, keys.dtype).entry.implementation(
        keys, gates, ape, pages, raw, block_table, open_index, row_offsets, start_positions
    )


def select_pools(
    queries: torch.Tensor,
    head_weights: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    row_offsets: torch.Tensor,
    start_positions: torch.Tensor,
    *,
    top_pools: int,
    scale: float,
    max_context: int,
) -> torch.Tensor:
    """Best visible pools of queries [T, heads, D]: [T, top_pools] int32 ascending, -1 unused; total under NaN."""
    result: torch.Tensor = pick(Op.SELECT_POOLS, queries.device, queries.dtype).entry.implementation(
        queries,
        head_weights,
        pages,
        block_table,
        row_offsets,
        start_positions,
        top_pools=top_pools,
        scale=scale,
        max_context=max_context,
    )
    return result


def write_latents(values: torch.Tensor, storage: torch.Tensor, slots: torch.Tensor) -> None:
    """Store latents values [T, C] at slots [T] (page * 64 + offset) of storage [pages, 64, C]."""
    pick(Op.WRITE_LATENTS, values.device, values.dtype, storage.dtype).entry.implementation(values, storage, slots)


def latent_attention(
    q: torch.Tensor,
    latent: torch.Tensor,
    block_table: torch.Tensor,
    pools: torch.Tensor | None,
    row_offsets: torch.Tensor,
    start_positions: torch.Tensor,
    *,
    scale: float,
    pool: int,
    max_context: int,
) -> torch.Tensor:
    """Absorbed latent attention of q [T, heads, C] over the chosen pools and the open pool's tail: [T, heads, C].

    `pools` [T, P] ascending as select_pools returns them, or None for every visible token.
    """
    result: torch.Tensor = pick(Op.LATENT_ATTENTION, q.device, q.dtype, latent.dtype).entry.implementation(
        q,
        latent,
        block_table,
        pools,
        row_offsets,
        start_positions,
        scale=scale,
        pool=pool,
        max_context=max_context,
    )
    return result
