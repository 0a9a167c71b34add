"""The memory plan: a named term for every byte, for this machine or one that is not here.

Weights come from the parameter table and the formats (file headers or catalog), caches from the cache table and
the engine's own split of a budget (cache.budget), everything else from the formulas beside the constants below.
On several devices that share a model the terms are those of the fullest device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from slimserve.cache.budget import CacheDemand, CachePlan, GroupPlan, full_budget, minimum_budget, plan_cache
from slimserve.engine.config import EngineConfig
from slimserve.errors import RefusalError
from slimserve.hardware import format_bytes
from slimserve.layers.contract import BLOCK_TOKENS
from slimserve.models.contract import BufferSpec, CacheKind, CacheSpec, Role
from slimserve.ops.held import held_bytes
from slimserve.plan.description import DRAFTER, Description
from slimserve.plan.working import (
    MIB,
    DeviceMemory,
    Term,
    graph_terms,
    input_bytes,
    rounding_bytes,
    slack_term,
    working_terms,
)

__all__ = [
    "GIB",
    "MIB",
    "DeviceMemory",
    "MemoryPlan",
    "Term",
    "group_of",
    "plan_json",
    "plan_memory",
]

GIB = 1 << 30

RUNTIME_BYTES = {"cpu": 240 * MIB, "cuda": 640 * MIB}
"""The engine's process before it loads anything: python and torch, or on CUDA the device context with its kernels;
measured, see docs/notebook.md."""

SERVER_BYTES = {"cpu": 200 * MIB, "cuda": 0}
"""The server's own process where it shares the memory with the model; measured, see docs/notebook.md."""

TOKENIZER_BYTES = 500
"""What the server holds for a token of the vocabulary: 300 (Gemma 3) to 480 (Qwen 2.5) measured."""

RESERVE_SHARE = {"cpu": 0.10, "cuda": 0.03}
RESERVE_LEAST = {"cpu": 512 * MIB, "cuda": 512 * MIB}
"""Memory that is never planned, so that the machine does not run at the edge."""

USEFUL_CONTEXT = 32768
"""Below this, fewer sequences are offered before a shorter context."""

CPU_CACHE_SHARE = 0.5
"""Part of a computer's free memory that caches take where no record says how much; the rest is its owner's."""

HOST = "host"
"""Label of terms that lie in the computer's memory while the model runs on an accelerator."""

REPLICATED = frozenset({Role.NORM.value, Role.SMALL.value, Role.ROUTER.value, Role.CONV.value, Role.BIAS.value})
REPLICATED_CACHES = frozenset({CacheKind.LATENT, CacheKind.INDEXER})


