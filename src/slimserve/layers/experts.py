"""Mixture of experts: a sigmoid router with a selection bias, routed experts, and a shared expert."""

from __future__ import annotations

import torch

from slimserve import ops
from slimserve.layers.mlp import GatedMLP
from slimserve.ops import ExpertWeights, LinearWeight


class MixtureOfExperts:
    """sum_e w_e expert_e(x) + shared(x); w = sigmoid(router x) of the top_k by sigmoid + bias (arXiv:2408.15664).

    The router runs in float32. `limit` clamps gate and up of the routed experts.
    """

    def __init__(
        self,
        router: LinearWeight,
        bias: torch.Tensor,
        experts: ExpertWeights,
        shared: GatedMLP | None,
        *,
        top_k: int,
        normalise: bool,
        scaling: float,
        limit: float | None,
    ) -> None:
        self.router = router
        self.bias = bias
        self.experts = experts
        self.shared = shared
        self.top_k = top_k
        self.normalise = normalise
        self.scaling = scaling
        self.limit = limit

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] -> [T, H]."""
        logits = ops.linear(x.float(), self.router)  # [T, E] float32
        ids, weights = ops.route(logits, self.bias, top_k=self.top_k, normalise=self.normalise, scaling=self.scaling)
        routed = ops.expert_linear(x, self.experts, ids, weights, self.limit)
        return routed if self.shared is None else routed + self.shared(x)
