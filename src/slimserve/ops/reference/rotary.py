"""Rotary position embedding in float32."""

from __future__ import annotations

import torch


def rope(
    x: torch.Tensor,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    *,
    rotary_dim: int,
    interleaved: bool = False,
    scale: float = 1.0,
) -> None:
    """Rotate pairs of the first rotary_dim elements of x [T, heads, D] in place."""
    angles = positions.to(torch.float32).unsqueeze(-1) * inv_freq.float()  # [T, rotary_dim / 2]
    cos, sin = (torch.cos(angles) * scale).unsqueeze(1), (torch.sin(angles) * scale).unsqueeze(1)
    rotated = x[..., :rotary_dim]
    half = rotary_dim // 2
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated[..., :half], rotated[..., half:]
    a, b = first.float(), second.float()  # views of x where it is float32
    new_first, new_second = a * cos - b * sin, b * cos + a * sin
    first.copy_(new_first)
    second.copy_(new_second)
