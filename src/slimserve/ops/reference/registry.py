"""The torch references as entries of the kernel table: they serve what no faster kernel does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slimserve.ops.reference import activation, attention, linear, norms, rotary
from slimserve.ops.resolver import Case, KernelEntry, Op


def _serves(case: Case) -> str | None:
    del case
    return None


def entries() -> tuple[KernelEntry, ...]:
    """One entry per operation, serving every case."""
    implementations: dict[Op, Callable[..., Any]] = {
        Op.LINEAR: linear.ReferenceLinear,
        Op.EXPERTS: linear.ReferenceExperts,
        Op.EMBEDDING: linear.embedding,
        Op.RMS_NORM: norms.rms_norm,
        Op.ADD_RMS_NORM: norms.add_rms_norm,
        Op.SILU_MUL: activation.silu_mul,
        Op.GELU_TANH_MUL: activation.gelu_tanh_mul,
        Op.ROPE: rotary.rope,
        Op.WRITE_PAGES: attention.write_pages,
        Op.PAGED_ATTENTION: attention.paged_attention,
    }
    return tuple(KernelEntry(op, "torch reference", _serves, run) for op, run in implementations.items())
