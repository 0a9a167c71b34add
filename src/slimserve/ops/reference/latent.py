"""Latent attention in its absorbed form over selected pools; the torch reference.

One cached vector c_j per token serves as key and value of every head: score = q_h . c_j * scale, z_h = sum_j p_j c_j.
"""

from __future__ import annotations

import torch

PAGE = 64


def write_latents(values: torch.Tensor, storage: torch.Tensor, slots: torch.Tensor) -> None:
    """Store values [T, C] at slots [T] (page * 64 + offset) of storage [pages, 64, C]; e4m3 clamps to +-448."""
    if storage.dtype == torch.float8_e4m3fn:
        values = values.float().clamp(-448.0, 448.0)
    storage.view(-1, storage.shape[-1])[slots.long()] = values.to(storage.dtype)


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
    """Attend to the tokens of the chosen pools and the open pool's tail: [T, heads, C] in q's dtype.

    q [T, heads, C] absorbed queries; latent [pages, 64, C]; pools [T, P] int32 ascending, -1 unused, or None for
    every visible token. A query at position p always sees tokens (p + 1) // pool * pool .. p. No selected token
    gives zero.
    """
    out = torch.zeros_like(q)
    offsets = row_offsets.tolist()
    for row, start in enumerate(start_positions.tolist()):
        begin, end = offsets[row], offsets[row + 1]
        final = start + end - begin
        pages = block_table[row, : (final + PAGE - 1) // PAGE].long()
        keys = latent[pages].reshape(-1, latent.shape[2])[:final].float()  # [N, C]
        positions = torch.arange(start, final, device=q.device)
        tokens = torch.arange(final, device=q.device)
        allowed = tokens[None] <= positions[:, None]
        if pools is not None:
            selected = torch.zeros(end - begin, final // pool + 2, dtype=torch.bool, device=q.device)
            chosen = pools[begin:end].long()
            selected.scatter_(1, torch.where(chosen < 0, selected.shape[1] - 1, chosen), True)
            tail = tokens[None] >= ((positions + 1) // pool * pool)[:, None]
            allowed &= tail | selected[:, :-1].repeat_interleave(pool, 1)[:, :final]
        scores = torch.einsum("qhc,nc->qhn", q[begin:end].float(), keys) * scale
        scores = scores.masked_fill(~allowed[:, None], -torch.inf)
        weights = torch.nan_to_num(torch.softmax(scores, dim=-1))
        out[begin:end] = torch.einsum("qhn,nc->qhc", weights, keys).to(q.dtype)
    return out
