"""What a drafter takes beside the model that it drafts for: weights and caches of its own, buffers, working memory.

A small model (DrafterKind.MODEL) has weights, caches and input buffers of its own. A block drafter has weights, groups
in the model's caches, input buffers, rows that wait, and the model hands it the outputs of tapped layers. An MTP layer
is a part of the model: it adds groups, buffers and rows. The sizes of buffers come from the drafters' own functions;
tests/test_plan_memory.py and tests/test_plan_device.py hold the terms against what their code allocates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from slimserve.cache.budget import CacheDemand, CachePlan, cache_bytes, minimum_budget, plan_cache
from slimserve.engine.config import Acceptance, DrafterKind, EngineConfig
from slimserve.engine.speculate import model_drafter, tracking
from slimserve.models.contract import CacheSpec
from slimserve.models.dflash2_config import DFlash2Config
from slimserve.plan.description import Description
from slimserve.plan.rounding import HeldWeights, hold_weights, rounding_terms
from slimserve.plan.weights import weight_terms
from slimserve.plan.working import (
    HOST,
    LOGITS_COPIES,
    DeviceMemory,
    Term,
    input_bytes,
    scratch_bytes,
)

_CONVOLUTION = 9
"""Float32 rows of a block drafter's width that are alive per token around one of its convolutions: coefficients of two
sides and taps, those being made, and the input."""

_DISTRIBUTION = 16
"""Bytes per token of a kept distribution: its id and its probability."""


@dataclass(frozen=True, slots=True)
class DrafterMemory:
    """A configured drafter. `companion`: its own model, None where it has none or nobody said which; `own` and `pooled`
    are the groups of its own caches and those that it adds to the model's."""

    kind: DrafterKind
    target: Description
    companion: Description | None
    config: EngineConfig
    max_draft: int
    own: tuple[CacheSpec, ...] = field(init=False, default=())
    pooled: tuple[CacheSpec, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        dtype = self.config.cache.dtype.torch
        if self.kind is DrafterKind.NEXTN:
            object.__setattr__(self, "pooled", tuple(self.target.drafter_caches(dtype)))
        elif self.companion is not None:
            name = "own" if self.kind is DrafterKind.MODEL else "pooled"
            object.__setattr__(self, name, tuple(self.companion.caches(dtype)))

    def demand(self, target: CacheDemand) -> CacheDemand:
        """What its own caches must carry where the model's carry `target`."""
        longest = target.max_context if self.companion is None else self.companion.max_context
        return model_drafter.companion_demand(target, longest)

    def least_cache(self, target: CacheDemand) -> int:
        """Bytes below which its own caches do not hold one longest request."""
        return minimum_budget(self.own, self.demand(target)) if self.own else 0

    def cache_of(self, target: CacheDemand, num_blocks: int) -> int:
        """Bytes with which its own caches hold as many blocks as the model's, and no more than it can read."""
        if not self.own:
            return 0
        demand = self.demand(target)
        most = demand.max_sequences * demand.blocks_per_sequence
        return cache_bytes(self.own, demand, min(max(num_blocks, demand.blocks_per_sequence), most))

    def weight_terms(self, memory: DeviceMemory) -> list[Term]:
        """Its own model's weights; several devices hold them whole each."""
        return [] if self.companion is None else weight_terms(self.companion, memory, companion=True)

    def buffer_bytes(self, target: CacheDemand) -> int:
        """Bytes of its input buffers and of the rows that wait for it: they grow with the longest context."""
        rows = target.max_sequences
        if self.kind is DrafterKind.MODEL and self.companion is not None:
            sizes: Sequence[int] = model_drafter.buffer_tokens(rows)
            return sum(input_bytes(self.own, self.demand(target), tokens) for tokens in sizes)
        width, block = self._waiting
        if not width:
            return 0
        most = self.config.scheduler.token_budget + rows * (1 + self.max_draft)
        sizes = tracking.buffer_tokens(most, rows, block)
        item = self.config.numerics.activation_dtype.itemsize
        # An MTP layer also keeps what it said last of every sequence.
        kept = rows * width * item if self.kind is DrafterKind.NEXTN else 0
        waiting = rows * tracking.RING * width * item
        return kept + waiting + sum(input_bytes(self.pooled, target, tokens) for tokens in sizes)

    @property
    def _waiting(self) -> tuple[int, int]:
        """(elements of a waiting row, rows of a drafted block); zeros where nothing waits."""
        if self.kind is DrafterKind.NEXTN:
            return self.target.hidden_size, 1
        own = self._block
        return (0, 0) if own is None else (len(own.taps) * own.hidden_size, own.block_size)

    @property
    def _block(self) -> DFlash2Config | None:
        """A block drafter's shape."""
        if self.kind is not DrafterKind.DFLASH2 or self.companion is None:
            return None
        config = self.companion.config
        return config if isinstance(config, DFlash2Config) else None

    def buffer_term(self, target: CacheDemand, label: str) -> list[Term]:
        """One term, or none for a drafter without buffers."""
        size = self.buffer_bytes(target)
        if not size:
            return []
        waiting = f", {tracking.RING} waiting rows a sequence" if self._waiting[0] else ""
        return [Term("drafter.buffers", size, label, f"formula: tables and indices of its steps{waiting}")]

    def working_terms(self, working: Sequence[Term], memory: DeviceMemory, tokens: int, rows: int) -> list[Term]:
        """Working memory of its forwards and draws, as far as it exceeds that of the model's steps (`working`).

        tokens, rows: those of the longest step and of its logits. The two never run at once, but a block drafter takes
        in what a step computed while its results are still there.
        """
        companion, item = self.companion, self.config.numerics.activation_dtype.itemsize
        if companion is None or not companion.runnable:
            return []
        sequences, label = self.config.scheduler.max_sequences, memory.label
        found: list[tuple[int, str]] = []
        own = self._block
        if own is None:
            read = max(model_drafter.buffer_tokens(sequences))
            activations = read * companion.per_token_width * item
            scratch = scratch_bytes(companion, read, memory.kind)
            words = f"{read} tokens x {companion.per_token_width} elements x {item} bytes"
            found.append((activations + scratch, words))
            drawn = sequences
            vocab_size = companion.vocab_size
        else:
            drawn = sequences * min(self.max_draft, own.max_draft)
            block, vocab_size = drawn + sequences, self.target.vocab_size
            width = companion.per_token_width * item + _CONVOLUTION * own.hidden_size * 4
            found.append((block * width + scratch_bytes(companion, block, memory.kind), f"blocks of {block} tokens"))
            tapped = tokens * len(own.taps) * own.hidden_size * item
            step = sum(term.num_bytes for term in working if term.name in ("activations", "scratch"))
            words = f"outputs of {len(own.taps)} layers for {tokens} tokens"
            found.append((step + tapped, words))
            # Side by side, and once more where they are sorted by sequence; keys and values come from both.
            write = tokens * (own.hidden_size * 2 + 2 * own.num_kv_heads * own.head_dim * 2) * item
            held = tokens * self.target.hidden_size * item + rows * vocab_size * 4
            write += scratch_bytes(companion, tokens, memory.kind)
            found.append((held + 3 * tapped + write, f"{words}, taken in"))
        logits = int(LOGITS_COPIES * drawn * vocab_size * 4)
        found.append((logits, f"{drawn} rows x {vocab_size} tokens x 4 bytes x {LOGITS_COPIES:g} tables"))
        most, words = max(found)
        beyond = max(0, most - sum(term.num_bytes for term in working))
        terms = [Term("drafter.working", beyond, label, f"formula: {words}, beyond the model's own working memory")]
        return [*terms, *self._distribution_terms(drawn, vocab_size, memory)]

    def _distribution_terms(self, drawn: int, vocab_size: int, memory: DeviceMemory) -> list[Term]:
        """What rejection sampling keeps on the host of every draft."""
        if self.config.speculation.acceptance is not Acceptance.REJECTION or self._block is not None:
            return []
        drafts = drawn * self.max_draft
        source = f"bound: {drafts} drafts x {vocab_size} tokens x {_DISTRIBUTION} bytes, unless top-k cuts them"
        label = memory.label if memory.kind == "cpu" else HOST
        return [Term("drafter.distributions", drafts * vocab_size * _DISTRIBUTION, label, source)]

    def notes(self) -> tuple[str, ...]:
        """What the plan lacks."""
        if self.kind in (DrafterKind.MODEL, DrafterKind.DFLASH2) and self.companion is None:
            return ("the drafter's own model is not planned: name it with --draft-model",)
        return ()

    def hold_weights(self, memory: DeviceMemory) -> HeldWeights | None:
        """Its own model's weights as the allocator deals them out; None without one, or where nothing is dealt out."""
        if self.companion is None or memory.kind != "cuda":
            return None
        return hold_weights(self.companion, replace(memory, count=1))

    def rounding_terms(
        self, held: HeldWeights | None, target: CacheDemand, memory: DeviceMemory, own: CachePlan | None
    ) -> list[Term]:
        """What the allocator's blocks hold beyond the tensors of its own weights and caches, these at their least where
        no plan of them is given."""
        if held is None:
            return []
        if own is None and self.own:
            demand = self.demand(target)
            own = plan_cache(self.own, demand, minimum_budget(self.own, demand))
        *weights, rest = rounding_terms(held, self.own, () if own is None else own.groups, memory)
        named = [replace(term, name=f"drafter.{term.name}") for term in weights]
        return [*named, replace(rest, name=f"{rest.name}.drafter")]
