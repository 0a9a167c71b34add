"""Token embedding and output head over packed tables, tied or separate."""

from __future__ import annotations

import torch

from slimserve import ops
from slimserve.ops import LinearWeight
from slimserve.quant.tensor import PackedTensor


class Embedding:
    """Rows of a packed [V, H] table (`ops.prepare_table`), decoded on lookup and scaled by `multiplier` (Gemma)."""

    def __init__(self, table: PackedTensor | LinearWeight, dtype: torch.dtype, multiplier: float | None = None) -> None:
        self.table = table
        self.dtype = dtype
        self.multiplier = multiplier

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [T] -> [T, H]."""
        rows = ops.embedding(token_ids, self.table, self.dtype)
        return rows if self.multiplier is None else rows.mul_(self.multiplier)


class Head:
    """Logits in float32: W h, then softcap * tanh(logits / softcap) where the model has one."""

    def __init__(self, weight: LinearWeight, softcap: float | None = None) -> None:
        self.weight = weight
        self.softcap = softcap

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [L, H] -> float32 [L, V]."""
        logits = ops.linear(hidden, self.weight, out_dtype=torch.float32)
        if self.softcap is None:
            return logits
        return logits.div_(self.softcap).tanh_().mul_(self.softcap)
