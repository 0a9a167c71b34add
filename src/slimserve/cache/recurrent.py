"""Recurrent state: slots that hold the state at a multiple of 64, by reference, and an open buffer per sequence.

A running sequence refers to one slot (its last boundary) and, while a step crosses boundaries, to those being
written. The state never changes in place, so a snapshot is a slot that the index refers to as well, and a hit
reads the stored slot directly: no state is ever copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log2

from slimserve.cache.contract import GroupState, HostGroupInput
from slimserve.cache.pool import UnitPool, UnitStore
from slimserve.cache.prefix import Node
from slimserve.layers.contract import BLOCK_TOKENS, NULL_PAGE
from slimserve.models.contract import CacheSpec

_LONGEST_GAP = 64
"""Blocks up to which a snapshot's distance from the one before it adds to its worth."""


def boundary_of(length: int) -> int:
    """The last multiple of 64 at or before `length`."""
    return length // BLOCK_TOKENS * BLOCK_TOKENS


@dataclass(slots=True, eq=False)
class RecurrentState(GroupState):
    """`slot` holds the state at `boundary` (NULL_PAGE at 0); `pending` are slots that the step writes."""

    open_index: int
    slot: int = NULL_PAGE
    boundary: int = 0
    pending: dict[int, int] = field(default_factory=dict)
    snapshots: set[int] = field(default_factory=set)


