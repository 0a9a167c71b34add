"""Working memory of a step in the plan: activations, stored sums, logits, inputs, recorded steps, what allocators add.

The formulas follow what the engine allocates; tests/test_plan_device.py runs the engine's own code on a device that is
not there and compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slimserve.cache.budget import CacheDemand
from slimserve.engine.config import EngineConfig
from slimserve.engine.forward import LEAST_CONTEXT, row_counts
from slimserve.engine.scheduler import SCORED_STEP
from slimserve.layers.contract import BLOCK_TOKENS
from slimserve.models.contract import CacheKind, CacheSpec, Role
from slimserve.ops.held import (
    attention_scratch,
    product_scratch,
    scratch_rows,
    spare_bytes,
    widest_attention,
)
from slimserve.plan.description import Description

MIB = 1 << 20

HOST = "host"
"""Label of terms that lie in the computer's memory while the model runs on an accelerator."""

SLACK_SHARE, SLACK_LEAST = 0.25, 32 * MIB
"""What a CPU's allocator keeps of freed working memory: a share of it, or the least."""
SMALL_BLOCKS = 8 * MIB
"""Segments for tensors of up to 1 MiB that steps add on a GPU (0 to 8 MiB under the allocator's rules)."""

GRAPH_SEGMENTS = 22 * MIB
"""Recorded steps allocate from a pool of their own: one segment of small blocks and one of large ones at least."""
GRAPH_BYTES = 1 * MIB
"""What the driver keeps per recorded step; a guess, above what a soak on an H200 showed."""
GRAPH_DRIVER = 72 * MIB
"""What the driver takes when a process records its first step, and keeps. Fitted, after the fact, to four processes on
an H200: 67 to 83 MiB more than the recorded tensors; later engines of the same processes took none."""

ROUNDING = 2 * MIB
"""torch's CUDA allocator takes tensors above 10 MiB in whole pieces of this size, smaller ones out of shared blocks."""
LOGITS_COPIES = 3.0
"""Float32 tables of logits alive at once while drawing: the logits, their edited copy, a sort or softmax of it."""

HOST_ROWS = 6
"""Rows of logits that the host's sampler holds besides those of the step: it draws and scores one row after another."""


@dataclass(frozen=True, slots=True)
class Term:
    """One named amount of memory on one device ("cpu", "gpu0" or "each of N GPUs")."""

    name: str
    num_bytes: int
    device: str
    source: str


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory to plan for: kind "cpu" or "cuda", bytes of each device, and how many of them share the model."""

    kind: str
    total_bytes: int
    free_bytes: int
    count: int = 1
    name: str = ""

    @property
    def label(self) -> str:
        """The device's name in terms."""
        if self.kind == "cpu":
            return "cpu"
        return "gpu0" if self.count == 1 else f"each of {self.count} gpus"


def working_terms(
    description: Description, config: EngineConfig, tokens: int, rows: int, memory: DeviceMemory
) -> list[Term]:
    """Activations of the longest step, what a shorter one takes beyond them for stored sums, and tables of logits."""
    item, width, label = config.numerics.activation_dtype.itemsize, description.per_token_width, memory.label
    activations = tokens * width * item
    terms = [
        Term("activations", activations, label, f"formula: {tokens} tokens x {width} elements x {item} bytes"),
    ]
    if memory.kind == "cuda":
        peak, length = max((_beside_products(description, length, item, memory), length)
                           for length in _lengths(description, tokens))  # fmt: skip
        source = f"formula: laid-out rows and sums of parallel segments at {length} tokens, beyond the activations"
        terms.append(Term("scratch", max(0, peak - activations), label, source))
    logits = int(rows * description.vocab_size * 4 * LOGITS_COPIES)
    source = f"{rows} rows x {description.vocab_size} tokens x 4 bytes x {LOGITS_COPIES:g} tables"
    # A layer's activations are gone when logits are made: only what exceeds them counts.
    beyond = max(0, logits - sum(term.num_bytes for term in terms))
    terms.append(Term("logits", beyond, label, f"formula: {source}, beyond the activations"))
    tables = scored_tables(rows, memory.kind)
    scored = max(0, int(tables * description.vocab_size * 4) - sum(term.num_bytes for term in terms))
    source = f"{SCORED_STEP} scored prompt rows beside {rows}, {tables:g} rows in all x {description.vocab_size} tokens"
    return [*terms, Term("logits.scored", scored, label, f"formula: {source} x 4 bytes, beyond the rest")]