def group_of(term: str) -> str:
    """The group that a term is measured with; terms that only show together share one."""
    head = term.split(".")[0]
    shared = {DRAFTER: "weights", "activations": "working", "logits": "working"}
    return {**shared, "scratch": "working", "slack": "allocator", "rounding": "allocator"}.get(head, head)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a configuration takes and what it gives.

    `fixed_bytes` is everything but the caches. `cache` is None where not even one longest request fits; then
    `shortfall_bytes` is what is missing. `longest_context`: tokens of the longest single request that would fit.
    `most_sequences`: sequences, up to those asked for, beside which one request of max_context tokens would fit.
    `smaller`: fewer sequences and the longest context beside them, where neither of the two alone is enough.
    `stated_bytes`: the cache budget that a record or flag states, None where the plan decides.
    """

    terms: tuple[Term, ...]
    memory: DeviceMemory
    max_context: int
    max_sequences: int
    fixed_bytes: int
    reserve_bytes: int
    cache: CachePlan | None
    cache_minimum_bytes: int
    longest_context: int
    most_sequences: int
    smaller: tuple[int, int] | None
    stated_bytes: int | None
    tokens_per_gib: int
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the weights and one request of max_context tokens fit with the reserve left free."""
        return self.cache is not None

    @property
    def total_bytes(self) -> int:
        """All terms on the device, the reserve not counted."""
        return sum(t.num_bytes for t in self.terms if t.name != "reserve" and t.device == self.memory.label)

    def by_group(self) -> dict[str, int]:
        """Planned bytes of each group on the device: weights (the drafter's included), cache, runtime, ..."""
        groups: dict[str, int] = {}
        for term in self.terms:
            if term.name != "reserve" and term.device == self.memory.label:
                name = group_of(term.name)
                groups[name] = groups.get(name, 0) + term.num_bytes
        return groups

    @property
    def caches_too_small(self) -> bool:
        """Whether a stated cache budget, and not the memory, is what one longest request does not fit into."""
        return self.stated_bytes is not None and self.stated_bytes < self.cache_minimum_bytes

    @property
    def shortfall_bytes(self) -> int:
        """Bytes missing for one longest request; 0 where it fits."""
        if self.fits or self.caches_too_small:
            return 0
        needed = self.fixed_bytes + self.reserve_bytes + self.cache_minimum_bytes
        stated = self.stated_bytes or 0
        return max(
            needed - self.memory.free_bytes, self.fixed_bytes + self.reserve_bytes + stated - self.memory.free_bytes
        )

    @property
    def sequences_at_context(self) -> float:
        """Requests of max_context tokens that fit at once, as many as may run."""
        if self.cache is None or not self.cache.groups:
            return 0.0
        return min(self.cache.concurrency, float(self.max_sequences))

    @property
    def binding(self) -> str:
        """What is exhausted first: a cache group, max_sequences, or memory."""
        if self.cache is None:
            return "memory"
        if not self.cache.groups:
            return "nothing that is recorded"
        return "max_sequences" if self.cache.concurrency >= self.max_sequences else self.cache.binding

    def refusal(self, name: str) -> RefusalError:
        """The sentence for a configuration that does not fit, with the numbers and one remedy that works."""
        free, size = format_bytes(self.memory.free_bytes), format_bytes
        needed = self.fixed_bytes + self.reserve_bytes + self.cache_minimum_bytes
        if self.most_sequences:
            remedy = f"--max-seqs {self.most_sequences} fits"
        elif self.longest_context:
            remedy = f"--ctx {self.longest_context} fits"
        elif self.smaller is not None:
            remedy = f"--max-seqs {self.smaller[0]} --ctx {self.smaller[1]} fits"
        else:
            remedy = "no context fits here"
        if self.caches_too_small:
            allowed = size(self.stated_bytes or 0)
            return RefusalError(
                f"{name} does not fit: one request of {self.max_context} tokens with {self.max_sequences} sequences "
                f"needs {size(self.cache_minimum_bytes)} of caches and cache_bytes allows {allowed}; {remedy}"
            )
        return RefusalError(
            f"{name} does not fit: one request of {self.max_context} tokens with {self.max_sequences} sequences needs "
            f"{size(needed)} on {self.memory.label} ({size(self.fixed_bytes)} weights and buffers, "
            f"{size(self.cache_minimum_bytes)} caches, {size(self.reserve_bytes)} reserve), {free} are free; {remedy}"
        )


