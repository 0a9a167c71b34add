"""The model's part of a step: inputs, hidden states, logits, and which of them are finite.

Steps in which every row is one token (or one verification of equal length) come in few shapes. Each shape is recorded
once, widened with null rows to the next number of rows and to the next power of two of context, and replayed from then
on. Rows stand alone, so neither null rows nor a wider bound changes a bit of the others, and a replay gives the bits
of the plain call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch

from slimserve.cache.manager import CacheManager
from slimserve.engine.inputs import InputBuffers, Padding
from slimserve.engine.step import Row, StepPlan
from slimserve.layers.contract import Caches, StepInput
from slimserve.models.contract import Model
from slimserve.models.recurrent import MAX_DRAFT_TOKENS

logger = logging.getLogger("slimserve.engine")

LEAST_CONTEXT = 2048
"""Shorter contexts share the recordings of this one."""


class TappedModel(Protocol):
    """A model that hands out the outputs of the layers in its `taps`."""

    taps: tuple[int, ...]

    def __call__(self, step: StepInput, caches: Caches, tapped: list[torch.Tensor] | None = None) -> torch.Tensor:
        """As Model, and appends one [T, H] per tapped layer."""
        ...


@dataclass(slots=True)
class Computed:
    """What the model says of a step: hidden [T, H], logits [L, V] float32, tapped [T, H] per tapped layer, and for
    every token, then for every logits row, whether its values are finite: bool [T + L]."""

    hidden: torch.Tensor
    logits: torch.Tensor
    tapped: list[torch.Tensor]
    finite: torch.Tensor


class Recorder(Protocol):
    """Turns a computation whose inputs lie at fixed addresses into one that can be repeated."""

    def record(self, run: Callable[[], Computed], result: Computed) -> Callable[[], Computed]:
        """What repeats `run` on what lies at its inputs then; `result` is what a plain call of it just gave."""
        ...


def keep_block(device: torch.device, num_bytes: int) -> None:
    """Have the allocator of a CUDA device keep one free block of so many bytes, for steps to be cut from: tensors of
    many sizes would each get a segment that fits no other."""
    try:
        torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        logger.warning("%d bytes for the memory of steps are not free in one piece", num_bytes)


class GraphRecorder:
    """CUDA graphs, all in one memory pool: they never run at the same time, so each may overwrite the others' scraps.

    Results are copied out to buffers of their own inside the graph, because the pool keeps nothing between replays.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._results: dict[tuple[object, ...], torch.Tensor] = {}
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self.kept = 0
        """Bytes of the block that the allocator is to keep (`keep_block`)."""

    @property
    def num_graphs(self) -> int:
        """Recordings so far."""
        return len(self._graphs)

    def record(self, run: Callable[[], Computed], result: Computed) -> Callable[[], Computed]:
        """See Recorder."""
        results = self._place(result)
        graph = torch.cuda.CUDAGraph()
        # Thread-local: other threads of the process (servers, tests) may use the device while this one records.
        reserved = torch.cuda.memory_reserved(self._device)
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            # Entering gave back what lay free as a whole.
            given_back = reserved - torch.cuda.memory_reserved(self._device)
            computed = run()
            for target, source in zip(_tensors(results), _tensors(computed), strict=True):
                target.copy_(source)
            del computed
        self._pool = self._pool or graph.pool()
        self._graphs.append(graph)
        if self.kept and given_back >= self.kept:
            keep_block(self._device, self.kept)

        def replay() -> Computed:
            graph.replay()
            return results

        return replay

    def _place(self, computed: Computed) -> Computed:
        """Buffers shaped like the results; those of the widest step of a kind serve the narrower ones."""

        def buffer(name: str, like: torch.Tensor) -> torch.Tensor:
            key = (name, like.shape[1:], like.dtype)
            held = self._results.get(key)
            if held is None or held.shape[0] < like.shape[0]:
                held = self._results[key] = torch.empty_like(like)
            return held[: like.shape[0]]

        return Computed(
            buffer("hidden", computed.hidden),
            buffer("logits", computed.logits),
            [buffer(f"tapped {number}", tap) for number, tap in enumerate(computed.tapped)],
            buffer("finite", computed.finite),
        )


def _tensors(computed: Computed) -> list[torch.Tensor]:
    return [computed.hidden, computed.logits, *computed.tapped, computed.finite]


