"""What the allocator's blocks hold beyond the tensors of weights and caches: they are dealt out by its rules.

Weights come first, in the order of the parameter table, each in the parts in which its kernel holds it; then the caches
as `cache.storage` makes them, into what the weights left.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from slimserve.cache.budget import GroupPlan
from slimserve.models.contract import CacheSpec
from slimserve.ops.held import held_parts
from slimserve.plan.allocator import Allocator
from slimserve.plan.description import Description
from slimserve.plan.working import DeviceMemory, Term


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """The allocator of one device when it holds the weights; bytes of their tensors, and of their products' locks."""

    allocator: Allocator
    num_bytes: int
    locks: int

    @property
    def rounding(self) -> int:
        """What torch counts as the weights' own: a block with less than 1 MiB to spare is a tensor's whole."""
        return self.allocator.allocated - self.num_bytes - self.locks


def hold_weights(description: Description, memory: DeviceMemory) -> HeldWeights:
    """The weights dealt out; several devices share each."""
    allocator, stored, locks, (size_of_locks, shared) = Allocator(), 0, 0, _meeting_places()
    for weight in description.weights:
        if weight.host:
            continue
        whole = (weight.num_bytes,)
        # A stack of experts is one tensor a part.
        parts = held_parts(weight.format, weight.shape) or whole if weight.shape and weight.format else whole
        for size in (-(-part // memory.count) for part in parts):
            stored += size
            allocator.allocate(size)
        # Experts share those of their last product.
        if weight.shape and weight.format and (not weight.experts or ".down" in weight.name):
            # The first product makes the places that all share.
            for size in (size_of_locks, 0 if locks else shared):
                locks += size
                allocator.allocate(size)
    return HeldWeights(allocator, stored, locks)


def _meeting_places() -> tuple[int, int]:
    """Bytes of a matrix's places where parallel segments meet, and of those that all share (`ops.triton.linear`)."""
    if importlib.util.find_spec("triton") is None:
        return 0, 0
    from slimserve.ops.triton.linear import LOCKS, SLOTS

    return 4 * LOCKS, 4 * SLOTS


def rounding_bytes(held: HeldWeights, specs: Sequence[CacheSpec], groups: Sequence[GroupPlan]) -> int:
    """Bytes beyond what torch counts as the weights', and caches of these counts: they jump by up to 2 MiB a tensor
    between one count and the next."""
    allocator, stored = held.allocator.fork(), held.allocator.allocated
    for spec, group in zip(specs, groups, strict=True):
        units = [buffer.num_bytes * group.num_units for buffer in (*spec.page, *spec.slot)]
        opened = [buffer.num_bytes * group.num_open for buffer in spec.open]
        for size in (*units, *opened) * len(spec.layers):
            stored += size
            allocator.allocate(size)
    return sum(allocator.reserved.values()) - stored


def rounding_terms(
    held: HeldWeights, specs: Sequence[CacheSpec], groups: Sequence[GroupPlan], memory: DeviceMemory
) -> list[Term]:
    """What weights and caches take beyond their tensors."""
    rest = rounding_bytes(held, specs, groups)
    whole = "allocator's rules: blocks with less than 1 MiB to spare"
    return [
        Term("weights.locks", held.locks, memory.label, "formula: where the parts of a product meet"),
        Term("weights.rounding", held.rounding, memory.label, whole),
        Term("rounding", rest, memory.label, "allocator's rules: segments of 20 MiB, or pieces of 2 MiB"),
    ]
