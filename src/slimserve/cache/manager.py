"""The one door to all sequence state: match, admit, reserve, commit, roll back, release over all groups at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from slimserve.cache.budget import CachePlan
from slimserve.cache.contract import CacheGroup, GroupState, HostGroupInput, PrefixHit
from slimserve.cache.groups import make_group
from slimserve.cache.prefix import BlockHash, CacheIdentity, Node, PrefixIndex, block_hash, block_hashes, root_hash
from slimserve.cache.storage import CacheStorage
from slimserve.layers.contract import BLOCK_TOKENS
from slimserve.models.contract import CacheSpec


@dataclass(slots=True, eq=False)
class CacheSequence:
    """One running sequence: what it holds in every group, and how far it has come.

    `path` has a node per committed whole block, `hashes` the keys known so far (a prompt's are known ahead), `tail`
    the committed tokens after the last whole block. `target` tokens are reserved ahead in groups that keep every
    block, so that a prompt whose prefill has begun cannot be stopped half way by another one.
    """

    root: BlockHash
    hashes: list[BlockHash]
    states: list[GroupState]
    target: int
    path: list[Node] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    anchors: set[int] = field(default_factory=set)
    committed: int = 0
    reserved: int = 0
    num_restored: int = 0
    released: bool = False


@dataclass(frozen=True, slots=True)
class Prompt:
    """Keys of a token sequence that is to be prefilled; made once per request, matched as often as needed."""

    root: BlockHash
    hashes: tuple[BlockHash, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class GroupUsage:
    """How a group's units are used now: held by sequences, only stored in the index, or free; null unit excluded."""

    name: str
    num_units: int
    num_held: int
    num_stored: int
    num_free: int
    num_evictions: int
    unit_bytes: int


class CacheManager:
    """All cache groups of a model, their storage and the prefix index. One thread uses it."""

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        plan: CachePlan,
        *,
        identity: CacheIdentity | None = None,
        storage: CacheStorage | None = None,
        prefix_caching: bool = True,
    ) -> None:
        """`plan` counts units per spec; `identity` keys the index; without `storage` only the books are kept."""
        self.plan = plan
        self.storage = storage
        self.prefix_caching = prefix_caching
        self.num_releases = 0
        self._identity = identity or CacheIdentity()
        self._spacing = plan.demand.snapshot_spacing // BLOCK_TOKENS * BLOCK_TOKENS
        self._chunk = plan.demand.chunk_tokens
        self._index = PrefixIndex(len(specs))
        self._sequences: list[CacheSequence] = []
        self.groups: list[CacheGroup] = []
        for number, (spec, counts) in enumerate(zip(specs, plan.groups, strict=True)):
            group = make_group(
                number,
                spec,
                (counts.num_units, counts.num_open),
                max_blocks=plan.demand.blocks_per_sequence,
                on_evict=lambda node, number=number: self._on_evict(number, node),  # type: ignore[misc]
            )
            self.groups.append(group)
        self._keep_snapshots = any(not group.chained for group in self.groups)

    # What fits, and what is known.

    @property
    def min_reusable_prefix(self) -> int:
        """Tokens of the shortest prefix that a later request can reuse; 0 = none is ever reused."""
        return BLOCK_TOKENS if self.prefix_caching else 0

    @property
    def max_request_tokens(self) -> int:
        """The longest sequence that the context and every group can hold when it is alone."""
        limits = [(group.store.pool.num_units - 1) * BLOCK_TOKENS for group in self.groups if group.chained]
        return min((self.plan.demand.max_context, *limits))

    def refusal(self, num_tokens: int) -> str | None:
        """Why a sequence of num_tokens can never run here, with the numbers; None where it can."""
        if num_tokens > self.plan.demand.max_context:
            return f"{num_tokens} tokens exceed the context of {self.plan.demand.max_context} tokens"
        for group in self.groups:
            units, limit = group.units_for(num_tokens, self._chunk), group.store.pool.num_units - 1
            if units > limit:
                return f"{num_tokens} tokens need {units} units of cache group {group.spec.name}, which has {limit}"
        return None

    def prompt(self, token_ids: Sequence[int], salt: str = "") -> Prompt:
        """The keys of a token sequence."""
        root = root_hash(self._identity, salt)
        hashes = tuple(block_hashes(root, token_ids)) if self.prefix_caching else ()
        return Prompt(root, hashes, len(token_ids))

    def known_blocks(self, prompt: Prompt, first: int = 0) -> int:
        """Blocks of the prompt's beginning that the index knows, restorable or not; the first `first` are taken as
        known (seen there before)."""
        return first + len(self._index.walk(prompt.hashes[first:], len(prompt.hashes)))

    def match(self, prompt: Prompt) -> PrefixHit:
        """The longest stored boundary that every group can restore and that leaves a token to compute."""
        return self._match(prompt)[1]

    def _match(self, prompt: Prompt) -> tuple[list[Node], PrefixHit]:
        path = self._index.walk(prompt.hashes, (prompt.num_tokens - 1) // BLOCK_TOKENS)
        known = len(path)
        for group in self.groups:
            if group.chained:
                known = min(known, group.match(path, known))
        depth, cut_by = known, None
        settled = not known
        while not settled:
            settled = True
            for group in self.groups:
                restorable = group.match(path, depth)
                if restorable < depth:
                    depth, cut_by, settled = restorable, group.spec.name, False
        return path, PrefixHit(depth * BLOCK_TOKENS, cut_by, known * BLOCK_TOKENS)

    # The life of a sequence.

    def admit(
        self, prompt: Prompt, *, use_prefix: bool = True, headroom: int = 0
    ) -> tuple[CacheSequence, PrefixHit] | None:
        """Start a sequence that will prefill `prompt`, from its stored prefix where `use_prefix` allows.

        Reserves the whole prompt in the groups that keep every block and leaves `headroom` units there for replies that
        grow. None where any group lacks room; nothing has changed then (stored entries aside).
        """
        path, hit = self._match(prompt) if use_prefix and self.prefix_caching else ([], PrefixHit())
        sequence = CacheSequence(prompt.root, list(prompt.hashes), [], target=prompt.num_tokens)
        self._sequences.append(sequence)
        for group in self.groups:
            state = group.admit()
            if state is None:
                self._drop(sequence)
                return None
            sequence.states.append(state)
        depth = hit.num_tokens // BLOCK_TOKENS
        for group, state in zip(self.groups, sequence.states, strict=True):
            group.restore(state, path, depth)
        sequence.path = path[:depth]
        sequence.num_restored = depth
        sequence.committed = sequence.reserved = hit.num_tokens
        if depth:
            path[depth - 1].pins += 1
        if not self._has_room(sequence, headroom):
            self._drop(sequence)
            return None
        for group, state in zip(self.groups, sequence.states, strict=True):
            if group.chained:
                group.reserve(state, hit.num_tokens, prompt.num_tokens, prompt.num_tokens, ())
        for node in sequence.path:
            node.hits += 1
        sequence.anchors = self._anchors(prompt.num_tokens, hit)
        return sequence, hit

    def _has_room(self, sequence: CacheSequence, headroom: int) -> bool:
        for group, state in zip(self.groups, sequence.states, strict=True):
            more = group.units_for(sequence.target, self._chunk) - group.held(state)
            if more + (headroom if group.chained else 0) > group.available():
                return False
        return True

    def may_grow(self, sequence: CacheSequence, num_tokens: int) -> bool:
        """Whether a sequence that ends with num_tokens tokens will need more units of the groups that keep every block
        than it holds."""
        return any(
            group.chained and group.needed(state, sequence.committed, num_tokens, num_tokens) > 0
            for group, state in zip(self.groups, sequence.states, strict=True)
        )

    def _anchors(self, num_tokens: int, hit: PrefixHit) -> set[int]:
        """Boundaries of a prefill whose state is worth keeping: where the same prompt, and where one that appends,
        would restart; where this prompt left the index; and every `snapshot_spacing` tokens."""
        if not self.prefix_caching or not self._keep_snapshots:
            return set()
        anchors = {
            (num_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS,
            num_tokens // BLOCK_TOKENS * BLOCK_TOKENS,
            hit.branch,
        }
        if self._spacing:
            anchors.update(range(self._spacing, num_tokens, self._spacing))
        return {anchor for anchor in anchors if anchor > hit.num_tokens}

    def reserve(self, sequence: CacheSequence, end: int, num_drafts: int = 0) -> bool:
        """Make room for positions up to `end`, the last num_drafts of them drafts. False leaves all as it was."""
        start, certain = sequence.committed, end - num_drafts
        assert not sequence.released and start < end, "reserving for a released sequence or for no token"
        if start % BLOCK_TOKENS and end // BLOCK_TOKENS == start // BLOCK_TOKENS:
            # Inside a block whose page is held, reaching no boundary: no group needs anything.
            sequence.reserved = end
            return True
        groups = list(zip(self.groups, sequence.states, strict=True))
        if any(group.needed(state, start, certain, end) > group.available() for group, state in groups):
            return False
        snapshots = [anchor for anchor in sequence.anchors if start < anchor <= certain] if sequence.anchors else ()
        for group, state in groups:
            group.reserve(state, start, certain, end, snapshots)
        sequence.reserved = end
        return True

    def extend(self, sequence: CacheSequence, num_drafts: int) -> bool:
        """Make room for drafts behind what is reserved. False leaves the reservation as it was."""
        start, certain = sequence.committed, sequence.reserved
        end = certain + num_drafts
        if start % BLOCK_TOKENS and end // BLOCK_TOKENS == start // BLOCK_TOKENS:
            sequence.reserved = end
            return True
        self.rollback(sequence)
        if self.reserve(sequence, end, num_drafts):
            return True
        kept = self.reserve(sequence, certain)
        assert kept, "what was given back a moment ago is gone"
        return False

    def commit(self, sequence: CacheSequence, token_ids: Sequence[int]) -> None:
        """The next tokens of the sequence are computed and final; what was reserved behind them is rolled back."""
        assert not sequence.released, "committing to a released sequence"
        sequence.committed += len(token_ids)
        assert sequence.committed <= sequence.reserved, "more tokens committed than reserved"
        sequence.tail.extend(token_ids)
        if len(sequence.tail) >= BLOCK_TOKENS:
            self._complete_blocks(sequence)
        if sequence.reserved > sequence.committed:
            self.rollback(sequence)

    def _complete_blocks(self, sequence: CacheSequence) -> None:
        tail, path, hashes = sequence.tail, sequence.path, sequence.hashes
        publish = self.prefix_caching and not (path and path[-1].dead)
        if publish:
            first = len(path)
            for start in range(0, len(tail) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
                if len(path) == len(hashes):
                    parent = hashes[-1] if hashes else sequence.root
                    hashes.append(block_hash(parent, tail[start : start + BLOCK_TOKENS]))
                node = self._index.extend(path[-1] if path else None, hashes[len(path)])
                node.anchored |= node.depth * BLOCK_TOKENS in sequence.anchors
                path.append(node)
            path[-1].pins += 1
            if first:
                path[first - 1].pins -= 1
        del tail[: len(tail) // BLOCK_TOKENS * BLOCK_TOKENS]
        for group, state in zip(self.groups, sequence.states, strict=True):
            group.commit(state, sequence.committed, path if publish else ())

    def rollback(self, sequence: CacheSequence) -> None:
        """Forget everything reserved behind the committed tokens (a prompt's own reservation stays)."""
        for group, state in zip(self.groups, sequence.states, strict=True):
            group.rollback(state, max(sequence.committed, sequence.target) if group.chained else sequence.committed)
        sequence.reserved = sequence.committed

    def release(self, sequence: CacheSequence) -> None:
        """End a sequence; what is committed stays restorable while it is worth its memory. Idempotent."""
        if not sequence.released:
            self._drop(sequence)
            self.num_releases += 1

    def _drop(self, sequence: CacheSequence) -> None:
        path = sequence.path
        last = path[-1] if path else None
        groups = list(zip(self.groups, sequence.states, strict=False))  # states are fewer when admission failed
        if last is not None and not last.dead and self.prefix_caching:
            last.anchored = True
            for group, state in groups:
                group.snapshot(state, path)
        for group, state in groups:
            group.release(state, path)
        self._finish(sequence)

    def discard(self, sequence: CacheSequence) -> None:
        """End a sequence whose values are not to be trusted: nothing that it computed stays known or readable."""
        if sequence.released:
            return
        if len(sequence.path) > sequence.num_restored and not sequence.path[-1].dead:
            self._cut(sequence.path[sequence.num_restored])
        for number, (group, state) in enumerate(zip(self.groups, sequence.states, strict=True)):
            units, open_buffers = group.private_units(state)
            if self.storage is not None:
                self.storage.clear(number, units, open_buffers)
            group.release(state, sequence.path)
        self._finish(sequence)
        self.num_releases += 1

    def _finish(self, sequence: CacheSequence) -> None:
        sequence.released = True
        self._sequences.remove(sequence)
        if sequence.path:
            sequence.path[-1].pins -= 1
            self._index.prune(sequence.path[-1])

    def trim(self, sequence: CacheSequence, end: int) -> None:
        """Give up what is reserved for positions at or past `end` (drafts that were not proposed)."""
        for group, state in zip(self.groups, sequence.states, strict=True):
            group.rollback(state, max(end, sequence.target) if group.chained else end)
        sequence.reserved = end

    def fill(
        self,
        sequence: CacheSequence,
        hosts: Sequence[HostGroupInput],
        row: int,
        token: int,
        start: int,
        q_len: int,
        *,
        first_group: int = 0,
    ) -> None:
        """Write a row of positions start .. start + q_len - 1 into the inputs of groups first_group and following.

        A step's own rows start at the committed length; a drafter may write its entries later than the step did.
        """
        for number, host in enumerate(hosts, start=first_group):
            self.groups[number].fill(sequence.states[number], host, row, token, start, q_len)

    # Books.

    def clear_index(self) -> None:
        """Forget every stored prefix; running sequences keep what they hold."""
        for root in [node for node in self._index if node.parent is None]:
            self._cut(root)

    def _cut(self, first: Node) -> None:
        """Forget a block and all that continues it."""
        for node in self._index.subtree(first):
            for group in self.groups:
                group.forget(node)
            self._index.cut(node)
        self._index.prune(first.parent)

    def usage(self) -> list[GroupUsage]:
        """How every group's units are used."""
        return [
            GroupUsage(
                name=group.spec.name,
                num_units=group.store.pool.num_units - 1,
                num_held=group.store.pool.num_units - 1 - group.store.available(),
                num_stored=group.store.num_idle,
                num_free=group.store.pool.num_free,
                num_evictions=group.store.num_evictions,
                unit_bytes=counts.unit_bytes,
            )
            for group, counts in zip(self.groups, self.plan.groups, strict=True)
        ]

    def audit(self) -> None:
        """Raise AssertionError unless every page, slot, open buffer and index node is owned as the books say."""
        self._index.audit()
        for number, group in enumerate(self.groups):
            lengths = []
            for sequence in self._sequences:
                assert len(sequence.states) == len(self.groups) and not sequence.released, "a sequence is half started"
                ahead = sequence.target if group.chained else 0
                lengths.append((sequence.committed, max(sequence.reserved, ahead)))
            group.audit([sequence.states[number] for sequence in self._sequences], lengths)
        pins: dict[BlockHash, int] = {}
        for sequence in self._sequences:
            if sequence.path and not sequence.path[-1].dead:
                pins[sequence.path[-1].hash] = pins.get(sequence.path[-1].hash, 0) + 1
        for node in self._index:
            assert node.pins == pins.get(node.hash, 0), "a node is pinned by nobody or by too few"
            stored = [bool(node.units[g]) for g, group in enumerate(self.groups) if group.chained]
            assert all(stored) or not any(node.units) or not stored, "a node lacks the pages that others need"

    def _on_evict(self, number: int, node: Node) -> None:
        """A group lets an entry go. Without the block's page of a chained group nothing of the block is restorable."""
        for group in self.groups if self.groups[number].chained else (self.groups[number],):
            group.forget(node)
        self._index.prune(node)
