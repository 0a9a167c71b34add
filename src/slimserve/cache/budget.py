"""How one byte budget is split over the groups of a cache table: a pure function, used by the engine and the plan.

All groups are sized from one number, the blocks of 64 tokens that the caches hold together. A group that keeps
every block gets a page for each. A window group gets a window per sequence, and two more per sequence that later
prompts may restart from. A recurrent group gets two slots per sequence (the running state and the one being written);
besides, for restarts, two per sequence's worth of blocks and one per `snapshot_spacing` tokens, of which the latter
may cost a quarter of the pages that they stand beside: a state can weigh as much as ten thousand tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from slimserve.errors import RefusalError
from slimserve.layers.contract import BLOCK_TOKENS
from slimserve.models.contract import CacheKind, CacheSpec

_SNAPSHOT_SHARE = 0.25
"""Bytes of states kept at `snapshot_spacing`, as a part of the bytes of the pages that they stand beside."""


@dataclass(frozen=True, slots=True)
class CacheDemand:
    """What the caches must carry.

    chunk_tokens: most prompt tokens of one step (window groups hold a chunk besides the window).
    snapshot_spacing: tokens between kept recurrent states of a long prompt.
    """

    max_sequences: int
    max_context: int
    chunk_tokens: int
    snapshot_spacing: int = 1024

    @property
    def blocks_per_sequence(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_context // BLOCK_TOKENS)


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Counts of one group, the null unit included, and their bytes. Units are pages, or slots in RECURRENT groups."""

    name: str
    kind: CacheKind
    num_units: int
    num_open: int
    unit_bytes: int
    open_bytes: int
    sequences: float
    """Sequences of max_context tokens that the units could carry at once."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all units and open buffers."""
        return self.num_units * self.unit_bytes + self.num_open * self.open_bytes


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The split: one GroupPlan per group in the order of the cache table; used + unused = budget."""

    demand: CacheDemand
    groups: tuple[GroupPlan, ...]
    budget_bytes: int
    num_blocks: int

    @property
    def used_bytes(self) -> int:
        """Bytes of all groups."""
        return sum(group.total_bytes for group in self.groups)

    @property
    def unused_bytes(self) -> int:
        """Budget that is too little for one more block."""
        return self.budget_bytes - self.used_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that all groups hold together."""
        return self.num_blocks * BLOCK_TOKENS

    @property
    def binding(self) -> str:
        """The group that is full first when every sequence grows to max_context."""
        return min(self.groups, key=lambda group: group.sequences).name

    @property
    def concurrency(self) -> float:
        """Sequences of max_context tokens that fit at once."""
        return min(group.sequences for group in self.groups)


def cache_bytes(specs: Sequence[CacheSpec], demand: CacheDemand, num_blocks: int) -> int:
    """Bytes that caches of num_blocks blocks take."""
    block_bytes = _block_bytes(specs)
    return sum(_group_plan(spec, demand, num_blocks, block_bytes).total_bytes for spec in specs)


def full_budget(specs: Sequence[CacheSpec], demand: CacheDemand) -> int:
    """Bytes with which max_sequences sequences of max_context tokens fit at once."""
    return cache_bytes(specs, demand, demand.max_sequences * demand.blocks_per_sequence)


def minimum_budget(specs: Sequence[CacheSpec], demand: CacheDemand) -> int:
    """Bytes below which the longest sequence does not fit."""
    return cache_bytes(specs, demand, demand.blocks_per_sequence)


def plan_cache(specs: Sequence[CacheSpec], demand: CacheDemand, budget_bytes: int) -> CachePlan:
    """Split a budget so that the caches hold as many blocks as fit.

    Raises RefusalError where not even one sequence of max_context tokens fits, with the numbers.
    """
    lowest = demand.blocks_per_sequence
    least = cache_bytes(specs, demand, lowest)
    if least > budget_bytes:
        raise RefusalError(
            f"the caches need {_mebibytes(least)} for {demand.max_sequences} sequences of which one reaches "
            f"{demand.max_context} tokens, but their budget is {_mebibytes(budget_bytes)}; raise the budget, or lower "
            "max_context or max_sequences"
        )
    fits, too_many = lowest, 2 * lowest
    while cache_bytes(specs, demand, too_many) <= budget_bytes and too_many < lowest << 20:
        fits, too_many = too_many, 2 * too_many
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if cache_bytes(specs, demand, middle) <= budget_bytes:
            fits = middle
        else:
            too_many = middle
    groups = tuple(_group_plan(spec, demand, fits, _block_bytes(specs)) for spec in specs)
    return CachePlan(demand, groups, budget_bytes, fits)


def _block_bytes(specs: Sequence[CacheSpec]) -> int:
    """Bytes of one block in the groups that keep every block."""
    return sum(spec.page_bytes() for spec in specs if spec.kind not in (CacheKind.RECURRENT, CacheKind.WINDOW))


def _group_plan(spec: CacheSpec, demand: CacheDemand, num_blocks: int, block_bytes: int) -> GroupPlan:
    sequences = demand.max_sequences
    has_open = bool(spec.open)
    num_open = sequences + 1 if has_open or spec.kind is CacheKind.RECURRENT else 0
    if spec.kind is CacheKind.RECURRENT:
        unit_bytes = spec.slot_bytes()
        share = num_blocks / (sequences * demand.blocks_per_sequence)
        per_block = 1 / max(1, demand.snapshot_spacing // BLOCK_TOKENS)
        if block_bytes:
            per_block = min(per_block, _SNAPSHOT_SHARE * block_bytes / unit_bytes)
        units = 2 * sequences + ceil(2 * sequences * min(1.0, share)) + ceil(num_blocks * per_block)
        capacity = units / 2
    elif spec.kind is CacheKind.WINDOW:
        assert spec.window is not None, f"window group {spec.name} has no window"
        window = -(-(spec.window - 1) // BLOCK_TOKENS) + 2
        chunk = -(-demand.chunk_tokens // BLOCK_TOKENS) + 1
        per_sequence = min(window, demand.blocks_per_sequence)
        running = min(sequences * per_sequence + chunk, sequences * demand.blocks_per_sequence)
        units = running + min(num_blocks, 2 * sequences * per_sequence)
        capacity = max((units - chunk) / per_sequence, units / demand.blocks_per_sequence)
        unit_bytes = spec.page_bytes()
    else:
        units = num_blocks
        capacity = units / demand.blocks_per_sequence
        unit_bytes = spec.page_bytes()
    return GroupPlan(spec.name, spec.kind, units + 1, num_open, unit_bytes, spec.open_bytes(), capacity)


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
