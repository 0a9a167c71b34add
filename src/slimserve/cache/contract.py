"""The transactional contract that all sequence state keeps.

A sequence's tokens move through three lengths: matched (restored from the prefix index) <= committed <= reserved.
All groups reserve or none does; a hit is the longest boundary that every group can restore; release is
idempotent. Only committed tokens are ever published to the prefix index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

BlockHash = bytes


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The reusable prefix in tokens (a multiple of 64) and the group that cut it shorter than the index knew."""

    num_tokens: int
    cut_by: str | None = None


class CacheGroup(Protocol):
    """One kind of sequence state (pages, windows, latents, pools, recurrent slots) for a set of layers.

    Sequences are named by an opaque integer `sequence`. Positions are absolute token counts.
    """

    name: str

    def match(self, hashes: Sequence[BlockHash]) -> int:
        """Longest prefix, in blocks of `hashes`, that this group alone could restore; boundaries() refines it."""
        ...

    def can_restore(self, hashes: Sequence[BlockHash], num_blocks: int) -> bool:
        """Whether a sequence may start at exactly num_blocks * 64 tokens with this group's stored state."""
        ...

    def restore(self, sequence: int, hashes: Sequence[BlockHash], num_blocks: int) -> None:
        """Attach the stored state of the first num_blocks blocks to a new sequence (references, no copies)."""
        ...

    def needed(self, sequence: int, start: int, end: int) -> int:
        """Bytes that reserving positions [start, end) would newly take."""
        ...

    def reserve(self, sequence: int, start: int, end: int) -> bool:
        """Make room for positions [start, end); False leaves the group as it was."""
        ...

    def commit(self, sequence: int, length: int, hashes: Sequence[BlockHash]) -> None:
        """Positions below `length` are final; publish whole blocks (hashes of all whole blocks so far)."""
        ...

    def rollback(self, sequence: int, length: int) -> None:
        """Forget reserved positions at or past `length`."""
        ...

    def release(self, sequence: int) -> None:
        """Give everything of the sequence back; idempotent."""
        ...

    def snapshot(self, sequence: int, boundary: int, block_hash: BlockHash) -> bool:
        """Keep the state at `boundary` (a multiple of 64, committed) restorable; False where it is not held."""
        ...

    def evict(self, num_bytes: int) -> int:
        """Free unreferenced stored state, least reuse value first; returns the bytes freed."""
        ...

    def audit(self) -> None:
        """Raise AssertionError unless every page and slot is owned exactly as the books say."""
        ...
