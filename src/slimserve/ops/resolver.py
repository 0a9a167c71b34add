"""Picks one kernel per operation, weight format, KV format, device and row range, once, and can say why.

Entries stand in order of preference; the first that accepts a case serves it, and what refused it before is kept
for `slimserve show --kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from slimserve.errors import RefusalError
from slimserve.ops.numerics import NumericsConfig


class Op(Enum):
    """The operations that the table resolves."""

    LINEAR = "linear"
    EXPERTS = "expert_linear"
    HEAD_LINEAR = "head_linear"
    EMBEDDING = "embedding"
    RMS_NORM = "rms_norm"
    ADD_RMS_NORM = "add_rms_norm"
    LAYER_NORM = "layer_norm"
    SILU_MUL = "silu_mul"
    GELU_TANH_MUL = "gelu_tanh_mul"
    ROPE = "rope"
    WRITE_PAGES = "write_pages"
    PLACE_HEADS = "place_heads"
    PAGED_ATTENTION = "paged_attention"
    GATE_MULTIPLY = "gate_multiply"
    LOG_DECAY = "log_decay"
    CAUSAL_CONV = "causal_conv"
    DELTA_RULE = "gated_delta_rule"
    HYPER_PRE = "hyper_pre"
    HYPER_POST = "hyper_post"
    ROUTE = "route"
    UPDATE_POOLS = "update_pools"
    SELECT_POOLS = "select_pools"
    WRITE_LATENTS = "write_latents"
    LATENT_ATTENTION = "latent_attention"


ANY_ROWS = (1, 1 << 30)


@dataclass(frozen=True, slots=True)
class Case:
    """What a kernel is wanted for; fields that do not concern an operation stay None.

    `rows` is the range of row counts (inclusive) that the kernel must serve. `shape` is [N, K] of one weight part.
    """

    op: Op
    device: torch.device
    architecture: str
    weight_format: str | None = None
    kv_dtype: torch.dtype | None = None
    dtype: torch.dtype | None = None
    rows: tuple[int, int] = ANY_ROWS
    shape: tuple[int, ...] | None = None
    numerics: NumericsConfig = field(default_factory=NumericsConfig)


@dataclass(frozen=True, slots=True)
class KernelEntry:
    """One kernel: `refuses(case)` is None where it serves the case, else one short reason.

    `implementation` follows the public signature of its operation, except for the operations with a prepared
    weight: LINEAR and EXPERTS implement the factories described in `ops.weights`, HEAD_LINEAR that of `ops.heads`.
    """

    op: Op
    name: str
    refuses: Callable[[Case], str | None]
    implementation: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Choice:
    """The entry that serves a case, and (name, reason) of every entry that was tried before it."""

    case: Case
    entry: KernelEntry
    refused: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One printable row of the kernel plan."""

    op: str
    subject: str
    kernel: str
    refused: str = ""


def resolve(case: Case, entries: Sequence[KernelEntry]) -> Choice:
    """The first entry that serves `case`; raises RefusalError listing every refusal where none does."""
    refused: list[tuple[str, str]] = []
    for entry in entries:
        if entry.op is not case.op:
            continue
        reason = entry.refuses(case)
        if reason is None:
            return Choice(case, entry, tuple(refused))
        refused.append((entry.name, reason))
    tried = "; ".join(f"{name}: {reason}" for name, reason in refused) or "no kernel is registered"
    subject = " ".join(str(part) for part in (case.weight_format, case.kv_dtype, case.shape) if part is not None)
    raise RefusalError(f"No kernel serves {case.op.value} {subject} on {case.device} ({tried}).")


def describe(choice: Choice) -> KernelRow:
    """The choice as a row of the kernel plan."""
    case = choice.case
    parts = [case.weight_format, str(case.kv_dtype).removeprefix("torch.") if case.kv_dtype else None]
    if case.shape is not None:
        parts.append("x".join(str(extent) for extent in case.shape))
    if case.rows != ANY_ROWS:
        parts.append(f"rows {case.rows[0]}-{case.rows[1]}")
    subject = " ".join(part for part in parts if part) or str(case.device)
    return KernelRow(case.op.value, subject, choice.entry.name, "; ".join(f"{n}: {r}" for n, r in choice.refused))