def plan_memory(
    description: Description, config: EngineConfig, memory: DeviceMemory, *, max_draft: int = 0, drafter: bool = False
) -> MemoryPlan:
    """Plan a configuration on a device's memory; never raises for what does not fit (see MemoryPlan.fits).

    drafter: whether the model's own draft layers run, and so need caches.
    """
    specs = _sharded(_specs(description, config, drafter), description, memory.count)
    demand = _demand(description, config)
    fixed = _fixed_terms(description, config, demand, memory, max_draft, specs)
    reserve = _reserve(memory)
    if memory.kind == "cuda":
        rounding = rounding_bytes(description, specs, demand, memory)
        fixed.append(Term("rounding", rounding, memory.label, "formula: tensors above 10 MiB in pieces of 2 MiB"))
    fixed_bytes = sum(term.num_bytes for term in fixed if term.device == memory.label)
    available = memory.free_bytes - fixed_bytes - reserve
    stated = None if config.cache.budget_bytes is None else -(-config.cache.budget_bytes // memory.count)
    cache = _plan_cache(specs, demand, stated, memory, available)
    most = available if stated is None else min(available, stated)
    terms = [*fixed, *(_cache_terms(cache, memory.label) if cache is not None else ())]
    terms.append(
        Term("reserve", reserve, memory.label, f"{RESERVE_SHARE[memory.kind]:.0%} of the memory, never planned")
    )

    def room(context: int) -> int:
        """Bytes for caches where the longest request has `context` tokens: tables and recorded steps grow with it."""
        moved = _moving_bytes(description, config, specs, replace(demand, max_context=context), memory, max_draft)
        left = available + _moving_bytes(description, config, specs, demand, memory, max_draft) - moved
        return left if stated is None else min(left, stated)

    longest = _longest_context(description, config, specs, room, demand.max_sequences)
    return MemoryPlan(
        terms=tuple(terms),
        memory=memory,
        max_context=demand.max_context,
        max_sequences=demand.max_sequences,
        fixed_bytes=fixed_bytes,
        reserve_bytes=reserve,
        cache=cache,
        cache_minimum_bytes=minimum_budget(specs, demand),
        longest_context=longest,
        most_sequences=_most_sequences(specs, demand, most),
        smaller=_smaller(description, config, specs, room, demand),
        stated_bytes=stated,
        tokens_per_gib=_tokens_per_gib(specs, demand, cache),
        notes=_notes(description),
    )


def _specs(description: Description, config: EngineConfig, drafter: bool) -> tuple[CacheSpec, ...]:
    dtype = config.cache.dtype.torch
    own = tuple(description.caches(dtype))
    return (*own, *description.drafter_caches(dtype)) if drafter else own


def _demand(description: Description, config: EngineConfig, max_context: int | None = None) -> CacheDemand:
    limits = config.scheduler
    context = max_context or min(limits.max_context, description.max_context)
    return CacheDemand(
        max_sequences=limits.max_sequences,
        max_context=context,
        chunk_tokens=min(limits.token_budget, context),
        snapshot_spacing=config.cache.snapshot_spacing,
    )


def _sharded(specs: Sequence[CacheSpec], description: Description, count: int) -> tuple[CacheSpec, ...]:
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


def _fixed_terms(
    description: Description,
    config: EngineConfig,
    demand: CacheDemand,
    memory: DeviceMemory,
    max_draft: int,
    specs: Sequence[CacheSpec],
) -> list[Term]:
    """Everything but caches and reserve."""
    label, kind, limits = memory.label, memory.kind, config.scheduler
    terms = [Term("runtime", RUNTIME_BYTES[kind], label, "measured: python, torch and the device context")]
    if SERVER_BYTES[kind]:
        source = f"measured: the process that speaks HTTP; {description.vocab_size} tokens x {TOKENIZER_BYTES} bytes"
        held = SERVER_BYTES[kind] + TOKENIZER_BYTES * description.vocab_size
        terms.append(Term("server", held, label, source))
    terms += _weight_terms(description, memory)
    tokens = limits.token_budget + limits.max_sequences * (1 + max_draft)
    rows = limits.max_sequences * (1 + max_draft)
    working = working_terms(description, config, tokens, rows, memory)
    inputs = Term("inputs", input_bytes(specs, demand, tokens), label, "formula: tables and indices of a step")
    graphs = graph_terms(description, config, demand, rows, memory, 1 + max_draft)
    return [
        *terms,
        *working,
        inputs,
        *graphs,
        slack_term(working, memory),
    ]


def _moving_bytes(
    description: Description,
    config: EngineConfig,
    specs: Sequence[CacheSpec],
    demand: CacheDemand,
    memory: DeviceMemory,
    max_draft: int,
) -> int:
    """The part of the fixed terms that grows with the longest context."""
    rows = demand.max_sequences * (1 + max_draft)
    graphs = graph_terms(description, config, demand, rows, memory, 1 + max_draft)
    tables = input_bytes(specs, demand, config.scheduler.token_budget + rows)
    return tables + sum(term.num_bytes for term in graphs)


def _weight_terms(description: Description, memory: DeviceMemory) -> list[Term]:
    """Weights by family and format, as their kernels hold them; families that are not split are whole everywhere."""
    sums: dict[tuple[str, str, str, bool], int] = {}
    for weight in description.weights:
        key = (weight.family, weight.format, weight.source, weight.host)
        size = weight.num_bytes
        if memory.kind == "cuda" and weight.shape and weight.format:
            size = held_bytes(weight.format, weight.shape, size)
        sums[key] = sums.get(key, 0) + size
    terms = []
    for (family, fmt, source, host), num_bytes in sums.items():
        split = family not in REPLICATED and memory.count > 1 and not host
        held = -(-num_bytes // memory.count) if split else num_bytes
        shared = f", 1/{memory.count} of it" if split else ""
        words = {"bound": "catalog: upper bound by the machine of the record"}.get(source)
        prefix = DRAFTER if family == DRAFTER else f"weights.{family}"
        label = HOST if host and memory.kind != "cpu" else memory.label
        terms.append(Term(f"{prefix}.{fmt}", held, label, f"{words or description.source}{shared}"))
    return terms


def _reserve(memory: DeviceMemory) -> int:
    return max(int(RESERVE_SHARE[memory.kind] * memory.total_bytes), RESERVE_LEAST[memory.kind])


def _plan_cache(
    specs: Sequence[CacheSpec], demand: CacheDemand, stated: int | None, memory: DeviceMemory, available: int
) -> CachePlan | None:
    """The engine's own split of the budget; None where it would not fit."""
    least = minimum_budget(specs, demand)
    if stated is not None:
        budget = stated
    elif memory.kind == "cpu":
        budget = max(min(full_budget(specs, demand), int(available * CPU_CACHE_SHARE)), least)
    else:
        budget = min(full_budget(specs, demand), available)
    if budget < least or budget > available:
        return None
    if not specs:
        return CachePlan(demand, (), budget, 0)
    return plan_cache(specs, demand, budget)


def _cache_terms(cache: CachePlan, label: str) -> list[Term]:
    terms = []
    for group in cache.groups:
        for name, count, unit in _parts(group, cache.demand):
            source = f"cache table: {count} x {unit:,} bytes"
            terms.append(Term(f"cache.{group.name}.{name}", count * unit, label, source))
    if cache.unused_bytes:
        terms.append(Term("cache.unused", cache.unused_bytes, label, "too little for one more block"))
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


def _longest_context(
    description: Description,
    config: EngineConfig,
    specs: Sequence[CacheSpec],
    room: Callable[[int], int],
    max_sequences: int,
) -> int:
    """The longest context (a multiple of 64 up to the model's) of which one request fits; 0 where none does."""

    def fits(blocks: int) -> bool:
        longer = _demand(description, config, min(blocks * BLOCK_TOKENS, description.max_context))
        return minimum_budget(specs, replace(longer, max_sequences=max_sequences)) <= room(longer.max_context)

    low, high = 0, -(-description.max_context // BLOCK_TOKENS)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return min(low * BLOCK_TOKENS, description.max_context)


def _smaller(
    description: Description,
    config: EngineConfig,
    specs: Sequence[CacheSpec],
    room: Callable[[int], int],
    demand: CacheDemand,
) -> tuple[int, int] | None:
    """(sequences, context) with half, a quarter, ... of the sequences, as soon as a useful context fits beside them."""
    sequences, best = demand.max_sequences, None
    while sequences >= 1:
        context = _longest_context(description, config, specs, room, sequences)
        if context and (best is None or context >= 2 * best[1]):
            best = (sequences, context)
        if context >= min(USEFUL_CONTEXT, demand.max_context):
            break
        sequences //= 2
    return best


def _most_sequences(specs: Sequence[CacheSpec], demand: CacheDemand, available: int) -> int:
    """The most sequences (up to those asked for) with which one longest request fits; 0 where none does."""
    low, high = 0, demand.max_sequences
    while low < high:
        middle = (low + high + 1) // 2
        fits = minimum_budget(specs, replace(demand, max_sequences=middle)) <= available
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _tokens_per_gib(specs: Sequence[CacheSpec], demand: CacheDemand, cache: CachePlan | None) -> int:
    """Tokens of context that one more GiB for the caches would hold."""
    if not specs:
        return 0
    budget = cache.budget_bytes if cache is not None else minimum_budget(specs, demand)
    return plan_cache(specs, demand, budget + GIB).num_tokens - plan_cache(specs, demand, budget).num_tokens


def _notes(description: Description) -> tuple[str, ...]:
    notes = []
    if any(weight.source == "bound" for weight in description.weights):
        notes.append("the record bounds the weights by the machine that held them; their true size is smaller")
    if any(weight.source == "derived" for weight in description.weights):
        notes.append("the weights are derived from counts of parameters, not from files")
    if not description.runnable:
        notes.append("activations and logits are not planned: the record holds no geometry")
    if not tuple(description.caches(torch.bfloat16)):
        notes.append("caches are not planned: the record holds no cache geometry")
    return tuple(notes)


def plan_json(plan: MemoryPlan) -> dict[str, object]:
    """The plan as plain data; `terms` has name, bytes, device and source of each."""
    cache = plan.cache
    return {
        "fits": plan.fits,
        "device": plan.memory.label,
        "device_name": plan.memory.name,
        "device_total_bytes": plan.memory.total_bytes,
        "device_free_bytes": plan.memory.free_bytes,
        "terms": [{"name": t.name, "bytes": t.num_bytes, "device": t.device, "source": t.source} for t in plan.terms],
        "total_bytes": plan.total_bytes,
        "reserve_bytes": plan.reserve_bytes,
        "shortfall_bytes": plan.shortfall_bytes,
        "max_context": plan.max_context,
        "max_sequences": plan.max_sequences,
        "cache_budget_bytes": None if cache is None else cache.budget_bytes,
        "cache_tokens": None if cache is None else cache.num_tokens,
        "sequences_at_context": round(plan.sequences_at_context, 3),
        "binding": plan.binding,
        "longest_context": plan.longest_context,
        "most_sequences": plan.most_sequences,
        "tokens_per_extra_gib": plan.tokens_per_gib,
        "sequences_per_extra_gib": round(plan.tokens_per_gib / plan.max_context, 3),
        "notes": list(plan.notes),
    }
