"""Hyper-connections: several residual streams mixed by input-dependent coefficients; the torch reference.

Formula: manifold-constrained hyper-connections (mHC, 2025) as glm5_next uses them; coefficients in float32.
"""

from __future__ import annotations

import torch

from slimserve.ops.reference.order import tree_sum


def _sum_last(x: torch.Tensor) -> torch.Tensor:
    """Sum the last dimension in index order, keeping it: elementwise adds, so a row's bits stand alone."""
    total = x[..., 0]
    for index in range(1, x.shape[-1]):
        total = total + x[..., index]
    return total[..., None]


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
    """Coefficients of a site and its collapsed input.

    streams [T, S, H]; mixes [T, (2 + S) * S] = fn @ flatten(streams) in float32, before the rsqrt of the mean
    square; base [(2 + S) * S]; scale [3]. Returns collapsed [T, H] in streams' dtype, post [T, S] and
    comb [T, S, S] float32 (columns, then rows and columns, made to sum to one by Sinkhorn's iterations).
    """
    num_tokens, count = streams.shape[:2]
    flat = streams.float().reshape(num_tokens, -1)
    inverse = torch.rsqrt(tree_sum(flat * flat)[:, None] / flat.shape[1] + norm_eps)
    m = mixes * inverse
    pre = torch.sigmoid((m[:, :count] * scale[0] + base[:count]).contiguous()) + eps
    post = 2.0 * torch.sigmoid((m[:, count : 2 * count] * scale[1] + base[count : 2 * count]).contiguous())
    logits = (m[:, 2 * count :] * scale[2] + base[2 * count :]).contiguous().view(num_tokens, count, count)
    comb = torch.exp(logits - logits.amax(-1, keepdim=True))
    comb = comb / _sum_last(comb) + eps
    comb = comb / (_sum_last(comb.transpose(1, 2)).transpose(1, 2) + eps)
    for _ in range(iterations - 1):
        comb = comb / (_sum_last(comb) + eps)
        comb = comb / (_sum_last(comb.transpose(1, 2)).transpose(1, 2) + eps)
    collapsed = pre[:, 0, None] * streams[:, 0].float()
    for index in range(1, count):
        collapsed = collapsed + pre[:, index, None] * streams[:, index].float()
    return collapsed.to(streams.dtype), post, comb


def hyper_post(streams: torch.Tensor, block_out: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """New streams X'_j = post_j * y + sum_i comb[i, j] X_i: streams [T, S, H], y [T, H] -> [T, S, H]."""
    count = streams.shape[1]
    y = block_out.float()
    out = torch.empty_like(streams)
    for target in range(count):
        total = post[:, target, None] * y
        for source in range(count):
            total = total + comb[:, source, target, None] * streams[:, source].float()
        out[:, target] = total.to(streams.dtype)
    return out
