"""Grouped-query attention over paged keys and values, causal in absolute positions."""

from __future__ import annotations

from dataclasses import dataclass

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

    def __call__(self, x: torch.Tensor, step: StepInput, cache: AttentionStorage) -> torch.Tensor:
        """x [T, H] -> [T, H]; writes this step's keys and values, then attends over all of them."""
        shape = self.shape
        num_tokens = x.shape[0]
        heads = ops.linear(x, self.qkv).view(num_tokens, -1, shape.head_dim)  # [T, Hq + 2 Hkv, D]
        keys_end = shape.num_heads + shape.num_kv_heads
        q, k = heads[:, : shape.num_heads], heads[:, shape.num_heads : keys_end]
        v = heads[:, keys_end:]
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        if self.rotary is not None and self.q_norm is None and self.k_norm is None:
            self.rotary(heads[:, :keys_end], step.positions)  # q and k are views of it: one call turns both
        elif self.rotary is not None:
            self.rotary(q, step.positions)
            self.rotary(k, step.positions)
        group = step.groups[cache.group]
        ops.write_pages(k, cache.k, group.slots)
        ops.write_pages(v, cache.v, group.slots)
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
