"""Linear attention with a gated delta rule: Kimi delta attention (per-channel decay) and gated delta net.

Sources: arXiv:2412.06464 (gated delta networks), arXiv:2510.26692 (Kimi Linear). The recurrence itself and its
storage are described in layers.contract.RecurrentStorage and ops.reference.linear_attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slimserve import ops
from slimserve.layers.contract import RecurrentStorage, StepInput
from slimserve.layers.norm import RMSNorm
from slimserve.ops import LinearWeight


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """Geometry: value head h reads key head h // (heads / key_heads), or h mod key_heads where `tiled`."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    tiled: bool = False

    @property
    def conv_dim(self) -> int:
        """Channels of the short convolution: query, key and value."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim


def delta_rule(
    shape: RecurrentShape,
    qkv: torch.Tensor,
    conv: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    step: StepInput,
    cache: RecurrentStorage,
) -> torch.Tensor:
    """Short convolution, then the gated delta rule over the step's rows.

    qkv [T, conv_dim] projections; conv [conv_dim, W]; g [T, H] or [T, H, K] log decay; beta [T, H]
    -> float32 [T, H, V].
    """
    group = step.groups[cache.group]
    mixed = ops.causal_conv(
        qkv,
        conv,
        cache.open_conv,
        cache.conv_tail,
        group.state_in,
        group.state_out,
        group.open_index,
        step.row_offsets,
        step.start_positions,
    )  # [T, conv_dim]
    keys_end = shape.key_heads * shape.key_dim
    num_tokens = qkv.shape[0]
    return ops.gated_delta_rule(
        mixed[:, :keys_end].reshape(num_tokens, shape.key_heads, shape.key_dim),
        mixed[:, keys_end : 2 * keys_end].reshape(num_tokens, shape.key_heads, shape.key_dim),
        mixed[:, 2 * keys_end :].reshape(num_tokens, shape.heads, shape.value_dim),
        g,
        beta,
        cache.state,
        cache.open_k,
        cache.open_g,
        cache.open_d,
        group.state_in,
        group.state_out,
        group.open_index,
        step.row_offsets,
        step.start_positions,
        tiled=shape.tiled,
    )


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """By an op whose bits do not depend on where a value stands; the vector loops of torch cannot promise that."""
    return ops.gate_multiply(torch.ones_like(x), x, silu=False)


class GatedDeltaNet:
    """out(norm(o) * silu(z)), one decay per value head: g = decay_rate * softplus(a + dt_bias).

    decay_rate [H] float32 is -exp(A_log). qkv projects to query, key and value rows, z to the output gate,
    ba stacks beta's rows over the decay's.
    """

    def __init__(
        self,
        shape: RecurrentShape,
        qkv: LinearWeight,
        z: LinearWeight,
        ba: LinearWeight,
        conv: torch.Tensor,
        decay_rate: torch.Tensor,
        dt_bias: torch.Tensor,
        norm: RMSNorm,
        output: LinearWeight,
    ) -> None:
        self.shape = shape
        self.qkv = qkv
        self.z = z
        self.ba = ba
        self.conv = conv
        self.decay_rate = decay_rate
        self.dt_bias = dt_bias
        self.norm = norm
        self.output = output

    def __call__(self, x: torch.Tensor, step: StepInput, cache: RecurrentStorage) -> torch.Tensor:
        """x [T, H] -> [T, H]."""
        shape = self.shape
        ba = ops.linear(x, self.ba, out_dtype=torch.float32)  # [T, 2 heads]
        beta = sigmoid(ba[:, : shape.heads])
        g = ops.log_decay(ba[:, shape.heads :], self.dt_bias, self.decay_rate, None)
        o = delta_rule(shape, ops.linear(x, self.qkv), self.conv, g, beta, step, cache)  # [T, heads, V]
        z = ops.linear(x, self.z, out_dtype=torch.float32).view_as(o)
        gated = ops.gate_multiply(self.norm(o), z, silu=True)
        return ops.linear(gated.to(x.dtype).view(x.shape[0], -1), self.output)


class KimiDeltaAttention:
    """out(norm(o) * sigmoid(g_b g_a x)), one decay per key channel.

    u = f_b(f_a x) + dt_bias; g = lower_bound * sigmoid(-decay_rate u), or decay_rate softplus(u) where no bound is set.
    decay_rate [H] float32 is -exp(A_log).
    """

    def __init__(
        self,
        shape: RecurrentShape,
        qkv: LinearWeight,
        beta: LinearWeight,
        forget: tuple[LinearWeight, LinearWeight],
        gate: tuple[LinearWeight, LinearWeight],
        conv: torch.Tensor,
        decay_rate: torch.Tensor,
        dt_bias: torch.Tensor,
        lower_bound: float | None,
        norm: RMSNorm,
        output: LinearWeight,
    ) -> None:
        self.shape = shape
        self.qkv = qkv
        self.beta = beta
        self.forget = forget
        self.gate = gate
        self.conv = conv
        self.decay_rate = decay_rate
        self.dt_bias = dt_bias
        self.lower_bound = lower_bound
        self.norm = norm
        self.output = output

    def __call__(self, x: torch.Tensor, step: StepInput, cache: RecurrentStorage) -> torch.Tensor:
        """x [T, H] -> [T, H]."""
        shape = self.shape
        num_tokens = x.shape[0]
        u = ops.linear(ops.linear(x, self.forget[0]), self.forget[1], out_dtype=torch.float32)
        u = u.view(num_tokens, shape.heads, shape.key_dim)
        g = ops.log_decay(u, self.dt_bias, self.decay_rate, self.lower_bound)
        beta = sigmoid(ops.linear(x, self.beta, out_dtype=torch.float32))
        o = delta_rule(shape, ops.linear(x, self.qkv), self.conv, g, beta, step, cache)  # [T, heads, V]
        z = ops.linear(ops.linear(x, self.gate[0]), self.gate[1], out_dtype=torch.float32).view_as(o)
        gated = ops.gate_multiply(self.norm(o), z, silu=False)
        return ops.linear(gated.to(x.dtype).view(num_tokens, -1), self.output)
