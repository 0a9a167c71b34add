"""The physical floor: bytes that must move for a step, and the time that moving them takes at a given bandwidth.

At R rows a step reads every dense weight once, the distinct experts that R rows touch, the state of each row (and
writes it where it moves), and the keys and values of each row's context. No kernel can be faster than these bytes
over the device's bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slimserve.layers.contract import BLOCK_TOKENS
from slimserve.models.contract import CacheKind, CacheSpec, Role
from slimserve.plan.description import DRAFTER, Description

LOGITS_ITEM = 4


@dataclass(frozen=True, slots=True)
class FloorTerm:
    """Bytes that one step moves for one purpose."""

    name: str
    num_bytes: float


@dataclass(frozen=True, slots=True)
class StepFloor:
    """The floor of a step with `concurrency` rows of `context` tokens at `bandwidth` bytes per second."""

    concurrency: int
    context: int
    terms: tuple[FloorTerm, ...]
    bandwidth: float

    @property
    def num_bytes(self) -> float:
        """Bytes of the step."""
        return sum(term.num_bytes for term in self.terms)

    @property
    def milliseconds(self) -> float:
        """Least time of the step."""
        return 1e3 * self.num_bytes / self.bandwidth

    @property
    def tokens_per_second(self) -> float:
        """Most tokens per second over all rows."""
        return self.concurrency * self.bandwidth / self.num_bytes


def distinct_experts(num_experts: int, per_token: int, rows: float) -> float:
    """Experts that `rows` independent rows are expected to touch: E (1 - (1 - k/E)^R)."""
    if num_experts <= 0:
        return 0.0
    return num_experts * (1.0 - (1.0 - per_token / num_experts) ** rows)


def step_floor(
    description: Description,
    concurrency: int,
    *,
    context: int,
    bandwidth: float,
    kv_dtype: torch.dtype = torch.bfloat16,
) -> StepFloor:
    """The floor of a decode step of `concurrency` rows, each with `context` tokens behind it."""
    terms = [*weight_terms(description, concurrency), *_cache_terms(description, concurrency, context, kv_dtype)]
    if description.vocab_size:
        terms.append(FloorTerm("logits", float(concurrency * description.vocab_size * LOGITS_ITEM)))
    return StepFloor(concurrency, context, tuple(terms), bandwidth)


def weight_terms(description: Description, rows: int) -> list[FloorTerm]:
    """Weight bytes of a step by family. Only touched rows of the embedding and touched experts are read."""
    sums: dict[str, float] = {}
    tied = not any(weight.family == Role.HEAD.value for weight in description.weights)
    for weight in description.weights:
        if weight.family == DRAFTER:
            continue
        size = float(weight.num_bytes)
        name = weight.family
        if weight.family == Role.EMBEDDING.value:
            row = size * min(rows, description.vocab_size or rows) / max(description.vocab_size, 1)
            sums[name] = sums.get(name, 0.0) + row
            if not tied:
                continue
            name = Role.HEAD.value
        elif weight.experts:
            size *= distinct_experts(weight.experts, description.experts_per_token, rows) / weight.experts
        sums[name] = sums.get(name, 0.0) + size
    return [FloorTerm(f"weights.{name}", size) for name, size in sums.items()]


def _cache_terms(description: Description, rows: int, context: int, kv_dtype: torch.dtype) -> list[FloorTerm]:
    return [
        FloorTerm(f"cache.{spec.name}", rows * float(row_bytes(spec, context, description)))
        for spec in description.caches(kv_dtype)
    ]


def row_bytes(spec: CacheSpec, context: int, description: Description) -> float:
    """Bytes of one group that one row's decode step reads and writes, for a row with `context` tokens behind it.

    Pages: the visible tokens are read and one is written. Sparse latents: only the selected tokens are read.
    Recurrent: the state is read at every step and written once in 64; half a chunk of open rows is read on average.
    """
    per_token = spec.page_bytes() / BLOCK_TOKENS
    if spec.kind is CacheKind.RECURRENT:
        state = spec.slot_bytes()
        half_open = spec.open_bytes() / 2 * (BLOCK_TOKENS / (BLOCK_TOKENS + 16))
        return state * (1 + 1 / BLOCK_TOKENS) + half_open
    visible = min(context, spec.window) if spec.window is not None else context
    if spec.kind is CacheKind.LATENT:
        visible = min(visible, _selected(description))
    return per_token * (visible + 1)


def _selected(description: Description) -> int:
    """Tokens that sparse attention reads at most; everything where the model selects nothing."""
    config = description.config
    pools, pool = getattr(config, "top_pools", 0), getattr(config, "pool", 0)
    return int(pools * pool + pool - 1) if pools and pool else 1 << 60


def floor_table(
    description: Description, concurrencies: Sequence[int], *, context: int, bandwidth: float,
    kv_dtype: torch.dtype = torch.bfloat16,
) -> tuple[StepFloor, ...]:  # fmt: skip
    """Floors at several concurrencies."""
    return tuple(
        step_floor(description, count, context=context, bandwidth=bandwidth, kv_dtype=kv_dtype)
        for count in concurrencies
    )
