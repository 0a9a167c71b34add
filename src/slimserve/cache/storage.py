"""Tensors of all groups, laid out as the cache table says, and typed per layer as layers.contract names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch

from slimserve.cache.budget import CachePlan
from slimserve.layers.contract import (
    AttentionStorage,
    Caches,
    IndexerStorage,
    LatentStorage,
    LayerCache,
    RecurrentStorage,
)
from slimserve.models.contract import BufferSpec, CacheKind, CacheSpec

_STORAGE = {
    CacheKind.ATTENTION: ("attention", AttentionStorage),
    CacheKind.WINDOW: ("attention", AttentionStorage),
    CacheKind.LATENT: ("latent", LatentStorage),
    CacheKind.INDEXER: ("indexer", IndexerStorage),
    CacheKind.RECURRENT: ("recurrent", RecurrentStorage),
}


class CacheStorage:
    """Storage of every layer: `layers` is what a model receives.

    Everything starts as zeros: a kernel may read rows of a page that nobody wrote, and must find numbers there.
    """

    def __init__(self, specs: Sequence[CacheSpec], plan: CachePlan, device: torch.device) -> None:
        """Allocate the counts of `plan`; raises ValueError where a table names buffers its kind does not have."""
        num_layers = 1 + max((layer for spec in specs for layer in spec.layers), default=-1)
        self._units: list[list[torch.Tensor]] = []
        self._open: list[list[torch.Tensor]] = []
        caches = [LayerCache() for _ in range(num_layers)]
        for group, (spec, counts) in enumerate(zip(specs, plan.groups, strict=True)):
            field_name, storage_class = _STORAGE[spec.kind]
            units: list[torch.Tensor] = []
            open_buffers: list[torch.Tensor] = []
            for layer in spec.layers:
                if getattr(caches[layer], field_name) is not None:
                    raise ValueError(f"layer {layer} has two {field_name} caches; group {spec.name} is the second")
                per_unit = _allocate((*spec.page, *spec.slot), counts.num_units, device)
                per_open = _allocate(spec.open, counts.num_open, device)
                expected = {field.name for field in fields(storage_class)} - {"group"}
                if expected != {*per_unit, *per_open}:
                    raise ValueError(
                        f"cache group {spec.name} names the buffers {sorted({*per_unit, *per_open})}; "
                        f"kind {spec.kind.value} has {sorted(expected)}"
                    )
                setattr(caches[layer], field_name, storage_class(group=group, **per_unit, **per_open))
                units.extend(per_unit.values())
                open_buffers.extend(per_open.values())
            self._units.append(units)
            self._open.append(open_buffers)
        self.layers: Caches = tuple(caches)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for group in (*self._units, *self._open) for t in group)

    def clear(self, group: int, units: Sequence[int], open_buffers: Sequence[int]) -> None:
        """Zero pages or slots and open buffers of a group, so that what they held reaches nobody."""
        for tensors, indices in ((self._units[group], units), (self._open[group], open_buffers)):
            for tensor in tensors:
                for index in indices:
                    tensor[index].zero_()


def _allocate(buffers: Sequence[BufferSpec], count: int, device: torch.device) -> dict[str, torch.Tensor]:
    return {buffer.name: torch.zeros((count, *buffer.shape), dtype=buffer.dtype, device=device) for buffer in buffers}
