"""What a model receives in a step: the device view of a plan, and typed storage of its caches.

A step is a list of rows. Row r owns the flat tokens row_offsets[r]..row_offsets[r+1], at absolute positions
start_positions[r] + 0..q_len-1. Prefill, decode and verification differ in q_len only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK_TOKENS = 64
"""Tokens of one cache page, of one prefix-hash block and of one linear-attention chunk."""

NULL_PAGE = 0
"""Page, state slot and open-buffer index 0 are never owned by a request: padding rows may write there."""


NOT_USED = torch.empty(0)
"""Stands for an index tensor that a group's kind does not have."""


@dataclass(slots=True)
class GroupInput:
    """Where one cache group keeps the rows of this step.

    block_table [R, max_blocks] int32: page of each 64-token block; NULL_PAGE where unowned or freed.
    slots [T] int64: page * 64 + offset where each token's entry is written (paged groups).
    state_in [R] int32: recurrent groups: slot with the state at the last multiple of 64 at or before the
        row's start (NULL_PAGE = zero state, never read).
    state_out [R, max_crossings] int32: slot to write the state to at each multiple of 64 that the row
        reaches (a boundary b with start < b <= start + q_len), in order; NULL_PAGE = not kept.
    open_index [R] int32: recurrent and indexer groups: the sequence's open buffer (rows of the open chunk).
    """

    block_table: torch.Tensor = NOT_USED
    slots: torch.Tensor = NOT_USED
    state_in: torch.Tensor = NOT_USED
    state_out: torch.Tensor = NOT_USED
    open_index: torch.Tensor = NOT_USED


@dataclass(slots=True)
class StepInput:
    """The device view of a StepPlan: R rows, T tokens, L wanted logits; tensors are views of persistent buffers.

    token_ids [T] int32; positions [T] int64; row_offsets [R+1] int32; start_positions [R] int32;
    logit_indices [L] int64 (flat token whose hidden state becomes a logits row); groups: one per cache group,
    in the order of the model's cache table. The max_* values are host integers, fixed before launch, that
    bound loops and grids; they never change a row's arithmetic.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    row_offsets: torch.Tensor
    start_positions: torch.Tensor
    logit_indices: torch.Tensor
    groups: tuple[GroupInput, ...]
    num_rows: int
    num_tokens: int
    max_q_len: int
    max_context: int


@dataclass(slots=True)
class AttentionStorage:
    """One layer's keys and values: k, v [num_pages, kv_heads, 64, head_dim]; group = index into StepInput.groups."""

    group: int
    k: torch.Tensor
    v: torch.Tensor


@dataclass(slots=True)
class LatentStorage:
    """One layer's latents [num_pages, 64, latent_dim]."""

    group: int
    latent: torch.Tensor


@dataclass(slots=True)
class IndexerStorage:
    """One layer's pooled index keys [num_pages, 64 // pool, dim] and raw rows of the open pool.

    raw [num_open, ring, 2 * dim]: (key, gate) of token at position p in ring row p mod ring.
    """

    group: int
    keys: torch.Tensor
    raw: torch.Tensor


@dataclass(slots=True)
class RecurrentStorage:
    """One linear-attention layer's state, kept as (state at the last multiple of 64, rows of the open chunk).

    state [num_slots, heads, key_dim, value_dim] f32 and conv_tail [num_slots, 3, conv_dim]: at a boundary b,
    the state after token b-1 and the convolution inputs of tokens b-3..b-1 (oldest first).
    Rows of the open chunk, ring row = position mod ring (ring >= 64 + longest draft + 1; the convolution's own ring
    needs its width + longest draft): open_conv [num_open, conv_ring, conv_dim] convolution inputs; open_k
    [num_open, ring, key_heads, key_dim]; open_g [num_open, ring, heads(, key_dim)] f32 log decay (summed inside the
    chunk when read); open_d [num_open, ring, heads, value_dim] f32 the written value beta * (v - S^T k).
    The state moves only at boundaries, so a rejected draft is undone by forgetting its rows, a snapshot is a
    slot that is kept, and a token's arithmetic depends on its absolute position alone.
    """

    group: int
    state: torch.Tensor
    conv_tail: torch.Tensor
    open_conv: torch.Tensor
    open_k: torch.Tensor
    open_g: torch.Tensor
    open_d: torch.Tensor


@dataclass(slots=True)
class LayerCache:
    """All cache storage of one layer; a layer holds the kinds that its cache table names."""

    attention: AttentionStorage | None = None
    latent: LatentStorage | None = None
    indexer: IndexerStorage | None = None
    recurrent: RecurrentStorage | None = None


Caches = tuple[LayerCache, ...]
"""One LayerCache per model layer (drafter layers follow the trunk's)."""
