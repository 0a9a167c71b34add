"""Root-mean-square normalization (arXiv:1910.07467) with the statistics in float32."""

from __future__ import annotations

import torch

from slimserve import ops


class RMSNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension; weight [D] float32 is the whole factor.

    Conventions that store weight - 1 are undone at load, so no offset lives here.
    """

    __slots__ = ("eps", "weight")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize the rows of x [..., D]."""
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(normalized sum, sum) of x and residual, both [T, D]: the step between two blocks of a pre-norm model."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)
