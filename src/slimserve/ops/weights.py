"""Prepared weights: what `prepare_linear` and `prepare_experts` return, and what a kernel must offer to serve them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from slimserve.ops.resolver import Choice


class PreparedLinear(Protocol):
    """One [N, K] part in the form its kernel reads; made by `implementation(part, device, numerics)` of an entry."""

    num_bytes: int

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write x [T, K] times the part into out [T, N], a column slice whose rows may be strided; T may be 0.

        x is contiguous; out is float32, bfloat16 or float16. The bits of a row depend on that row alone.
        """
        ...


@runtime_checkable
class RowDecoder(Protocol):
    """A prepared part that can also decode single rows of its weight."""

    def rows(self, token_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Weight rows token_ids [T], clamped to valid ids: [T, K] of `dtype`."""
        ...


class PreparedExperts(Protocol):
    """All experts of a layer; made by `implementation(gate_up, down, device, numerics)` of an entry.

    gate_up is one [E, 2F, K] tensor (gate rows first) or two [E, F, K] tensors (gate, up); down is [E, H, F].
    """

    num_bytes: int

    def __call__(
        self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, limit: float | None
    ) -> torch.Tensor:
        """x [T, K], expert_ids [T, k] (clamped to valid ids), weights [T, k] float32 -> [T, H] of x's dtype."""
        ...


class FusedProduct(Protocol):
    """All parts and the bias of a weight in one call; a kernel class offers it as `fuse(parts, bias)`."""

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write contiguous x [T, K] times all parts, plus the bias, into contiguous out [T, sum N_i]."""
        ...


@dataclass(slots=True)
class LinearPart:
    """A prepared part and the output columns [start, stop) that it fills."""

    start: int
    stop: int
    prepared: PreparedLinear
    choice: Choice


@dataclass(slots=True)
class LinearWeight:
    """A stack of [N_i, K] parts that multiply the same input; `bias` [sum N_i] is float32 or None."""

    out_features: int
    in_features: int
    parts: tuple[LinearPart, ...]
    bias: torch.Tensor | None
    fused: FusedProduct | None = None

    @property
    def row_decoder(self) -> RowDecoder | None:
        """The single part where it can decode rows of its weight (an embedding table), else None."""
        only = self.parts[0].prepared if len(self.parts) == 1 else None
        return only if isinstance(only, RowDecoder) else None

    @property
    def kernel(self) -> str:
        """Names of the kernels that serve the parts."""
        return " + ".join(dict.fromkeys(part.choice.entry.name for part in self.parts))

    @property
    def choices(self) -> tuple[Choice, ...]:
        """How each part's kernel was chosen."""
        return tuple(part.choice for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """Bytes held on the device."""
        bias = 0 if self.bias is None else self.bias.numel() * self.bias.element_size()
        return bias + sum(part.prepared.num_bytes for part in self.parts)


@dataclass(slots=True)
class ExpertWeights:
    """All routed experts of a layer: gate and up [E, F, K] and down [E, H, F]."""

    num_experts: int
    in_features: int
    intermediate: int
    out_features: int
    prepared: PreparedExperts
    choice: Choice

    @property
    def kernel(self) -> str:
        """Name of the kernel that serves the experts."""
        return self.choice.entry.name

    @property
    def choices(self) -> tuple[Choice, ...]:
        """How the kernel was chosen."""
        return (self.choice,)

    @property
    def num_bytes(self) -> int:
        """Bytes held on the device."""
        return self.prepared.num_bytes
