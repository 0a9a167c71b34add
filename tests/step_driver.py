"""A minimal driver of the model contract for tests: sequences, scattered pages, one step at a time.

Pages start as garbage, pages behind a window are taken away, and page numbers are scattered, so a model that reads
what it must not read, or confuses a page with its position, fails.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from slimserve.layers.contract import (
    BLOCK_TOKENS,
    NULL_PAGE,
    AttentionStorage,
    Caches,
    GroupInput,
    LayerCache,
    StepInput,
)
from slimserve.models.contract import CacheKind, CacheSpec, Model


@dataclass
class Tracked:
    """One sequence: tokens so far and its pages per group."""

    tokens: list[int] = field(default_factory=list)
    pages: list[list[int]] = field(default_factory=list)


class StepDriver:
    """Runs attention-only models; every cache group has `num_pages` pages."""

    def __init__(
        self, model: Model, *, kv_dtype: torch.dtype = torch.float32, num_pages: int = 64, device: str = "cpu"
    ) -> None:
        self.model = model
        self.device = torch.device(device)
        self.specs: Sequence[CacheSpec] = model.config.caches(kv_dtype)
        generator = torch.Generator().manual_seed(7)
        caches = [LayerCache() for _ in range(model.config.num_layers)]
        for group, spec in enumerate(self.specs):
            assert spec.kind in (CacheKind.ATTENTION, CacheKind.WINDOW)
            for layer in spec.layers:
                buffers = {
                    buffer.name: torch.randn((num_pages, *buffer.shape), generator=generator).mul_(9).to(buffer.dtype)
                    for buffer in spec.page
                }
                caches[layer].attention = AttentionStorage(
                    group, buffers["k"].to(self.device), buffers["v"].to(self.device)
                )
        self.caches: Caches = tuple(caches)
        shuffled = list(range(1, num_pages))
        random.Random(3).shuffle(shuffled)
        self.free = [list(shuffled) for _ in self.specs]

    def new(self) -> Tracked:
        """An empty sequence."""
        return Tracked(pages=[[] for _ in self.specs])

    def release(self, sequence: Tracked) -> None:
        """Give a sequence's pages back."""
        for group, pages in enumerate(sequence.pages):
            self.free[group] += [page for page in pages if page != NULL_PAGE]
        sequence.pages = [[] for _ in self.specs]

    def _reserve(self, sequence: Tracked, start: int, end: int) -> None:
        for group, spec in enumerate(self.specs):
            pages = sequence.pages[group]
            while len(pages) * BLOCK_TOKENS < end:
                pages.append(self.free[group].pop())
            if spec.window is not None:
                for block in range(max(0, start - spec.window + 1) // BLOCK_TOKENS):
                    if pages[block] != NULL_PAGE:
                        self.free[group].append(pages[block])
                        pages[block] = NULL_PAGE

    def input(self, rows: Sequence[tuple[Tracked, Sequence[int]]], *, every_logit: bool = False) -> StepInput:
        """Build the step that appends tokens to sequences."""
        ids: list[int] = []
        positions: list[int] = []
        offsets, starts, wanted = [0], [], []
        for sequence, tokens in rows:
            start = len(sequence.tokens)
            self._reserve(sequence, start, start + len(tokens))
            ids += tokens
            positions += range(start, start + len(tokens))
            offsets.append(len(ids))
            starts.append(start)
            wanted += range(offsets[-2], offsets[-1]) if every_logit else [offsets[-1] - 1]
        groups = []
        width = max(len(pages) for sequence, _ in rows for pages in sequence.pages)
        for group in range(len(self.specs)):
            table = [sequence.pages[group] + [NULL_PAGE] * (width - len(sequence.pages[group])) for sequence, _ in rows]
            slots = [
                sequence.pages[group][position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS
                for (sequence, tokens), start in zip(rows, starts, strict=True)
                for position in range(start, start + len(tokens))
            ]
            groups.append(
                GroupInput(
                    block_table=torch.tensor(table, dtype=torch.int32, device=self.device),
                    slots=torch.tensor(slots, dtype=torch.int64, device=self.device),
                )
            )
        for sequence, tokens in rows:
            sequence.tokens += tokens
        return StepInput(
            token_ids=torch.tensor(ids, dtype=torch.int32, device=self.device),
            positions=torch.tensor(positions, dtype=torch.int64, device=self.device),
            row_offsets=torch.tensor(offsets, dtype=torch.int32, device=self.device),
            start_positions=torch.tensor(starts, dtype=torch.int32, device=self.device),
            logit_indices=torch.tensor(wanted, dtype=torch.int64, device=self.device),
            groups=tuple(groups),
            num_rows=len(rows),
            num_tokens=len(ids),
            max_q_len=max(len(tokens) for _, tokens in rows),
            max_context=max(len(sequence.tokens) for sequence, _ in rows),
        )

    @torch.inference_mode()
    def step(self, rows: Sequence[tuple[Tracked, Sequence[int]]], *, every_logit: bool = False) -> torch.Tensor:
        """Append tokens and return float32 logits [L, V]: the last token of each row, or every token."""
        step = self.input(rows, every_logit=every_logit)
        hidden = self.model(step, self.caches)  # [T, H]
        return self.model.logits(hidden[step.logit_indices])

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """`count` tokens after `prompt`, each the argmax."""
        sequence = self.new()
        out: list[int] = []
        tokens = list(prompt)
        for _ in range(count):
            logits = self.step([(sequence, tokens)])
            tokens = [int(logits[0].argmax())]
            out += tokens
        self.release(sequence)
        return out
