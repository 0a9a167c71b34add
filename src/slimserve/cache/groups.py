"""Groups that keep one page per 64-token block: full attention, latents, pooled index keys, sliding windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from slimserve.cache.contract import CacheGroup, GroupState, HostGroupInput, IntArray
from slimserve.cache.pool import UnitPool, UnitStore
from slimserve.cache.prefix import Node
from slimserve.cache.recurrent import RecurrentSlots
from slimserve.layers.contract import BLOCK_TOKENS, NULL_PAGE
from slimserve.models.contract import CacheKind, CacheSpec


def blocks_of(num_tokens: int) -> int:
    """Blocks that num_tokens tokens touch."""
    return -(-num_tokens // BLOCK_TOKENS)


@dataclass(slots=True, eq=False)
class PagedState(GroupState):
    """Pages of one sequence, block by block; `table` mirrors `pages` for the device.

    Blocks below `floor` are given back (behind a window) or were never attached; blocks below `published` are
    in the prefix index.
    """

    table: IntArray
    pages: list[int]
    floor: int = 0
    published: int = 0
    open_index: int = NULL_PAGE


class PagedGroup:
    """A page for every block of the whole context: full attention, latents and pooled index keys.

    Pools of index keys also have an open buffer per sequence (raw rows of the pool that is not complete yet). At
    a multiple of 64 no pool is open, so a restored sequence starts with an empty one.
    """

    chained = True

    def __init__(
        self,
        group: int,
        spec: CacheSpec,
        counts: tuple[int, int],
        max_blocks: int,
        on_evict: Callable[[Node], None],
    ) -> None:
        """`counts` = (pages, open buffers), null units included; 0 open buffers = the kind has none."""
        num_pages, num_open = counts
        self.group = group
        self.spec = spec
        self.store = UnitStore(group, num_pages, chained=self.chained, on_evict=on_evict)
        self.open = UnitPool(max(1, num_open))
        self.has_open = num_open > 0
        self.max_blocks = max_blocks
        self._offsets = np.arange(max_blocks * BLOCK_TOKENS, dtype=np.int64)

    def match(self, path: Sequence[Node], limit: int) -> int:
        """The longest prefix of at most `limit` blocks of which every page is stored."""
        for block, node in enumerate(path[:limit]):
            if not node.units[self.group]:
                return block
        return min(limit, len(path))

    def admit(self) -> PagedState | None:
        """An empty block table; None where no open buffer is left."""
        open_index = NULL_PAGE
        if self.has_open:
            if not self.open.num_free:
                return None
            open_index = self.open.take()
        return PagedState(np.zeros(self.max_blocks, dtype=np.int32), [], open_index=open_index)

    def restore(self, state: PagedState, path: Sequence[Node], num_blocks: int) -> None:
        """Refer to the stored pages that a sequence starting at num_blocks * 64 reads."""
        state.floor = self._first_read(num_blocks * BLOCK_TOKENS)
        state.pages = [NULL_PAGE] * state.floor
        for node in path[state.floor : num_blocks]:
            page = node.units[self.group]
            self.store.hold(page)
            state.pages.append(page)
        state.table[:num_blocks] = state.pages
        state.published = num_blocks

    def needed(self, state: PagedState, start: int, certain: int, end: int) -> int:
        """Pages for blocks that the table does not have yet."""
        return max(0, blocks_of(end) - len(state.pages))

    def available(self) -> int:
        """Free pages and stored pages that no sequence uses."""
        return self.store.available()

    def held(self, state: PagedState) -> int:
        """Pages that the sequence refers to."""
        return len(state.pages) - state.floor

    def reserve(self, state: PagedState, start: int, certain: int, end: int, snapshots: Sequence[int]) -> None:
        """Take pages up to the block of position end - 1; pages are kept for every block, so snapshots need none."""
        for block in range(len(state.pages), blocks_of(end)):
            page = self.store.take()
            state.pages.append(page)
            state.table[block] = page

    def commit(self, state: PagedState, length: int, path: Sequence[Node]) -> None:
        """Publish whole blocks. A block that is stored already is used in place of the own copy: same tokens at
        the same positions have the same bits."""
        for block in range(state.published, len(path)):
            node, own = path[block], state.pages[block]
            stored = node.units[self.group]
            if not stored:
                self.store.put(node, own)
            elif stored != own:
                self.store.hold(stored)
                self.store.give_back(own)
                state.pages[block] = stored
                state.table[block] = stored
        state.published = max(state.published, len(path))

    def rollback(self, state: PagedState, length: int) -> None:
        """Give back pages behind the block of position length - 1."""
        while len(state.pages) > blocks_of(length):
            self.store.give_back(state.pages.pop())
            state.table[len(state.pages)] = NULL_PAGE

    def snapshot(self, state: PagedState, path: Sequence[Node]) -> None:
        """Whole blocks are published as they complete: nothing to add."""

    def release(self, state: PagedState, path: Sequence[Node]) -> None:
        """Give back all pages and the open buffer."""
        for block in range(state.floor, len(state.pages)):
            self._leave(state, block, path)
        state.pages = []
        state.floor = state.published = 0
        if state.open_index:
            self.open.drop(state.open_index)
            state.open_index = NULL_PAGE

    def fill(self, state: PagedState, host: HostGroupInput, row: int, token: int, start: int, q_len: int) -> None:
        """Block table of the row, write slots of its tokens, its open buffer."""
        num_blocks = len(state.pages)
        host.block_table[row, :num_blocks] = state.table[:num_blocks]
        stale = host.filled[row]
        if stale > num_blocks:
            host.block_table[row, num_blocks:stale] = NULL_PAGE
        host.filled[row] = num_blocks
        if q_len == 1:
            host.slots[token] = state.pages[start // BLOCK_TOKENS] * BLOCK_TOKENS + start % BLOCK_TOKENS
        else:
            positions = self._offsets[start : start + q_len]
            pages = state.table[positions // BLOCK_TOKENS].astype(np.int64)
            host.slots[token : token + q_len] = pages * BLOCK_TOKENS + positions % BLOCK_TOKENS
        if self.has_open:
            host.open_index[row] = state.open_index

    def forget(self, node: Node) -> None:
        """Drop the node's page from the index."""
        self.store.remove(node)

    def units_for(self, num_tokens: int, chunk: int) -> int:
        """One page per block."""
        return blocks_of(num_tokens)

    def private_units(self, state: PagedState) -> tuple[list[int], list[int]]:
        """Pages and open buffers that nobody but this sequence refers to."""
        pages = [page for page in state.pages[state.floor :] if self.store.pool.references[page] == 1]
        return pages, [state.open_index] if state.open_index else []

    def audit(self, states: Sequence[PagedState], lengths: Sequence[tuple[int, int]]) -> None:
        """Check pages against tables, tables against lengths, and open buffers."""
        held: dict[int, int] = {}
        open_held: dict[int, int] = {}
        for state, (committed, reserved) in zip(states, lengths, strict=True):
            pages = state.pages
            assert len(pages) == blocks_of(reserved), f"{len(pages)} blocks for {reserved} reserved tokens"
            assert state.floor <= self._first_read(committed), "a page that the window still reads was given back"
            assert not any(pages[: state.floor]) and all(pages[state.floor :]), "null pages and floor disagree"
            assert state.table[: len(pages)].tolist() == pages, "block table and pages disagree"
            assert not state.table[len(pages) :].any(), "block table has pages behind its end"
            assert len(set(pages[state.floor :])) == len(pages) - state.floor, "one page stands for two blocks"
            for page in pages[state.floor :]:
                held[page] = held.get(page, 0) + 1
            if state.open_index:
                open_held[state.open_index] = open_held.get(state.open_index, 0) + 1
        self.store.audit(held)
        assert len(open_held) == len(states) * self.has_open, "sequences share or lack open buffers"
        self.open.audit(open_held)

    def _first_read(self, position: int) -> int:
        """First block that the token at `position` reads."""
        return 0

    def _leave(self, state: PagedState, block: int, path: Sequence[Node]) -> None:
        """Give back the page of one block."""
        self.store.give_back(state.pages[block])


