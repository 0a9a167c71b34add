"""Caches in the plan: the engine's own split of a budget, and that of a drafter's own caches beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from slimserve.cache.budget import (
    CacheDemand,
    CachePlan,
    GroupPlan,
    cache_bytes,
    full_budget,
    minimum_budget,
    plan_cache,
)
from slimserve.models.contract import BufferSpec, CacheKind, CacheSpec
from slimserve.plan.description import Description
from slimserve.plan.drafter import DrafterMemory
from slimserve.plan.working import DeviceMemory, Term

GIB = 1 << 30

CPU_CACHE_SHARE = 0.5
"""Part of a computer's free memory that caches take where no record says how much; the rest is its owner's."""

REPLICATED_CACHES = frozenset({CacheKind.LATENT, CacheKind.INDEXER})


def shard(specs: Sequence[CacheSpec], description: Description, count: int) -> tuple[CacheSpec, ...]:
    """The cache table of one of `count` devices: heads are split, latents and indexer keys are replicated."""
    if count == 1:
        return tuple(specs)
    sharded = []
    for spec in specs:
        parts = 1 if spec.kind in REPLICATED_CACHES else count
        if spec.kind in (CacheKind.ATTENTION, CacheKind.WINDOW):
            parts = min(count, description.num_kv_heads)
        page, slot, opened = (_cut(buffers, parts) for buffers in (spec.page, spec.slot, spec.open))
        sharded.append(replace(spec, page=page, slot=slot, open=opened))
    return tuple(sharded)


def _cut(buffers: Sequence[BufferSpec], parts: int) -> tuple[BufferSpec, ...]:
    return tuple(BufferSpec(buffer.name, (-(-buffer.num_bytes // parts),), torch.uint8) for buffer in buffers)


def split_memory(
    specs: Sequence[CacheSpec],
    demand: CacheDemand,
    stated: int | None,
    memory: DeviceMemory,
    available: int,
    drafter: DrafterMemory,
) -> tuple[CachePlan | None, CachePlan | None]:
    """The engine's own split of its budget, and that of the drafter's own caches; None where it would not fit.

    Both hold the same number of blocks: a request for which the drafter has no memory is decoded plainly.
    """
    least, least_own = minimum_budget(specs, demand), drafter.least_cache(demand)
    if stated is not None:
        if stated < least or stated + least_own > available:
            return None, None
        budget = stated
        num_blocks = plan_cache(specs, demand, stated).num_blocks if specs else 0
        own = max(least_own, min(drafter.cache_of(demand, num_blocks), available - stated))
    else:
        most = demand.max_sequences * demand.blocks_per_sequence
        share = available if memory.kind == "cuda" else int(available * CPU_CACHE_SHARE)
        both = max(min(full_budget(specs, demand) + drafter.cache_of(demand, most), share), least + least_own)
        if both > available:
            return None, None
        own = drafter.cache_of(demand, _blocks_of_both(specs, demand, drafter, both))
        budget = both - own
    plan = plan_cache(specs, demand, budget) if specs else CachePlan(demand, (), budget, 0)
    return plan, plan_cache(drafter.own, drafter.demand(demand), own) if drafter.own else None


def _blocks_of_both(specs: Sequence[CacheSpec], demand: CacheDemand, drafter: DrafterMemory, budget: int) -> int:
    """The most blocks that the model's caches and the drafter's own hold alike within a budget; a longest request's
    at least."""
    low = demand.blocks_per_sequence
    high = low * demand.max_sequences
    while low < high:
        middle = (low + high + 1) // 2
        fits = cache_bytes(specs, demand, middle) + drafter.cache_of(demand, middle) <= budget
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def cache_terms(prefix: str, cache: CachePlan | None, label: str) -> list[Term]:
    """A term for each part of each group; none where nothing fits."""
    if cache is None:
        return []
    terms = []
    for group in cache.groups:
        for name, count, unit in _parts(group, cache.demand):
            source = f"cache table: {count} x {unit:,} bytes"
            terms.append(Term(f"{prefix}.{group.name}.{name}", count * unit, label, source))
    if cache.unused_bytes:
        terms.append(Term(f"{prefix}.unused", cache.unused_bytes, label, "too little for one more block"))
    return terms


def _parts(group: GroupPlan, demand: CacheDemand) -> list[tuple[str, int, int]]:
    """(part, count, bytes of one) of a group: pages, or running states and kept snapshots; and open buffers."""
    parts = [("pages", group.num_units, group.unit_bytes)]
    if group.kind is CacheKind.RECURRENT:
        running = min(2 * demand.max_sequences + 1, group.num_units)
        parts = [("states", running, group.unit_bytes), ("snapshots", group.num_units - running, group.unit_bytes)]
    if group.num_open and group.open_bytes:
        parts.append(("open", group.num_open, group.open_bytes))
    return parts


def tokens_per_gib(
    specs: Sequence[CacheSpec], demand: CacheDemand, cache: CachePlan | None, drafter: DrafterMemory
) -> int:
    """Tokens of context that one more GiB for the caches would hold; the drafter's own take their part of it."""
    if not specs:
        return 0
    budget = cache.budget_bytes if cache is not None else minimum_budget(specs, demand)
    lowest = demand.blocks_per_sequence
    own = drafter.cache_of(demand, 2 * lowest) - drafter.cache_of(demand, lowest)
    both = cache_bytes(specs, demand, 2 * lowest) - cache_bytes(specs, demand, lowest) + own
    more = GIB if not own or not both else GIB * (both - own) // both
    return plan_cache(specs, demand, budget + more).num_tokens - plan_cache(specs, demand, budget).num_tokens