def scored_tables(rows: int, kind: str) -> float:
    """Rows of logits alive at once in a step that draws from `rows` rows and scores SCORED_STEP prompt tokens.

    The rows to draw from are copied out of the step's; after the draws, on a device, the scored ones are cleaned in a
    copy.
    """
    if kind == "cpu":
        return SCORED_STEP + max(LOGITS_COPIES * rows, 2.0 * rows + HOST_ROWS)
    return max(SCORED_STEP + (1 + LOGITS_COPIES) * rows, rows + 2.0 * SCORED_STEP)


def _beside_products(description: Description, length: int, item: int, memory: DeviceMemory) -> int:
    """Bytes at the product of a step of `length` tokens that needs most, with what is alive beside it."""
    found = [
        length * width * item + scratch_bytes(description, length, memory.kind, memory.count, grouped)
        for width, grouped in ((description.product_width, False), (description.routed_width, True)) if width
    ]  # fmt: skip
    return max(found, default=0)


def _products(description: Description) -> set[tuple[str, tuple[int, ...], int, bool]]:
    """(format, shape, input rows of a token, whether experts) of the matrices of a model: gate and up of all experts
    read the same row, down reads one of each."""
    top_k = description.experts_per_token
    return {
        (w.format, w.shape, top_k if w.experts and ".down" in w.name else 1, bool(w.experts))
        for w in description.weights if len(w.shape) > 1 and w.format and w.family != Role.EMBEDDING.value
    }  # fmt: skip


def _lengths(description: Description, tokens: int) -> list[int]:
    """Lengths of a step at which working memory may be largest: the longest, and where products last store sums."""
    most = (scratch_rows(fmt, shape) for fmt, shape, _, grouped in _products(description) if not grouped)
    return sorted({tokens, *(length for lengths in most for length in lengths if length < tokens)})


