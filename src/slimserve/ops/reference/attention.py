"""Paged attention and page writes.

The context of every query is walked in the 64-token pages of its sequence, whose partial results (running maximum,
sum and weighted values) are merged in page order: a query's bits depend on its own position, keys and values alone.
"""

from __future__ import annotations

import torch

from slimserve.ops.reference.order import tree_sum

PAGE_TOKENS = 64
FP8_MAX = 448.0
_QUERY_TILE = 32


def write_pages(values: torch.Tensor, storage: torch.Tensor, slots: torch.Tensor) -> None:
    """Scatter values [T, heads, D] to page slot // 64, offset slot % 64 of storage [pages, heads, 64, D]."""
    page, offset = slots // PAGE_TOKENS, slots % PAGE_TOKENS
    if storage.dtype == torch.float8_e4m3fn:
        stored = values.float().clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
        storage.view(torch.uint8)[page, :, offset] = stored
    else:
        storage[page, :, offset] = values.to(storage.dtype)


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor,
    row_offsets: torch.Tensor,
    start_positions: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    max_q_len: int,
    max_context: int,
) -> torch.Tensor:
    """Causal attention of each row over its own pages; see `slimserve.ops.paged_attention`."""
    del max_q_len, max_context  # bounds for kernels with fixed grids
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    offsets, starts = row_offsets.tolist(), start_positions.tolist()
    for row, (begin, end, start) in enumerate(zip(offsets[:-1], offsets[1:], starts, strict=False)):
        for first in range(begin, end, _QUERY_TILE):
            last = min(first + _QUERY_TILE, end)
            out[first:last] = _attend(
                q[first:last], start + first - begin, k, v, block_table[row], scale, window, softcap
            ).to(q.dtype)
    return out


def _attend(
    q: torch.Tensor,
    position: int,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Queries [n, Hq, D] at positions position .. position + n - 1 -> float32 [n, Hq, Dv]."""
    count, q_heads, _ = q.shape
    kv_heads = k.shape[1]
    grouped = q.float().reshape(count, kv_heads, q_heads // kv_heads, 1, -1)  # [n, Hkv, G, 1, D]
    where = torch.arange(position, position + count, device=q.device).view(count, 1, 1, 1)
    shape = (count, kv_heads, q_heads // kv_heads)
    maximum = torch.full(shape, -torch.inf, device=q.device)
    total = torch.zeros(shape, device=q.device)
    values = torch.zeros((*shape, v.shape[-1]), device=q.device)
    oldest = 0 if window is None else max(0, position - window + 1)
    for block in range(oldest // PAGE_TOKENS, (position + count - 1) // PAGE_TOKENS + 1):
        page = int(pages[block])
        keys = k[page].float()[:, None]  # [Hkv, 1, 64, D]
        scores = tree_sum(grouped * keys) * scale  # [n, Hkv, G, 64]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(block * PAGE_TOKENS, (block + 1) * PAGE_TOKENS, device=q.device)
        visible = at <= where
        if window is not None:
            visible = visible & (at > where - window)
        scores = torch.where(visible, scores, -torch.inf)
        # A page that a query does not see at all must leave that query's running values bit for bit as they were.
        seen = visible.any(dim=-1)
        new_maximum = torch.maximum(maximum, scores.amax(dim=-1))
        base = torch.where(torch.isinf(new_maximum), 0.0, new_maximum)
        weights = torch.where(visible, torch.exp(scores - base.unsqueeze(-1)), 0.0)
        keep = torch.exp(maximum - base)
        page_values = torch.where(visible.any(dim=0).reshape(PAGE_TOKENS, 1), v[page].float(), 0.0)[:, None]
        added = tree_sum(weights.unsqueeze(-2) * page_values.transpose(-1, -2))  # [n, Hkv, G, Dv]
        total = torch.where(seen, total * keep + tree_sum(weights), total)
        values = torch.where(seen.unsqueeze(-1), values * keep.unsqueeze(-1) + added, values)
        maximum = torch.where(seen, new_maximum, maximum)
    return (values / total.unsqueeze(-1)).reshape(count, q_heads, -1)
