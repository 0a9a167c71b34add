"""Root-mean-square norms in float32."""

from __future__ import annotations

import torch

from slimserve.ops.reference.order import tree_sum


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, weight_offset: float = 0.0) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + offset) over the last dimension, in x's dtype."""
    wide = x.float()
    mean = tree_sum(wide * wide) / x.shape[-1]  # [...]
    scaled = wide * torch.rsqrt(mean + eps).unsqueeze(-1)
    return (scaled * (weight.float() + weight_offset)).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, weight_offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum is rounded to x's dtype first, then normalised: the next layer adds to exactly what was normalised."""
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm(total, weight, eps, weight_offset=weight_offset), total


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension, in x's dtype."""
    wide = x.float()
    centred = wide - (tree_sum(wide) / x.shape[-1]).unsqueeze(-1)
    variance = tree_sum(centred * centred) / x.shape[-1]
    return (centred * torch.rsqrt(variance + eps).unsqueeze(-1) * weight + bias).to(x.dtype)
