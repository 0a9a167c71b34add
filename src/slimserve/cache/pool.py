"""Units of one group: a free list with reference counts, and the stored ones in the order in which they may go."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import log2

from slimserve.cache.prefix import Node
from slimserve.layers.contract import NULL_PAGE


class UnitPool:
    """Units (pages, slots or open buffers) 1 .. num_units - 1 with reference counts; unit 0 belongs to nobody."""

    def __init__(self, num_units: int) -> None:
        """`num_units` counts the null unit."""
        if num_units < 1:
            raise ValueError(f"a pool needs its null unit; got {num_units} units")
        self.num_units = num_units
        self.references = [0] * num_units
        self._free = list(range(num_units - 1, 0, -1))

    @property
    def num_free(self) -> int:
        """Units that nobody refers to."""
        return len(self._free)

    def take(self) -> int:
        """One free unit with one reference; IndexError where none is free (callers check first)."""
        unit = self._free.pop()
        self.references[unit] = 1
        return unit

    def share(self, unit: int) -> None:
        """One more reference to a unit in use."""
        assert self.references[unit] > 0, f"unit {unit} is shared but free"
        self.references[unit] += 1

    def drop(self, unit: int) -> int:
        """One reference less; returns those left, and frees the unit at 0."""
        left = self.references[unit] - 1
        assert left >= 0 and unit != NULL_PAGE, f"unit {unit} is dropped but nobody holds it"
        self.references[unit] = left
        if left == 0:
            self._free.append(unit)
        return left

    def audit(self, expected: dict[int, int]) -> None:
        """Check the counts against `expected` references per unit, and the free list against the counts."""
        free = set(self._free)
        assert len(free) == len(self._free), "a unit is on the free list twice"
        assert NULL_PAGE not in free and self.references[NULL_PAGE] == 0, "the null unit is owned or free"
        for unit in range(1, self.num_units):
            count = self.references[unit]
            assert count == expected.get(unit, 0), f"unit {unit}: {count} references, {expected.get(unit, 0)} owners"
            assert (unit in free) == (count == 0), f"unit {unit}: {count} references, on the free list: {unit in free}"


class UnitStore:
    """A pool whose units may outlive their sequence as entries of the prefix index.

    An entry is idle when no sequence uses its unit. Idle entries go in the order of
    `clock + weight * (1 + log2(1 + hits))`, where the clock is the value of the last one that went: recency,
    frequency and worth in one number (greedy dual, Cao & Irani 1997). In a chained group an entry goes only
    after the entries of all its continuations, so that a chain is shortened from its end.
    """

    def __init__(self, group: int, num_units: int, *, chained: bool, on_evict: Callable[[Node], None]) -> None:
        """`on_evict` drops the node's entries (this one and what is useless without it) from the index."""
        self.group = group
        self.chained = chained
        self.pool = UnitPool(num_units)
        self.num_idle = 0
        self.num_evictions = 0
        self._entries: dict[int, Node] = {}
        self._heap: list[tuple[float, int, int, Node]] = []
        self._listing: dict[int, int] = {}
        self._clock = 0.0
        self._serial = 0
        self._on_evict = on_evict

    @property
    def num_stored(self) -> int:
        """Units that the index refers to."""
        return len(self._entries)

    def available(self) -> int:
        """Units that `take` can give: free or idle."""
        return self.pool.num_free + self.num_idle

    def take(self) -> int:
        """A unit with one reference; evicts the least valuable idle entry where none is free."""
        if not self.pool.num_free:
            self.evict()
        return self.pool.take()

    def hold(self, unit: int) -> None:
        """A sequence refers to a stored unit."""
        if self.pool.references[unit] == 1 and unit in self._entries:
            self.num_idle -= 1
        self.pool.share(unit)

    def give_back(self, unit: int, weight: float = 1.0) -> None:
        """A sequence stops using a unit; a stored one becomes idle with `weight` as its worth."""
        if self.pool.drop(unit) == 1 and unit in self._entries:
            node = self._entries[unit]
            self.num_idle += 1
            node.priority[self.group] = self._clock + weight * (1.0 + log2(1 + node.hits))
            self._offer(node, unit)

    def put(self, node: Node, unit: int) -> None:
        """The index refers to a unit that a sequence holds."""
        assert not node.units[self.group], "the node already has a unit of this group"
        self.pool.share(unit)
        node.units[self.group] = unit
        self._entries[unit] = node
        if node.parent is not None:
            node.parent.continuations[self.group] += 1

    def remove(self, node: Node) -> None:
        """The index stops referring to the node's unit; a sequence that uses it keeps it."""
        unit = node.units[self.group]
        if not unit:
            return
        node.units[self.group] = NULL_PAGE
        del self._entries[unit]
        if self.pool.references[unit] == 1:
            self.num_idle -= 1
        self.pool.drop(unit)
        parent = node.parent
        if parent is not None:
            parent.continuations[self.group] -= 1
            stored = parent.units[self.group]
            if self.chained and stored and self.pool.references[stored] == 1:
                self._offer(parent, stored)

    def evict(self) -> None:
        """Drop the least valuable idle entry; AssertionError where there is none."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._is_current(entry):
                self._clock = max(self._clock, entry[0])
                self.num_evictions += 1
                self._on_evict(entry[3])
                return
        raise AssertionError("no idle entry to evict: callers check available() first")

    def _may_go(self, node: Node, unit: int) -> bool:
        return (
            self._entries.get(unit) is node
            and self.pool.references[unit] == 1
            and not (self.chained and node.continuations[self.group])
        )

    def _offer(self, node: Node, unit: int) -> None:
        """List an idle entry for eviction. Listings go stale and are checked when they come up."""
        if self.chained and node.continuations[self.group]:
            return
        self._serial += 1
        self._listing[unit] = self._serial
        heapq.heappush(self._heap, (node.priority[self.group], self._serial, unit, node))
        if len(self._heap) > 2 * self.num_idle + 64:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def _is_current(self, entry: tuple[float, int, int, Node]) -> bool:
        _, serial, unit, node = entry
        return self._listing[unit] == serial and self._may_go(node, unit)

    def audit(self, held: dict[int, int]) -> None:
        """Check pool and index against `held`, the references that sequences have per unit."""
        expected = dict(held)
        for unit, node in self._entries.items():
            assert node.units[self.group] == unit and not node.dead, f"unit {unit}: the index entry is out of date"
            expected[unit] = expected.get(unit, 0) + 1
        self.pool.audit(expected)
        idle = {unit for unit in self._entries if not held.get(unit)}
        assert len(idle) == self.num_idle, f"{self.num_idle} idle units on the books, {len(idle)} in fact"
        listed = {entry[2] for entry in self._heap if self._is_current(entry)}
        for unit in idle:
            node = self._entries[unit]
            if self._may_go(node, unit):
                assert unit in listed, f"idle unit {unit} can never be evicted"
