"""The cache table of linear-attention layers."""

from __future__ import annotations

import torch

from slimserve.layers.contract import BLOCK_TOKENS
from slimserve.layers.linear_attention import RecurrentShape
from slimserve.models.contract import BufferSpec, CacheKind, CacheSpec

MAX_DRAFT_TOKENS = 15
"""Longest draft that open buffers can forget: rings hold a chunk (or the convolution's window) and one such row."""


def recurrent_cache(layers: tuple[int, ...], shape: RecurrentShape, conv_width: int, *, per_channel: bool) -> CacheSpec:
    """Boundary states, convolution tails and open rows (layers.contract.RecurrentStorage), all float32.

    Bytes per layer: a slot holds H K V + (W - 1) C floats; an open buffer holds (64 + 16) rows of Hk K + H (K or 1)
    + H V floats and 16 + W - 1 rounded up rows of C convolution inputs. Inputs are kept in float32 so that a row
    read back equals the row that was computed, whatever the activation dtype.
    """
    ring = BLOCK_TOKENS + MAX_DRAFT_TOKENS + 1
    conv_ring = MAX_DRAFT_TOKENS + 1 + conv_width
    f32 = torch.float32
    decay = (ring, shape.heads, shape.key_dim) if per_channel else (ring, shape.heads)
    return CacheSpec(
        "recurrent",
        CacheKind.RECURRENT,
        layers,
        slot=(
            BufferSpec("state", (shape.heads, shape.key_dim, shape.value_dim), f32),
            BufferSpec("conv_tail", (conv_width - 1, shape.conv_dim), f32),
        ),
        open=(
            BufferSpec("open_conv", (conv_ring, shape.conv_dim), f32),
            BufferSpec("open_k", (ring, shape.key_heads, shape.key_dim), f32),
            BufferSpec("open_g", decay, f32),
            BufferSpec("open_d", (ring, shape.heads, shape.value_dim), f32),
        ),
    )
