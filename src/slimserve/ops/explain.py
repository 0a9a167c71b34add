"""The kernel plan as printable rows."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from slimserve.ops.registry import pick
from slimserve.ops.resolver import KernelRow, Op, describe
from slimserve.ops.weights import ExpertWeights, LinearWeight

_PLAIN_OPS = (Op.EMBEDDING, Op.RMS_NORM, Op.ADD_RMS_NORM, Op.SILU_MUL, Op.GELU_TANH_MUL, Op.ROPE)
_PAGED_OPS = (Op.WRITE_PAGES, Op.PAGED_ATTENTION)


def explain(
    device: torch.device | str,
    *,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype = torch.bfloat16,
    weights: Iterable[LinearWeight | ExpertWeights] = (),
) -> tuple[KernelRow, ...]:
    """Which kernel serves what on `device`, and what refused before it; equal rows of `weights` are listed once."""
    target = torch.device(device)
    rows = [describe(pick(op, target, dtype)) for op in _PLAIN_OPS]
    rows += [describe(pick(op, target, dtype, kv_dtype)) for op in _PAGED_OPS]
    rows += [describe(choice) for weight in weights for choice in weight.choices]
    return tuple(dict.fromkeys(rows))