class RecurrentSlots:
    """Boundary states of linear-attention layers."""

    chained = False

    def __init__(self, group: int, spec: CacheSpec, counts: tuple[int, int], on_evict: Callable[[Node], None]) -> None:
        """`counts` = (slots, open buffers), null units included."""
        num_slots, num_open = counts
        self.group = group
        self.spec = spec
        self.store = UnitStore(group, num_slots, chained=False, on_evict=on_evict)
        self.open = UnitPool(num_open)

    def match(self, path: Sequence[Node], limit: int) -> int:
        """The deepest boundary whose state is stored."""
        for block in range(min(limit, len(path)), 0, -1):
            if path[block - 1].units[self.group]:
                return block
        return 0

    def admit(self) -> RecurrentState | None:
        """A zero state; None where no open buffer is left."""
        return RecurrentState(self.open.take()) if self.open.num_free else None

    def restore(self, state: RecurrentState, path: Sequence[Node], num_blocks: int) -> None:
        """Refer to the stored state at num_blocks * 64."""
        if num_blocks:
            state.slot = path[num_blocks - 1].units[self.group]
            state.boundary = num_blocks * BLOCK_TOKENS
            self.store.hold(state.slot)

    def needed(self, state: RecurrentState, start: int, certain: int, end: int) -> int:
        """Slots for the last boundary that is certainly reached and for each that drafts may reach."""
        return len(self._essential(start, certain, end))

    def available(self) -> int:
        """Free slots and snapshots that no sequence uses."""
        return self.store.available()

    def held(self, state: RecurrentState) -> int:
        """Slots that the sequence refers to."""
        return (state.slot != NULL_PAGE) + len(state.pending)

    def reserve(self, state: RecurrentState, start: int, certain: int, end: int, snapshots: Sequence[int]) -> None:
        """Take slots for the boundaries of a step. Snapshots are kept only while every other sequence can still
        take the slot that it needs to go on: a missing snapshot costs a hit, a missing slot a preemption."""
        for boundary in self._essential(start, certain, end):
            state.pending[boundary] = self.store.take()
        running = self.open.num_units - 1 - self.open.num_free
        for boundary in snapshots:
            if not start < boundary <= certain:
                continue
            if boundary not in state.pending:
                if self.store.available() <= running:
                    continue
                state.pending[boundary] = self.store.take()
            state.snapshots.add(boundary)

    def commit(self, state: RecurrentState, length: int, path: Sequence[Node]) -> None:
        """Move to the slot of the last boundary reached; publish snapshots; forget boundaries not reached."""
        reached = boundary_of(length)
        for boundary, slot in sorted(state.pending.items()):
            if boundary <= length and boundary in state.snapshots:
                self._publish(slot, boundary, path)
            if boundary != reached:
                self._leave(slot, boundary, path)
        if reached > state.boundary:
            if state.slot:
                self._leave(state.slot, state.boundary, path)
            state.slot = state.pending[reached]
            state.boundary = reached
        state.pending.clear()
        state.snapshots.clear()

    def rollback(self, state: RecurrentState, length: int) -> None:
        """Forget slots of boundaries behind `length`."""
        for boundary in [boundary for boundary in state.pending if boundary > length]:
            self.store.give_back(state.pending.pop(boundary))
            state.snapshots.discard(boundary)

    def snapshot(self, state: RecurrentState, path: Sequence[Node]) -> None:
        """Publish the running state."""
        if state.slot:
            self._publish(state.slot, state.boundary, path)

    def release(self, state: RecurrentState, path: Sequence[Node]) -> None:
        """Give back the running slot, pending ones and the open buffer."""
        self.rollback(state, -1)
        if state.slot:
            self._leave(state.slot, state.boundary, path)
            state.slot = NULL_PAGE
            state.boundary = 0
        if state.open_index:
            self.open.drop(state.open_index)
            state.open_index = NULL_PAGE

    def fill(self, state: RecurrentState, host: HostGroupInput, row: int, token: int, start: int, q_len: int) -> None:
        """Slot to start from, slot of each boundary reached, open buffer. state_out is zero before."""
        host.state_in[row] = state.slot
        host.open_index[row] = state.open_index
        if state.pending:
            first = boundary_of(start) + BLOCK_TOKENS
            for boundary, slot in state.pending.items():
                host.state_out[row, (boundary - first) // BLOCK_TOKENS] = slot

    def forget(self, node: Node) -> None:
        """Drop the node's state from the index."""
        self.store.remove(node)

    def units_for(self, num_tokens: int, chunk: int) -> int:
        """The running state and the one being written."""
        return min(2, num_tokens // BLOCK_TOKENS)

    def private_units(self, state: RecurrentState) -> tuple[list[int], list[int]]:
        """Slots and open buffers that nobody but this sequence refers to."""
        slots = [slot for slot in (state.slot, *state.pending.values()) if slot]
        return [slot for slot in slots if self.store.pool.references[slot] == 1], [state.open_index]

    def audit(self, states: Sequence[RecurrentState], lengths: Sequence[tuple[int, int]]) -> None:
        """Check slots against lengths and open buffers against sequences."""
        held: dict[int, int] = {}
        open_held: dict[int, int] = {}
        for state, (committed, reserved) in zip(states, lengths, strict=True):
            assert state.boundary == boundary_of(committed), f"state at {state.boundary} for {committed} tokens"
            assert (state.slot != NULL_PAGE) == (state.boundary > 0), "a state without slot or a slot without state"
            for boundary in state.pending:
                assert committed < boundary <= reserved, f"pending state at {boundary} of {committed}..{reserved}"
            for slot in (state.slot, *state.pending.values()):
                if slot:
                    held[slot] = held.get(slot, 0) + 1
            open_held[state.open_index] = open_held.get(state.open_index, 0) + 1
        assert len(open_held) == len(states), "sequences share or lack open buffers"
        self.store.audit(held)
        self.open.audit(open_held)

    def _essential(self, start: int, certain: int, end: int) -> list[int]:
        last = boundary_of(certain)
        boundaries = [last] if last > start else []
        boundaries.extend(range(max(last, boundary_of(start)) + BLOCK_TOKENS, end + 1, BLOCK_TOKENS))
        return boundaries

    def _publish(self, slot: int, boundary: int, path: Sequence[Node]) -> None:
        block = boundary // BLOCK_TOKENS
        if block <= len(path) and not path[block - 1].units[self.group]:
            self.store.put(path[block - 1], slot)

    def _leave(self, slot: int, boundary: int, path: Sequence[Node]) -> None:
        """Give a slot back; a stored one is worth the blocks that a restart from the snapshot before it costs."""
        block = boundary // BLOCK_TOKENS
        gap = 1
        if block <= len(path):
            node = path[block - 1].parent
            while node is not None and not node.units[self.group] and gap < _LONGEST_GAP:
                node, gap = node.parent, gap + 1
        self.store.give_back(slot, log2(1 + gap))