class SlidingWindowPages(PagedGroup):
    """Pages of layers that read the last `window` tokens (own token included).

    Pages behind the window leave the sequence; the index keeps them while they are worth it. A hit needs only
    the pages of the last window, so pages are worth most where a boundary follows at which prompts start.
    """

    chained = False
    _WEIGHT_WITHOUT_ANCHOR = 1 / 8

    def match(self, path: Sequence[Node], limit: int) -> int:
        """The deepest boundary whose last window is stored."""
        best = run = 0
        for block, node in enumerate(path[:limit], start=1):
            run = run + 1 if node.units[self.group] else 0
            if run >= block - self._first_read(block * BLOCK_TOKENS):
                best = block
        return best

    def commit(self, state: PagedState, length: int, path: Sequence[Node]) -> None:
        """Publish whole blocks, then let go of those that no later token reads."""
        super().commit(state, length, path)
        first = min(self._first_read(length), len(state.pages))
        for block in range(state.floor, first):
            self._leave(state, block, path)
            state.pages[block] = NULL_PAGE
        state.table[state.floor : first] = NULL_PAGE
        state.floor = max(state.floor, first)

    def units_for(self, num_tokens: int, chunk: int) -> int:
        """The window and a chunk, at any alignment; the window moves on at block boundaries only."""
        return min(blocks_of(num_tokens), blocks_of(self._window - 1 + chunk) + 2)

    @property
    def _window(self) -> int:
        assert self.spec.window is not None
        return self.spec.window

    def _first_read(self, position: int) -> int:
        return max(0, position - self._window + 1) // BLOCK_TOKENS

    def _leave(self, state: PagedState, block: int, path: Sequence[Node]) -> None:
        reach = block + 1 + blocks_of(self._window - 1)
        anchored = any(node.anchored for node in path[block:reach])
        self.store.give_back(state.pages[block], 1.0 if anchored else self._WEIGHT_WITHOUT_ANCHOR)


def make_group(
    group: int,
    spec: CacheSpec,
    counts: tuple[int, int],
    *,
    max_blocks: int,
    on_evict: Callable[[Node], None],
) -> CacheGroup:
    """The group class of a spec's kind, with (pages or slots, open buffers), null units counted."""
    if spec.kind is CacheKind.RECURRENT:
        return RecurrentSlots(group, spec, counts, on_evict)
    if spec.kind is CacheKind.WINDOW:
        if not spec.window or spec.window < 1:
            raise ValueError(f"window group {spec.name} has window {spec.window}; it needs at least 1 token")
        return SlidingWindowPages(group, spec, counts, max_blocks, on_evict)
    return PagedGroup(group, spec, counts, max_blocks, on_evict)