def scratch_bytes(description: Description, rows: int, kind: str, count: int = 1, experts: bool | None = None) -> int:
    """Laid-out input rows and stored sums of the product that takes most of them, on one of `count` devices; none on a
    CPU. `experts`: only of routed experts, or only of other products."""
    if kind != "cuda":
        return 0
    found = (product_scratch(fmt, shape, rows * inputs, grouped=grouped)
             for fmt, shape, inputs, grouped in _products(description) if experts in (None, grouped))  # fmt: skip
    return -(-max(found, default=0) // count)


def graph_terms(
    description: Description, config: EngineConfig, demand: CacheDemand, rows: int, memory: DeviceMemory, q_len: int
) -> list[Term]:
    """Recorded steps: their shared pool and results from the start, and what each further recording takes."""
    label = memory.label
    if memory.kind != "cuda" or not config.graphs or not description.vocab_size:
        return [Term("graphs", 0, label, "no steps are recorded")]
    logits = rows * description.vocab_size * 4
    contexts = _recorded_contexts(demand.max_context)
    heads = description.heads
    stored = _stored(heads, demand.max_sequences, q_len, demand.max_context, memory)
    # Stored segments are gone when logits are made, and sums are stored while neither is there.
    large = (max(logits, stored), scratch_bytes(description, rows, memory.kind, memory.count))
    pool = GRAPH_SEGMENTS + sum(_pieces(size) for size in large)
    results = logits + 2 * rows * description.hidden_size * config.numerics.activation_dtype.itemsize
    counts = row_counts(demand.max_sequences)
    shapes = len(counts) * len(contexts) * q_len
    first = min(2, len(contexts))
    # Fewer rows, or a shorter context, may store segments where the widest step is past the limit and does not.
    most = max(_stored(heads, count, q_len, context, memory) for count in counts for context in contexts)
    later = (shapes - first) * GRAPH_BYTES + _pieces(max(most, logits)) - _pieces(max(stored, logits))
    source = f"formula: pool and results of {rows} rows; fitted: {GRAPH_DRIVER // MIB} MiB of the driver's"
    return [
        Term("graphs", pool + results + first * GRAPH_BYTES + GRAPH_DRIVER, label, source),
        Term("recordings", later, label, f"prediction: {shapes - first} more shapes, taken as they come"),
    ]


def _pieces(num_bytes: int) -> int:
    """What a pool takes for a tensor that its first segments do not hold."""
    return -(-num_bytes // ROUNDING) * ROUNDING if num_bytes > GRAPH_SEGMENTS else 0


def _recorded_contexts(max_context: int) -> list[int]:
    """Bounds of context that steps are recorded for (see engine.forward)."""
    bounds = [min(LEAST_CONTEXT, max_context)]
    while bounds[-1] < max_context:
        bounds.append(min(2 * bounds[-1], max_context))
    return bounds


def _stored(heads: tuple[int, int, int] | None, rows: int, q_len: int, context: int, memory: DeviceMemory) -> int:
    """Bytes of attention's stored segments in a step of `rows` rows, on one device; `heads` are the model's."""
    if heads is None or memory.kind != "cuda":
        return 0
    return -(-attention_scratch(heads, context, rows=rows, q_len=q_len) // memory.count)


def attention_terms(
    description: Description, config: EngineConfig, demand: CacheDemand, working: int, memory: DeviceMemory, q_len: int
) -> list[Term]:
    """What short steps at the longest context take for attention's stored segments, beyond `working` bytes."""
    heads = description.heads
    if heads is None or memory.kind != "cuda":
        return []
    beside = description.product_width * config.numerics.activation_dtype.itemsize
    prompt, length = widest_attention(heads, demand.max_context, config.scheduler.token_budget)
    decode = _stored(heads, demand.max_sequences, q_len, demand.max_context, memory)
    found = [(-(-prompt // memory.count) + length * beside, f"up to {length} prompt tokens")]
    found.append((decode + demand.max_sequences * q_len * beside, f"{demand.max_sequences} rows"))
    most, words = max(found)
    source = f"formula: attention of {words} at {demand.max_context} tokens stores its segments; beyond working memory"
    return [Term("attention", max(0, most - working), memory.label, source)]


def slack_term(working: Sequence[Term], memory: DeviceMemory) -> Term:
    """What the allocator keeps of freed working memory, and on a CUDA device what the engine has it keep besides
    (`spare_bytes`)."""
    needed = sum(term.num_bytes for term in working)
    if memory.kind == "cpu":
        held = max(int(SLACK_SHARE * needed), SLACK_LEAST)
        return Term("slack", held, memory.label, f"{SLACK_SHARE:.0%} of working memory, or a floor")
    source = "formula: the block that steps are cut from is so much larger than their peak; small tensors"
    return Term("slack", spare_bytes(needed) + SMALL_BLOCKS, memory.label, source)


def input_bytes(specs: Sequence[CacheSpec], demand: CacheDemand, tokens: int) -> int:
    """Token ids, positions, offsets, block tables and slots of a step (see engine.inputs)."""
    rows, blocks = demand.max_sequences, demand.blocks_per_sequence
    paged = sum(1 for spec in specs if spec.kind is not CacheKind.RECURRENT)
    recurrent = len(specs) - paged
    crossings = tokens // BLOCK_TOKENS + 1
    return tokens * 20 + rows * 8 + paged * (rows * blocks * 4 + tokens * 8) + recurrent * rows * (8 + 4 * crossings)
