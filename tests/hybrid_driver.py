"""The step driver for hybrid models: every boundary state is kept in a slot of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from step_driver import StepDriver, Tracked

from slimserve.layers.contract import (
    BLOCK_TOKENS,
    AttentionStorage,
    GroupInput,
    IndexerStorage,
    LatentStorage,
    LayerCache,
    RecurrentStorage,
    StepInput,
)
from slimserve.models.contract import CacheKind, CacheSpec

STORAGE = {
    CacheKind.ATTENTION: ("attention", AttentionStorage),
    CacheKind.LATENT: ("latent", LatentStorage),
    CacheKind.INDEXER: ("indexer", IndexerStorage),
    CacheKind.RECURRENT: ("recurrent", RecurrentStorage),
}


@dataclass
class HybridSequence(Tracked):
    """Also the sequence's open buffer and its slot at each boundary: slots[b] holds the state at 64 * b."""

    open_index: int = 0
    slots: list[int] = field(default_factory=lambda: [0])


class HybridDriver(StepDriver):
    """Pages, slots and open buffers start as garbage (NaN where floating) and are never cleared."""

    def __init__(self, model, specs: Sequence[CacheSpec] | None = None, *, kv_dtype=torch.float32, num_pages=96,
                 num_open=40, num_slots=200, device="cpu"):  # fmt: skip
        self.model = model
        self.device = torch.device(device)
        self.specs = specs if specs is not None else model.config.caches(kv_dtype)
        num_layers = 1 + max(layer for spec in self.specs for layer in spec.layers)
        caches = [LayerCache() for _ in range(num_layers)]
        for group, spec in enumerate(self.specs):
            name, storage = STORAGE[spec.kind]
            for layer in spec.layers:
                buffers = {}
                for buffers_of, count in ((spec.page, num_pages), (spec.slot, num_slots), (spec.open, num_open)):
                    for buffer in buffers_of:
                        value = torch.full((count, *buffer.shape), float("nan"), dtype=torch.float32).to(buffer.dtype)
                        buffers[buffer.name] = value.to(self.device)
                setattr(caches[layer], name, storage(group=group, **buffers))
        self.caches = tuple(caches)
        self.free = [list(range(num_pages - 1, 0, -1)) for _ in self.specs]
        self.free_open = list(range(num_open - 1, 0, -1))
        self.free_slots = list(range(num_slots - 1, 0, -1))

    def new(self) -> HybridSequence:
        return HybridSequence(pages=[[] for _ in self.specs], open_index=self.free_open.pop())

    def release(self, sequence: HybridSequence) -> None:
        super().release(sequence)
        self.free_open.append(sequence.open_index)
        self.free_slots += sequence.slots[1:]

    def fork(self, sequence: HybridSequence, num_tokens: int) -> HybridSequence:
        """A new sequence that starts from another's pages and state at a multiple of 64 (never released)."""
        blocks = num_tokens // BLOCK_TOKENS
        assert num_tokens % BLOCK_TOKENS == 0
        pages = [list(group[:blocks]) for group in sequence.pages]
        return HybridSequence(
            tokens=sequence.tokens[:num_tokens], pages=pages, open_index=self.free_open.pop(),
            slots=sequence.slots[: blocks + 1],
        )  # fmt: skip

    def rollback(self, sequence: HybridSequence, num_tokens: int) -> None:
        """Forget the newest tokens (rejected drafts)."""
        del sequence.tokens[num_tokens:]
        keep = num_tokens // BLOCK_TOKENS + 1
        self.free_slots += sequence.slots[keep:]
        del sequence.slots[keep:]

    def input(self, rows, *, every_logit=False) -> StepInput:
        starts = [len(sequence.tokens) for sequence, _ in rows]
        step = super().input(rows, every_logit=every_logit)
        crossings = []
        for (sequence, tokens), start in zip(rows, starts, strict=True):
            end = start + len(tokens)
            while len(sequence.slots) <= end // BLOCK_TOKENS:
                sequence.slots.append(self.free_slots.pop())
            crossings.append(sequence.slots[start // BLOCK_TOKENS + 1 : end // BLOCK_TOKENS + 1])
        width = max(1, max(len(slots) for slots in crossings))
        state_out = torch.tensor([slots + [0] * (width - len(slots)) for slots in crossings], dtype=torch.int32)
        state_in = [sequence.slots[start // BLOCK_TOKENS] for (sequence, _), start in zip(rows, starts, strict=True)]
        open_index = torch.tensor([sequence.open_index for sequence, _ in rows], dtype=torch.int32)
        groups = []
        for spec, group in zip(self.specs, step.groups, strict=True):
            if spec.kind is CacheKind.RECURRENT:
                group = GroupInput(
                    state_in=torch.tensor(state_in, dtype=torch.int32, device=self.device),
                    state_out=state_out.to(self.device),
                )
            if spec.kind in (CacheKind.RECURRENT, CacheKind.INDEXER):
                group.open_index = open_index.to(self.device)
            groups.append(group)
        step.groups = tuple(groups)
        return step
