"""The pooled indexer: one key per `pool` tokens, scored against each query; the torch reference.

A pool is tokens pool*p .. pool*p + pool-1. It is a candidate once its last token is visible. The best `top_pools`
candidates (score descending, then index ascending, NaN last) are taken; the tail of the open pool is always visible.
"""

from __future__ import annotations

import torch

PAGE = 64


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
    """Write the pooled keys that a step completes, and the raw rows of pools still open.

    keys, gates [T, D]; ape [pool, D] float32; pages [num_pages, 64 // pool, D]; raw [num_open, ring, 2 D], ring row =
    position mod ring. A pooled key is sum_m softmax_m(gate_m + ape_m) key_m per channel, softmax over the members.
    """
    pool, dim = ape.shape
    ring = raw.shape[1]
    offsets = row_offsets.tolist()
    for row, start in enumerate(start_positions.tolist()):
        begin, end = offsets[row], offsets[row + 1]
        final = start + end - begin
        first = start - start % pool
        open_row = int(open_index[row])
        kept = torch.arange(first, start, device=keys.device)
        fresh = torch.cat([keys[begin:end], gates[begin:end]], dim=1).to(raw.dtype)
        history = torch.cat([raw[open_row, kept % ring], fresh]).float()
        whole = (final - first) // pool
        if whole:
            members = history[: whole * pool].view(whole, pool, 2 * dim)
            mixing = members[:, :, dim:] + ape
            mixing = torch.exp(mixing - mixing.amax(1, keepdim=True))
            total, weighted = mixing[:, 0], mixing[:, 0] * members[:, 0, :dim]
            for index in range(1, pool):
                total = total + mixing[:, index]
                weighted = weighted + mixing[:, index] * members[:, index, :dim]
            ids = first // pool + torch.arange(whole, device=keys.device)
            page = block_table[row, ids // (PAGE // pool)].long()
            pages[page, ids % (PAGE // pool)] = (weighted / total).to(pages.dtype)
        recent = torch.arange(max(start, final - ring), final, device=keys.device)
        raw[open_row, recent % ring] = fresh[recent - start]


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
    """Chosen pools of each query: [T, top_pools] int32 in ascending order, -1 where unused.

    queries [T, heads, D]; head_weights [T, heads] float32; score(p) = sum_h w_h relu(q_h . P_p * scale) in float32.
    """
    per_page = pages.shape[1]
    pool = PAGE // per_page
    chosen = torch.full((queries.shape[0], top_pools), -1, dtype=torch.int32, device=queries.device)
    offsets = row_offsets.tolist()
    for row, start in enumerate(start_positions.tolist()):
        begin, end = offsets[row], offsets[row + 1]
        visible = (torch.arange(start, start + end - begin, device=queries.device) + 1) // pool  # [q]
        count = int(visible[-1])
        if count == 0:
            continue
        page_ids = block_table[row, : (count + per_page - 1) // per_page].long()
        pooled = pages[page_ids].reshape(-1, pages.shape[2])[:count].float()  # [P, D]
        dots = torch.relu(torch.einsum("qhd,pd->qhp", queries[begin:end].float(), pooled) * scale)
        scores = torch.einsum("qhp,qh->qp", dots, head_weights[begin:end])
        candidate = torch.arange(count, device=queries.device)[None] < visible[:, None]
        scores = torch.where(torch.isnan(scores), -torch.inf, scores)
        order = torch.sort(torch.where(candidate, scores, -torch.inf), dim=-1, descending=True, stable=True).indices
        # A visible pool with score -inf must still precede pools that are not candidates.
        order = torch.gather(
            order, 1, torch.sort((~torch.gather(candidate, 1, order)).int(), dim=-1, stable=True).indices
        )
        take = order[:, :top_pools]
        kept = torch.gather(candidate, 1, take)
        filled = torch.where(kept, take, count).sort(dim=-1).values
        chosen[begin:end, : filled.shape[1]] = torch.where(filled < count, filled, -1).to(torch.int32)
    return chosen
