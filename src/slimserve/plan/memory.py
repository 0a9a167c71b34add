"""The memory plan: a named term for every byte, for this machine or one that is not here.

Weights come from the parameter table and the formats (file headers or catalog), caches from the cache table and
the engine's own split of a budget (cache.budget), everything else from the formulas beside the constants below.
On several devices that share a model the terms are those of the fullest device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from slimserve.cache.budget import CacheDemand, CachePlan, minimum_budget, plan_cache
from slimserve.engine.config import DrafterKind, EngineConfig, SpeculationConfig
from slimserve.engine.scheduler import LEAST_PREFILL
from slimserve.errors import RefusalError
from slimserve.hardware import format_bytes
from slimserve.layers.contract import BLOCK_TOKENS
from slimserve.models.contract import CacheSpec
from slimserve.plan.caches import GIB, cache_terms, shard, split_memory, tokens_per_gib
from slimserve.plan.description import DRAFTER, Description
from slimserve.plan.drafter import DrafterMemory
from slimserve.plan.rounding import HeldWeights, hold_weights, rounding_terms
from slimserve.plan.weights import made_terms, weight_terms
from slimserve.plan.working import (
    MIB,
    DeviceMemory,
    Term,
    attention_terms,
    graph_terms,
    input_bytes,
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

DRAFTER_PARTS = frozenset({"weights", "cache", "buffers", "working", "distributions"})
"""Terms of a drafter with a model or buffers of its own; drafter.FORMAT is an MTP layer of the model's own files."""


def group_of(term: str) -> str:
    """The group that a term is measured with; terms that only show together share one."""
    head, _, rest = term.partition(".")
    part = rest.split(".")[0]
    if head == DRAFTER and part in DRAFTER_PARTS:
        return "working" if part == "working" else f"{head}.{part}"
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
    `drafter_cache`: the caches that a drafter has for itself (None: it has none, or nothing fits), of which
    `drafter_minimum_bytes` hold one longest request; `fits_plainly`: whether everything but the drafter fits.
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
    drafter_cache: CachePlan | None = None
    drafter_minimum_bytes: int = 0
    fits_plainly: bool = True

    @property
    def needed_bytes(self) -> int:
        """What one longest request takes with everything that is always there, the reserve included."""
        caches = self.cache_minimum_bytes + self.drafter_minimum_bytes
        return self.fixed_bytes + self.reserve_bytes + caches

    @property
    def drafter_bytes(self) -> int:
        """Bytes on the device that only the drafter's own model and buffers take, its caches at their least."""
        parts = {f"{DRAFTER}.{part}" for part in ("weights", "buffers", "working")}
        held = sum(
            term.num_bytes for term in self.terms
            if term.device == self.memory.label and ".".join(term.name.split(".")[:2]) in parts
        )  # fmt: skip
        return held + self.drafter_minimum_bytes

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
        # A stated budget is taken whole, however little of it one request needs.
        stated = max((self.stated_bytes or 0) - self.cache_minimum_bytes, 0)
        return self.needed_bytes + stated - self.memory.free_bytes

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
        if self.most_sequences:
            remedy = f"--max-seqs {self.most_sequences} fits"
        elif self.longest_context:
            remedy = f"--ctx {self.longest_context} fits"
        elif self.smaller is not None:
            remedy = f"--max-seqs {self.smaller[0]} --ctx {self.smaller[1]} fits"
        elif self.fits_plainly and self.drafter_bytes:
            remedy = "--no-spec fits"
        else:
            remedy = f"no context fits here{f' with {self.max_sequences} sequences' if self.max_sequences > 1 else ''}"
        if self.caches_too_small:
            allowed = size(self.stated_bytes or 0)
            return RefusalError(
                f"{name} does not fit: one request of {self.max_context} tokens with {self.max_sequences} sequences "
                f"needs {size(self.cache_minimum_bytes)} of caches and cache_bytes allows {allowed}; {remedy}"
            )
        drafter = f", {size(self.drafter_bytes)} of all that for the drafter" if self.drafter_bytes else ""
        return RefusalError(
            f"{name} does not fit: one request of {self.max_context} tokens with {self.max_sequences} sequences needs "
            f"{size(self.needed_bytes)} on {self.memory.label} ({size(self.fixed_bytes)} weights and buffers, "
            f"{size(self.cache_minimum_bytes + self.drafter_minimum_bytes)} caches, {size(self.reserve_bytes)} reserve"
            f"{drafter}), {free} are free; {remedy}"
        )


