"""Gated activations in float32.

Only exp and tanh are used: torch's CPU sigmoid and silu take another code path for the last elements of a tensor,
which would make a row's bits depend on its place in the step.
"""

from __future__ import annotations

import math

import torch


def silu_mul(gate_up: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    """silu(gate) * up with optional clamps: gate <= limit, -limit <= up <= limit."""
    gate, up = gate_up.float().chunk(2, dim=-1)  # [T, F] each
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    gate = gate.contiguous()
    return (gate / (1.0 + torch.exp(-gate)) * up).to(gate_up.dtype)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """0.5 g (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3))) * up."""
    gate, up = gate_up.float().chunk(2, dim=-1)  # [T, F] each
    gate = gate.contiguous()
    inner = math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate * gate * gate)
    return (0.5 * gate * (1.0 + torch.tanh(inner)) * up).to(gate_up.dtype)
