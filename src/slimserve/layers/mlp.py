"""Gated feed-forward (arXiv:2002.05202): down(act(gate x) * up x)."""

from __future__ import annotations

from enum import Enum

import torch

from slimserve import ops
from slimserve.ops import LinearWeight


class Activation(Enum):
    """The gate's nonlinearity."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


class GatedMLP:
    """gate_up stacks gate [F, H] over up [F, H]; down is [H, F]; `limit` clamps gate and up (SiLU only)."""

    __slots__ = ("activation", "down", "gate_up", "limit")

    def __init__(
        self, gate_up: LinearWeight, down: LinearWeight, activation: Activation, *, limit: float | None = None
    ) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activation = activation
        self.limit = limit

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] -> [T, H]."""
        gelu = self.activation is Activation.GELU_TANH
        return ops.gated_mlp(x, self.gate_up, self.down, gelu=gelu, limit=self.limit)