def row_counts(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows that are recorded: every step of at most max_rows rows has one that is not much larger."""
    counts = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 32), *range(256, max_rows + 256, 128)]
    return (*(count for count in counts if count < max_rows), max_rows)


@dataclass(slots=True)
class ForwardPass:
    """Runs the model on plans. `recorder` None: every step is a plain call.

    `taps`: whether a drafter reads the model's `taps`. `widest_row`: tokens of a row with the longest draft.
    """

    model: Model
    cache: CacheManager
    caches: Caches
    buffers: InputBuffers
    vocab_size: int
    taps: bool = False
    widest_row: int = 1
    recorder: Recorder | None = None
    num_replays: int = 0
    _counts: tuple[int, ...] = ()
    _recorded: dict[Padding, Callable[[], Computed]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._counts = row_counts(self.buffers.max_rows)

    @property
    def recorded_shapes(self) -> tuple[Padding, ...]:
        """The shapes that were recorded so far."""
        return tuple(self._recorded)

    @torch.inference_mode()
    def __call__(self, plan: StepPlan) -> Computed:
        """What the model computes for the plan's rows, on the device; valid until the next call."""
        padding = self.shape_of(plan.rows) if self.recorder is not None else None
        step = self.buffers.fill_rows(plan.rows, self.cache, padding)
        if padding is None or self.recorder is None:
            return self._compute(step)
        replay = self._recorded.get(padding)
        if replay is None:
            # The plain call brings every kernel to life and gives this step's result; the recording serves the next.
            computed = self._record(padding, step, self.recorder)
        else:
            computed = replay()
            self.num_replays += 1
        return _without_null_rows(computed, plan, padding)

    @torch.inference_mode()
    def record_widest(self) -> None:
        """Record the shapes that need most memory, from null rows, so that later recordings find it taken."""
        if self.recorder is None:
            return
        for context in dict.fromkeys((self.buffers.max_context, min(LEAST_CONTEXT, self.buffers.max_context))):
            padding = Padding(self.buffers.max_rows, self.widest_row, context)
            if padding not in self._recorded:
                self._record(padding, self.buffers.fill_rows((), self.cache, padding), self.recorder)

    @torch.inference_mode()
    def compute_widest(self) -> Computed:
        """A plain step of as many rows and logits as there may be, of null rows."""
        padding = Padding(self.buffers.max_rows, self.widest_row, self.buffers.max_context)
        return self._compute(self.buffers.fill_rows((), self.cache, padding))

    def _record(self, padding: Padding, step: StepInput, recorder: Recorder) -> Computed:
        computed = self._compute(step)
        self._recorded[padding] = recorder.record(lambda: self._compute(step), computed)
        return computed

    def shape_of(self, rows: Sequence[Row]) -> Padding | None:
        """The shape under which rows are recorded; None for steps that are not: prompts, unequal drafts."""
        q_len = rows[0].q_len
        if q_len > MAX_DRAFT_TOKENS + 1 or any(row.q_len != q_len or row.num_samples != q_len for row in rows):
            return None
        num_rows = next(count for count in self._counts if count >= len(rows))
        if num_rows * q_len > self.buffers.max_tokens:
            return None
        context = max(row.start_position for row in rows) + q_len
        bound = LEAST_CONTEXT
        while bound < context:
            bound *= 2
        bound = min(bound, self.buffers.max_context)
        return Padding(num_rows, q_len, bound) if bound >= context else None

    def _compute(self, step: StepInput) -> Computed:
        tapped: list[torch.Tensor] = []
        if self.taps:
            hidden = cast(TappedModel, self.model)(step, self.caches, tapped)  # [T, H]
        else:
            hidden = self.model(step, self.caches)
        num_logits = step.logit_indices.numel()
        if num_logits == 0:
            logits = hidden.new_zeros((0, self.vocab_size), dtype=torch.float32)
        elif num_logits == step.num_tokens:
            logits = self.model.logits(hidden)
        else:
            logits = self.model.logits(hidden[step.logit_indices])
        # A sum is finite exactly when all its terms are.
        finite = torch.cat((torch.isfinite(hidden.float().sum(dim=-1)), torch.isfinite(logits.sum(dim=-1))))
        return Computed(hidden, logits, tapped, finite)


def _without_null_rows(computed: Computed, plan: StepPlan, padding: Padding) -> Computed:
    """Every token of such a step has logits, so all results have one row per token."""
    num_tokens, padded = plan.num_tokens, padding.num_rows * padding.q_len
    if num_tokens == padded:
        return computed
    finite = computed.finite.view(2, padded)[:, :num_tokens].reshape(-1)
    tapped = [tap[:num_tokens] for tap in computed.tapped]
    return Computed(computed.hidden[:num_tokens], computed.logits[:num_tokens], tapped, finite)
