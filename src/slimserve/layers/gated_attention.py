"""Full attention whose output is gated per head: out(attn(q, k, v) * sigmoid(gate)), rotary on part of each head."""

from __future__ import annotations

import torch

from slimserve import ops
from slimserve.layers.attention import AttentionShape
from slimserve.layers.contract import AttentionStorage, StepInput
from slimserve.layers.norm import RMSNorm
from slimserve.layers.rotary import Rotary
from slimserve.ops import LinearWeight


class GatedAttention:
    """qkv stacks, per query head, its query and its gate; then key rows and value rows. Source: Qwen3.5."""

    def __init__(
        self,
        shape: AttentionShape,
        qkv: LinearWeight,
        output: LinearWeight,
        rotary: Rotary,
        q_norm: RMSNorm,
        k_norm: RMSNorm,
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
        num_tokens, head_dim = x.shape[0], shape.head_dim
        heads = ops.linear(x, self.qkv)  # [T, (2 Hq + 2 Hkv) D]
        keys_start = 2 * shape.num_heads * head_dim
        q_gate = heads[:, :keys_start].view(num_tokens, shape.num_heads, 2, head_dim)
        kv = heads[:, keys_start:].view(num_tokens, 2, shape.num_kv_heads, head_dim)
        q = self.q_norm(q_gate[:, :, 0].contiguous())
        k = self.k_norm(kv[:, 0].contiguous())
        self.rotary(q, step.positions)
        self.rotary(k, step.positions)
        group = step.groups[cache.group]
        ops.write_pages(k, cache.k, group.slots)
        ops.write_pages(kv[:, 1], cache.v, group.slots)
        out = ops.paged_attention(
            q,
            cache.k,
            cache.v,
            group.block_table,
            step.row_offsets,
            step.start_positions,
            scale=shape.scale,
            max_q_len=step.max_q_len,
            max_context=step.max_context,
        )  # [T, Hq, D]
        gated = ops.gate_multiply(out, q_gate[:, :, 1], silu=False)
        return ops.linear(gated.view(num_tokens, -1), self.output)