def plan_memory(
    description: Description,
    config: EngineConfig,
    memory: DeviceMemory,
    *,
    max_draft: int = 0,
    drafter: bool = False,
    companion: Description | None = None,
    made: bool = False,
) -> MemoryPlan:
    """Plan a configuration on a device's memory; never raises for what does not fit (see MemoryPlan.fits).

    drafter: whether the model's own draft layers run, and so need caches. companion: the model that the drafter of
    config.speculation brings. made: the weights are synthetic, not read from a file.
    """
    kind = DrafterKind.NEXTN if drafter else config.speculation.drafter
    drafting = DrafterMemory(kind, description, companion, config, max_draft)
    held = hold_weights(description, memory) if memory.kind == "cuda" else None
    planner = _Planner(description, config, memory, max_draft, drafting, held, drafting.hold_weights(memory), made)
    result = planner.plan()
    if result.fits or kind is DrafterKind.NONE:
        return result
    plain = replace(config, speculation=SpeculationConfig())
    return replace(result, fits_plainly=plan_memory(description, plain, memory, made=made).fits)


@dataclass(frozen=True, slots=True)
class _Planner:
    """What a plan is made from. `max_draft`: most drafted tokens of a row. `held`, `drafter_held`: the weights as the
    allocator deals them out; None where nothing does."""

    description: Description
    config: EngineConfig
    memory: DeviceMemory
    max_draft: int
    drafter: DrafterMemory
    held: HeldWeights | None
    drafter_held: HeldWeights | None
    made: bool

    def plan(self) -> MemoryPlan:
        """See plan_memory."""
        description, config, memory, drafter = self.description, self.config, self.memory, self.drafter
        specs, demand = self.specs(), _demand(description, config)
        longest, budget = description.max_context, config.scheduler.token_budget
        fixed = self.fixed_terms(demand, specs)
        reserve = _reserve(memory)
        available = memory.free_bytes - reserve - sum(t.num_bytes for t in fixed if t.device == memory.label)
        stated = None if config.cache.budget_bytes is None else -(-config.cache.budget_bytes // memory.count)
        cache, own = self.split(demand, specs, stated, available)
        fixed += self.rounding_terms(demand, specs, cache or self.least_plan(demand, specs, stated), own)
        fixed_bytes = sum(term.num_bytes for term in fixed if term.device == memory.label)
        terms = [*fixed, *cache_terms("cache", cache, memory.label), *cache_terms("drafter.cache", own, memory.label)]
        share = f"{RESERVE_SHARE[memory.kind]:.0%} of the memory, {format_bytes(RESERVE_LEAST[memory.kind])} at least"
        terms.append(Term("reserve", reserve, memory.label, f"{share}, never planned"))

        working = sum(term.num_bytes for term in self.working_terms() if term.device == memory.label)
        here = self.moving_bytes(demand, specs, working)

        def fits(wanted: CacheDemand) -> bool:
            """Whether one longest request fits; tables, stored segments and recorded steps grow with the context."""
            moved = self.moving_bytes(wanted, specs, working) - here
            needed, beside = minimum_budget(specs, wanted), drafter.least_cache(wanted)
            if needed > (needed if stated is None else stated):
                return False
            rounding = self.rounding_terms(wanted, specs, self.least_plan(wanted, specs, stated))
            moved += sum(term.num_bytes for term in rounding)
            return max(needed, stated or 0) + beside <= available - moved

        return MemoryPlan(
            terms=tuple(terms),
            memory=memory,
            max_context=demand.max_context,
            max_sequences=demand.max_sequences,
            fixed_bytes=fixed_bytes,
            reserve_bytes=reserve,
            cache=cache,
            cache_minimum_bytes=minimum_budget(specs, demand),
            longest_context=_longest_context(longest, budget, demand, fits),
            most_sequences=_most_sequences(demand, fits),
            smaller=_smaller(longest, budget, demand, fits),
            stated_bytes=stated,
            tokens_per_gib=tokens_per_gib(specs, demand, cache, drafter),
            notes=(*_notes(description), *drafter.notes()),
            drafter_cache=own,
            drafter_minimum_bytes=drafter.least_cache(demand),
        )

    def specs(self) -> tuple[CacheSpec, ...]:
        """The groups of the engine's caches, on one device; a block drafter's are whole on each."""
        own = tuple(self.description.caches(self.config.cache.dtype.torch))
        pooled, count = self.drafter.pooled, self.memory.count
        if self.drafter.kind is DrafterKind.NEXTN:
            return shard((*own, *pooled), self.description, count)
        return (*shard(own, self.description, count), *pooled)

    def fixed_terms(self, demand: CacheDemand, specs: Sequence[CacheSpec]) -> list[Term]:
        """Everything but caches, what the allocator rounds up, and reserve."""
        description, memory = self.description, self.memory
        label, kind = memory.label, memory.kind
        terms = [Term("runtime", RUNTIME_BYTES[kind], label, "measured: python, torch and the device context")]
        if SERVER_BYTES[kind]:
            tokens = description.vocab_size
            source = f"measured: the process that speaks HTTP; {tokens} tokens x {TOKENIZER_BYTES} bytes"
            held = SERVER_BYTES[kind] + TOKENIZER_BYTES * tokens
            terms.append(Term("server", held, label, source))
        terms += weight_terms(description, memory) + self.drafter.weight_terms(memory)
        terms += made_terms(description, memory) if self.made else []
        working = self.working_terms()
        here = [term for term in working if term.device == label]
        terms += [*working, *self.attention_terms(demand, sum(term.num_bytes for term in here))]
        terms += [*self.input_terms(demand, specs), *self.graph_terms(demand)]
        terms.append(slack_term(here, memory))
        return terms

    def least_plan(self, demand: CacheDemand, specs: Sequence[CacheSpec], stated: int | None) -> CachePlan | None:
        """Caches that hold one longest request, or what a stated budget gives where it is enough for that."""
        return plan_cache(specs, demand, max(minimum_budget(specs, demand), stated or 0)) if specs else None

    def split(self, demand: CacheDemand, specs: Sequence[CacheSpec], stated: int | None, available: int) -> Split:
        """The caches, and the drafter's own, that fit into `available` bytes with what the allocator rounds up.

        That depends on their counts, shrinks while they fill a piece of the allocator's and jumps where they need one
        more: caches give way in growing steps until both fit, then take back half of the last step at a time.
        """

        def fitting(given: int) -> Split | None:
            cache, own = split_memory(specs, demand, stated, self.memory, given, self.drafter)
            if cache is None:
                return None
            taken = cache.budget_bytes + (0 if own is None else own.budget_bytes)
            rounded = sum(term.num_bytes for term in self.rounding_terms(demand, specs, cache, own))
            return (cache, own) if taken + rounded <= available else None

        least = self.least_plan(demand, specs, stated)
        most = available - sum(term.num_bytes for term in self.rounding_terms(demand, specs, least))
        low = (minimum_budget(specs, demand) if stated is None else stated) + self.drafter.least_cache(demand)
        if low > most:
            return None, None
        # What one longest request needs fits if anything does.
        high, given, found = most, most, fitting(most)
        step = _LEAST_STEP
        while found is None and given > low:
            high, given = given, max(low, most - step)
            found, step = fitting(given), 2 * step
        if found is None:
            low_budget = low - self.drafter.least_cache(demand)
            return split_memory(specs, demand, low_budget, self.memory, low, self.drafter)
        while high - given > _LEAST_STEP:
            middle = (given + high) // 2
            more = fitting(middle)
            if more is None:
                high = middle
            else:
                found, given = more, middle
        return found

    def rounding_terms(
        self, demand: CacheDemand, specs: Sequence[CacheSpec], cache: CachePlan | None, own: CachePlan | None = None
    ) -> list[Term]:
        """What the allocator's blocks hold beyond the tensors of weights and of these caches; own: the drafter's, at
        their least where they are not given."""
        if self.held is None:
            return []
        drafter = self.drafter.rounding_terms(self.drafter_held, demand, self.memory, own)
        return [*rounding_terms(self.held, specs, () if cache is None else cache.groups, self.memory), *drafter]

    def input_terms(self, demand: CacheDemand, specs: Sequence[CacheSpec]) -> list[Term]:
        """Input buffers of the model's steps and of the drafter's."""
        label, limits = self.memory.label, self.config.scheduler
        own = specs[: len(specs) - len(self.drafter.pooled)]
        tokens = limits.token_budget + limits.max_sequences * (1 + self.max_draft)
        inputs = Term("inputs", input_bytes(own, demand, tokens), label, "formula: tables and indices of a step")
        return [inputs, *self.drafter.buffer_term(demand, label)]

    def graph_terms(self, demand: CacheDemand) -> list[Term]:
        """Recorded steps."""
        q_len = 1 + self.max_draft
        return graph_terms(self.description, self.config, demand, demand.max_sequences * q_len, self.memory, q_len)

    def working_terms(self) -> list[Term]:
        """Working memory of the model's steps and of the drafter's."""
        limits = self.config.scheduler
        rows = limits.max_sequences * (1 + self.max_draft)
        tokens = max(limits.token_budget, rows + LEAST_PREFILL)  # decode rows are part of the budget
        own = working_terms(self.description, self.config, tokens, rows, self.memory)
        return [*own, *self.drafter.working_terms(own, self.memory, tokens, rows)]

    def attention_terms(self, demand: CacheDemand, working: int) -> list[Term]:
        """Stored segments of attention, beyond the working memory of the longest steps."""
        return attention_terms(self.description, self.config, demand, working, self.memory, 1 + self.max_draft)

    def moving_bytes(self, demand: CacheDemand, specs: Sequence[CacheSpec], working: int) -> int:
        """The part of the fixed terms that grows with the longest context, at as many sequences as are asked for."""
        asked = replace(demand, max_sequences=self.config.scheduler.max_sequences)
        moving = (*self.input_terms(asked, specs), *self.graph_terms(asked), *self.attention_terms(asked, working))
        return sum(term.num_bytes for term in moving)


def _demand(description: Description, config: EngineConfig) -> CacheDemand:
    limits = config.scheduler
    context = min(limits.max_context, description.max_context)
    return CacheDemand(
        max_sequences=limits.max_sequences,
        max_context=context,
        chunk_tokens=min(limits.token_budget, context),
        snapshot_spacing=config.cache.snapshot_spacing,
    )


def _reserve(memory: DeviceMemory) -> int:
    return max(int(RESERVE_SHARE[memory.kind] * memory.total_bytes), RESERVE_LEAST[memory.kind])


Split = tuple[CachePlan | None, CachePlan | None]
"""The caches of the model and the drafter's own."""

_LEAST_STEP = 64 << 10
"""Bytes that are not worth another try to find how much of a device caches can take."""

Fits = Callable[[CacheDemand], bool]
"""Whether one longest request of a demand fits."""


def _longest_context(longest: int, token_budget: int, demand: CacheDemand, fits: Fits) -> int:
    """The longest context (a multiple of 64 up to `longest`) of which one request fits; 0 where none does."""

    def context_fits(blocks: int) -> bool:
        context = min(blocks * BLOCK_TOKENS, longest)
        return fits(replace(demand, max_context=context, chunk_tokens=min(token_budget, context)))

    low, high = 0, -(-longest // BLOCK_TOKENS)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if context_fits(middle) else (low, middle - 1)
    return min(low * BLOCK_TOKENS, longest)


def _smaller(longest: int, token_budget: int, demand: CacheDemand, fits: Fits) -> tuple[int, int] | None:
    """(sequences, context) with half, a quarter, ... of the sequences, as soon as a useful context fits beside them."""
    sequences, best = demand.max_sequences, None
    while sequences >= 1:
        context = _longest_context(longest, token_budget, replace(demand, max_sequences=sequences), fits)
        if context and (best is None or context >= 2 * best[1]):
            best = (sequences, context)
        if context >= min(USEFUL_CONTEXT, demand.max_context):
            break
        sequences //= 2
    return best


def _most_sequences(demand: CacheDemand, fits: Fits) -> int:
    """The most sequences (up to those asked for) with which one longest request fits; 0 where none does."""
    low, high = 0, demand.max_sequences
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(replace(demand, max_sequences=middle)) else (low, middle - 1)
    return low


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
        "drafter_cache_bytes": None if plan.drafter_cache is None else plan.drafter_cache.budget_bytes,
        "cache_tokens": None if cache is None else cache.num_tokens,
        "sequences_at_context": round(plan.sequences_at_context, 3),
        "binding": plan.binding,
        "longest_context": plan.longest_context,
        "most_sequences": plan.most_sequences,
        "tokens_per_extra_gib": plan.tokens_per_gib,
        "sequences_per_extra_gib": round(plan.tokens_per_gib / plan.max_context, 3),
        "notes": list(plan.notes),
    }
