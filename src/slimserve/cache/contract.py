"""The transactional contract that all sequence state keeps.

A sequence's tokens move through three lengths: matched (restored from the prefix index) <= committed <= reserved.
All groups reserve or none does; a hit is the longest boundary that every group can restore; release is
idempotent. Only committed tokens are ever published to the prefix index.

`CacheManager` is the only caller of the groups and the only door for the engine. It asks every group whether it
has room before it lets any of them take it, so that a refusal leaves all of them as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from slimserve.cache.pool import UnitPool, UnitStore
from slimserve.cache.prefix import Node
from slimserve.models.contract import CacheSpec

IntArray = npt.NDArray[np.signedinteger[Any]]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The reusable prefix in tokens (a multiple of 64) and the group that cut it shorter than the index knew.

    `branch` is the depth in tokens at which the prompt leaves the index: where the hit was cut, state kept at
    this boundary lets the next prompt of the same beginning restore it.
    """

    num_tokens: int = 0
    cut_by: str | None = None
    branch: int = 0


@dataclass(slots=True, eq=False)
class GroupState:
    """What one group holds for one sequence; each group class extends it."""


@dataclass(slots=True, eq=False)
class HostGroupInput:
    """The host side of layers.contract.GroupInput for the rows of a step, filled in place by the groups.

    block_table [R, max_blocks] int32; slots [T] int64; state_in [R], open_index [R] int32;
    state_out [R, max_crossings] int32. Row r of block_table is filled up to filled[r] blocks; what lies behind
    is NULL_PAGE. A kind that has no use for an array leaves it as it is.
    """

    block_table: IntArray
    slots: IntArray
    state_in: IntArray
    state_out: IntArray
    open_index: IntArray
    filled: list[int]


class CacheGroup(Protocol):
    """One kind of sequence state (pages, windows, latents, pools, recurrent slots) for a set of layers.

    `state` is the GroupState that `admit` made for a sequence. Positions are absolute token counts. `path` is the
    chain of index nodes of a sequence's whole blocks: path[i] stands for tokens i * 64 .. i * 64 + 63.
    """

    spec: CacheSpec
    store: UnitStore
    open: UnitPool
    chained: bool
    """Whether a boundary can only be restored with this group's units of every block before it."""

    def match(self, path: Sequence[Node], limit: int) -> int:
        """The longest prefix of at most `limit` blocks that this group alone could restore."""
        ...

    def admit(self) -> GroupState | None:
        """Start a sequence; None where no open buffer is left."""
        ...

    def restore(self, state: Any, path: Sequence[Node], num_blocks: int) -> None:
        """Attach the stored state of the first num_blocks blocks to a new sequence (references, no copies)."""
        ...

    def needed(self, state: Any, start: int, certain: int, end: int) -> int:
        """Units (pages or slots) that reserving positions [start, end) would newly take.

        Positions in [certain, end) are drafts that may be rolled back.
        """
        ...

    def available(self) -> int:
        """Units that can be had now: free ones and stored ones that no sequence uses."""
        ...

    def held(self, state: Any) -> int:
        """Units that the sequence refers to."""
        ...

    def reserve(self, state: Any, start: int, certain: int, end: int, snapshots: Sequence[int]) -> None:
        """Make room for positions [start, end); `needed` must be available. May also keep state at `snapshots`."""
        ...

    def commit(self, state: Any, length: int, path: Sequence[Node]) -> None:
        """Positions below `length` are final: publish what they complete (path = nodes of all whole blocks).

        An empty path publishes nothing.
        """
        ...

    def rollback(self, state: Any, length: int) -> None:
        """Forget what was reserved for positions at or past `length`."""
        ...

    def snapshot(self, state: Any, path: Sequence[Node]) -> None:
        """Keep the newest committed boundary restorable after release, where this group holds it."""
        ...

    def release(self, state: Any, path: Sequence[Node]) -> None:
        """Give everything of the sequence back; idempotent."""
        ...

    def fill(self, state: Any, host: HostGroupInput, row: int, token: int, start: int, q_len: int) -> None:
        """Write row `row` of the step's input; its tokens are the step's tokens token .. token + q_len - 1."""
        ...

    def forget(self, node: Node) -> None:
        """Drop this group's unit of a node from the index; sequences that use it keep it."""
        ...

    def units_for(self, num_tokens: int, chunk: int) -> int:
        """Most units that one sequence of num_tokens holds at once when prefilled in chunks of `chunk` tokens."""
        ...

    def private_units(self, state: Any) -> tuple[list[int], list[int]]:
        """Units and open buffers that nobody but this sequence refers to."""
        ...

    def audit(self, states: Sequence[Any], lengths: Sequence[tuple[int, int]]) -> None:
        """Raise AssertionError unless every unit is owned exactly as the books say.

        `lengths` holds (committed, reserved) of each sequence.
        """
        ...
