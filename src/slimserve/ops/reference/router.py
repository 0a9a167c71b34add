"""Expert choice: sigmoid scores with a selection bias; the torch reference."""

from __future__ import annotations

import torch


def route(
    logits: torch.Tensor, bias: torch.Tensor, *, top_k: int, normalise: bool, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick experts by sigmoid(logits) + bias, weigh them by sigmoid(logits).

    logits [T, E] float32; bias [E]. Returns ids [T, k] int32, best first (ties to the lower id, NaN last, ids
    always in range), and weights [T, k] float32, divided by their sum + 1e-20 where `normalise`, times scaling.
    """
    scores = torch.sigmoid(logits.contiguous())
    chosen = torch.nan_to_num(scores + bias, nan=-torch.inf, posinf=torch.finfo(torch.float32).max)
    ids = torch.sort(chosen, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = torch.gather(scores, 1, ids)
    if normalise:
        total = weights[:, 0]
        for index in range(1, top_k):
            total = total + weights[:, index]
        weights = weights / (total[:, None] + 1e-20)
    return ids.to(torch.int32), weights * scaling
