"""Grouped-query attention over paged keys and values, causal in absolute positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from slimserve import ops
from slimserve.layers.contract import AttentionStorage, StepInput
from slimserve.layers.norm import RMSNorm
from slimserve.layers.rotary import Rotary
from slimserve.ops import LinearWeight


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Geometry of one attention layer. `window`: past tokens that are read, own token included; None = all."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None


class Attention:
    """softmax(q k^T scale) v with rotated q and k (arXiv:1706.03762, grouped heads arXiv:2305.13245).

    qkv stacks query, key and value rows; q_norm and k_norm normalize each head before the rotation.
    """

    def __init__(
        self,
        shape: AttentionShape,
        qkv: LinearWeight,
        output: LinearWeight,
        rotary: Rotary | None,
        *,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        self.shape = shape
        self.qkv = qkv
        self.output = output
        self.rotary = rotary
        self.q_norm = q_norm
        self.k_norm = k_norm
        if q_norm is not None and k_norm is not None and q_norm.eps != k_norm.eps:
            raise ValueError(f"query and key norms differ in epsilon: {q_norm.eps} and {k_norm.eps}")
        norm = q_norm or k_norm
        self.placing: dict[str, Any] = {
            "q_norm": None if q_norm is None else q_norm.weight,
            "k_norm": None if k_norm is None else k_norm.weight,
            "eps": 1e-6 if norm is None else norm.eps,
        }
        if rotary is not None:
            self.placing |= {
                "inv_freq": rotary.inv_freq,
                "rotary_dim": rotary.rotary_dim,
                "interleaved": rotary.interleaved,
                "scale": rotary.scale,
            }

    def __call__(self, x: torch.Tensor, step: StepInput, cache: AttentionStorage) -> torch.Tensor:
        """x [T, H] -> [T, H]; writes this step's keys and values, then attends over all of them."""
        shape = self.shape
        num_tokens = x.shape[0]
        heads = ops.linear(x, self.qkv).view(num_tokens, -1, shape.head_dim)  # [T, Hq + 2 Hkv, D]
        group = step.groups[cache.group]
        q = ops.place_heads(heads, shape.num_heads, cache.k, cache.v, group.slots, step.positions, **self.placing)
        out = ops.paged_attention(
            q,
            cache.k,
            cache.v,
            group.block_table,
            step.row_offsets,
            step.start_positions,
            scale=shape.scale,
            window=shape.window,
            softcap=shape.softcap,
            max_q_len=step.max_q_len,
            max_context=step.max_context,
        )  # [T, Hq, D]
        return ops.linear(out.reshape(num_tokens, -1), self.output)
