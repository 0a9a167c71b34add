"""Products with a matrix of its own for every attention head: [T, heads, K] -> [T, heads, N]."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from slimserve.ops.linear import linear, prepare_linear
from slimserve.ops.numerics import NumericsConfig
from slimserve.ops.registry import architecture, entries
from slimserve.ops.resolver import Case, Choice, KernelEntry, Op, resolve
from slimserve.quant.tensor import PackedTensor


class PreparedHeads(Protocol):
    """All heads of a stack; made by `implementation(stack [heads, N, K], device, numerics)` of an entry."""

    num_bytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, heads, K] -> [T, heads, N] of x's dtype; the bits of token t depend on x[t] alone."""
        ...


@dataclass(slots=True)
class HeadWeight:
    """A stack of [N, K] matrices, one per head."""

    num_heads: int
    out_features: int
    in_features: int
    prepared: PreparedHeads
    choice: Choice

    @property
    def kernel(self) -> str:
        """Name of the kernel that serves the heads."""
        return self.choice.entry.name

    @property
    def choices(self) -> tuple[Choice, ...]:
        """How the kernel was chosen."""
        return (self.choice,)

    @property
    def num_bytes(self) -> int:
        """Bytes held on the device."""
        return self.prepared.num_bytes


class LinearPerHead:
    """A product per head by the device's matrix kernel."""

    def __init__(self, stack: PackedTensor, device: torch.device, numerics: NumericsConfig) -> None:
        self.heads = [
            prepare_linear([_matrix(stack, head)], device=device, numerics=numerics) for head in range(stack.shape[0])
        ]
        self.num_bytes = sum(weight.num_bytes for weight in self.heads)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See PreparedHeads."""
        out = torch.empty((*x.shape[:2], self.heads[0].out_features), dtype=x.dtype, device=x.device)
        for head, weight in enumerate(self.heads):
            out[:, head] = linear(x[:, head].contiguous(), weight)
        return out


def _matrix(stack: PackedTensor, head: int) -> PackedTensor:
    """One [N, K] matrix of a stack."""
    scales = {key: scale if scale.numel() == 1 else scale[head] for key, scale in stack.scales.items()}
    return replace(stack, shape=stack.shape[1:], data=stack.data[head], scales=scales)


PER_HEAD = KernelEntry(Op.HEAD_LINEAR, "a product per head", lambda case: None, LinearPerHead)
"""Serves every stack that no kernel of the device takes whole."""


def prepare_head_linear(
    stack: PackedTensor, *, device: torch.device | str = "cpu", numerics: NumericsConfig | None = None
) -> HeadWeight:
    """Prepare a stack [heads, N, K]; raises ValueError for another shape, RefusalError where no kernel serves it."""
    if len(stack.shape) != 3:
        raise ValueError(f"{stack.name or 'a stack of heads'} has shape {stack.shape}, expected [heads, N, K]")
    target, chosen = torch.device(device), numerics or NumericsConfig()
    case = Case(
        Op.HEAD_LINEAR,
        target,
        architecture(target),
        weight_format=stack.format.name,
        dtype=chosen.activation_dtype,
        shape=stack.shape,
        numerics=chosen,
    )
    choice = resolve(case, (*entries(target.type), PER_HEAD))
    heads, rows, width = stack.shape
    return HeadWeight(heads, rows, width, choice.entry.implementation(stack, target, chosen), choice)


def head_linear(x: torch.Tensor, weight: HeadWeight) -> torch.Tensor:
    """Multiply each head's row with that head's matrix: x [T, heads, K] -> [T, heads, N] of x's dtype."""
    if x.dim() != 3 or x.shape[1:] != (weight.num_heads, weight.in_features):
        expected = f"[T, {weight.num_heads}, {weight.in_features}]"
        raise ValueError(f"head_linear: x has shape {tuple(x.shape)}, expected {expected}")
    return weight.prepared(x)
