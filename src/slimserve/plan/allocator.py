"""torch's CUDA caching allocator on paper: what it reserves for tensors of given sizes.

Its rules (c10/cuda/CUDACachingAllocator.cpp): sizes are rounded to 512 bytes; blocks of up to 1 MiB lie in segments of
2 MiB, larger ones in segments of 20 MiB or, from 10 MiB on, in whole pieces of 2 MiB; the smallest free block that fits
is taken, split where enough remains, and merged with its free neighbours when it is given back.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

MIB = 1 << 20
ROUND, SMALL, SMALL_SEGMENT = 512, MIB, 2 * MIB
LARGE_SEGMENT, LARGE_FROM, PIECE = 20 * MIB, 10 * MIB, 2 * MIB


@dataclass(slots=True, eq=False)
class Block:
    """A stretch of a segment; neighbours are linked."""

    size: int
    small: bool
    pool: int
    free: bool = False
    before: Block | None = None
    after: Block | None = None


@dataclass
class Allocator:
    """Live and reserved bytes of pools (0: the ordinary one) under torch's rules."""

    allocated: int = 0
    reserved: dict[int, int] = field(default_factory=dict)
    peak: int = 0
    pool: int = 0
    _free: dict[tuple[int, bool], list[tuple[int, int, Block]]] = field(default_factory=dict)
    _count: int = 0

    def allocate(self, num_bytes: int) -> Block | None:
        """A block for num_bytes; None for empty tensors."""
        if num_bytes <= 0:
            return None
        size = -(-num_bytes // ROUND) * ROUND
        small = size <= SMALL
        held = self._free.setdefault((self.pool, small), [])
        place = bisect.bisect_left(held, (size, -1))
        if place < len(held):
            block = held.pop(place)[2]
        else:
            wanted = SMALL_SEGMENT if small else LARGE_SEGMENT if size < LARGE_FROM else -(-size // PIECE) * PIECE
            self.reserved[self.pool] = self.reserved.get(self.pool, 0) + wanted
            block = Block(wanted, small, self.pool)
        rest = block.size - size
        if rest >= ROUND if small else rest > SMALL:
            tail = Block(rest, small, block.pool, True, block, block.after)
            if block.after is not None:
                block.after.before = tail
            block.size, block.after = size, tail
            self._keep(tail)
        block.free = False
        self.allocated += block.size
        self.peak = max(self.peak, self.allocated)
        return block

    def release(self, block: Block) -> None:
        """Give a block back; it merges with free neighbours."""
        self.allocated -= block.size
        block.free = True
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._drop(other)
                first, second = (other, block) if other is block.before else (block, other)
                first.size += second.size
                first.after = second.after
                if second.after is not None:
                    second.after.before = first
                block = first
        block.free = True
        self._keep(block)

    def empty_cache(self) -> None:
        """Give whole free segments of the ordinary pool back."""
        for small in (False, True):
            held = self._free.get((0, small), [])
            whole = [entry for entry in held if entry[2].before is None and entry[2].after is None]
            for entry in whole:
                held.remove(entry)
                self.reserved[0] -= entry[0]

    def fork(self) -> Allocator:
        """An allocator with the same free blocks, on which more can be allocated without touching this one."""
        other = Allocator(self.allocated, dict(self.reserved), self.peak, self.pool, _count=self._count)
        for key, held in self._free.items():
            other._free[key] = [(size, number, Block(size, block.small, block.pool)) for size, number, block in held]
        return other

    def _keep(self, block: Block) -> None:
        self._count += 1
        bisect.insort(self._free.setdefault((block.pool, block.small), []), (block.size, self._count, block))

    def _drop(self, block: Block) -> None:
        held = self._free[block.pool, block.small]
        held.pop(next(i for i, entry in enumerate(held) if entry[2] is block))
