"""Hyper-connections (mHC): a site collapses several residual streams into a block's input and mixes its output back."""

from __future__ import annotations

from collections.abc import Callable

import torch

from slimserve import ops
from slimserve.layers.norm import RMSNorm
from slimserve.ops import LinearWeight


class HyperConnection:
    """One site. `mix` projects the flattened streams [S * H] to (2 + S) * S coefficients in float32."""

    def __init__(
        self,
        mix: LinearWeight,
        base: torch.Tensor,
        scale: torch.Tensor,
        *,
        norm_eps: float,
        eps: float,
        iterations: int,
    ) -> None:
        self.mix = mix
        self.base = base
        self.scale = scale
        self.norm_eps = norm_eps
        self.eps = eps
        self.iterations = iterations

    def __call__(
        self, streams: torch.Tensor, norm: RMSNorm, block: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """streams [T, S, H] -> [T, S, H] around block(norm(collapsed))."""
        mixes = ops.linear(streams.float().view(streams.shape[0], -1), self.mix)
        collapsed, post, comb = ops.hyper_pre(
            streams, mixes, self.base, self.scale, norm_eps=self.norm_eps, eps=self.eps, iterations=self.iterations
        )
        return ops.hyper_post(streams, block(norm(collapsed)), post, comb)
