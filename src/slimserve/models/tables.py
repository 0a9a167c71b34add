"""Pieces of parameter and cache tables that several architectures share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slimserve.layers.contract import BLOCK_TOKENS
from slimserve.models.contract import BufferSpec, CacheKind, CacheSpec, ParameterSpec, Role, Transform

NONE = Transform()


def norm_spec(
    name: str, size: int, hf_name: str, gguf_name: str, *, layer: int | None = None, hf_transform: Transform = NONE
) -> ParameterSpec:
    """A norm's weight, held in float32."""
    return ParameterSpec(
        name, (size,), Role.NORM, hf_name, gguf_name, layer, keep=torch.float32, hf_transform=hf_transform
    )


def bias_spec(
    name: str, size: int, hf_name: str, gguf_name: str, *, layer: int | None = None, gguf_transform: Transform = NONE
) -> ParameterSpec:
    """A bias, held in float32."""
    return ParameterSpec(
        name, (size,), Role.BIAS, hf_name, gguf_name, layer, keep=torch.float32, gguf_transform=gguf_transform
    )


def linear_spec(
    name: str,
    shape: tuple[int, int],
    hf_name: str,
    gguf_name: str,
    *,
    layer: int | None = None,
    gguf_transform: Transform = NONE,
) -> ParameterSpec:
    """A matrix [N, K], held packed."""
    return ParameterSpec(name, shape, Role.LINEAR, hf_name, gguf_name, layer, gguf_transform=gguf_transform)


def attention_caches(
    windows: Sequence[int | None], num_kv_heads: int, head_dim: int, kv_dtype: torch.dtype
) -> tuple[CacheSpec, ...]:
    """One group of full-attention layers and one of sliding-window layers, where a model has them.

    `windows` holds each layer's window or None for full attention; all windows of a model are equal.
    """
    page = tuple(BufferSpec(name, (num_kv_heads, BLOCK_TOKENS, head_dim), kv_dtype) for name in ("k", "v"))
    full = tuple(i for i, window in enumerate(windows) if window is None)
    sliding = tuple(i for i, window in enumerate(windows) if window is not None)
    groups = []
    if full:
        groups.append(CacheSpec("attention", CacheKind.ATTENTION, full, page=page))
    if sliding:
        groups.append(CacheSpec("window", CacheKind.WINDOW, sliding, page=page, window=windows[sliding[0]]))
    return tuple(groups)
