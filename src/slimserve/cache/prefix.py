"""The prefix index: 64-token blocks, keyed by a chained cryptographic hash.

A block's key covers the identity of model, weights, layout and salt, all tokens before it and its own 64 tokens.
Every part is tagged with its domain and length, so that no choice of names or salts can make two different
contexts share a key.
"""

from __future__ import annotations

import array
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slimserve.layers.contract import BLOCK_TOKENS, NULL_PAGE

BlockHash = bytes

_DIGEST_BYTES = 32
_TOKEN_BYTES = 8


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """What cached state depends on besides tokens: changing any part makes all earlier entries unreachable."""

    model: str = ""
    weights: str = ""
    layout: str = ""


def root_hash(identity: CacheIdentity, salt: str) -> BlockHash:
    """The key before a sequence's first block."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    parts = (("model", identity.model), ("weights", identity.weights), ("layout", identity.layout), ("salt", salt))
    for domain, value in parts:
        _update(digest, domain.encode(), value.encode("utf-8", "surrogatepass"))
    return digest.digest()


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The key of the block of 64 `token_ids` that follows `parent`."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    _update(digest, b"parent", parent)
    _update(digest, b"tokens", array.array("q", token_ids).tobytes())
    return digest.digest()


def block_hashes(root: BlockHash, token_ids: Sequence[int]) -> list[BlockHash]:
    """Keys of all whole blocks of a token sequence."""
    hashes: list[BlockHash] = []
    parent = root
    for start in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        parent = block_hash(parent, token_ids[start : start + BLOCK_TOKENS])
        hashes.append(parent)
    return hashes


def _update(digest: hashlib.blake2b, domain: bytes, value: bytes) -> None:
    digest.update(bytes((len(domain),)) + domain + len(value).to_bytes(_TOKEN_BYTES, "little") + value)


class Node:
    """One block of the index: which unit each group stores for it (NULL_PAGE = none).

    depth counts blocks up to and including this one. continuations[g] counts children with a unit of group g.
    pins counts sequences whose newest block this is. `anchored` marks a boundary where prompts or replies ended
    or parted: later prompts are likely to start there.
    """

    __slots__ = (
        "anchored", "children", "continuations", "dead", "depth", "hash", "hits", "parent", "pins", "priority", "units",
    )  # fmt: skip

    depth: int
    children: dict[BlockHash, Node]

    def __init__(self, key: BlockHash, parent: Node | None, num_groups: int) -> None:
        """A node without units under `parent` (None = first block)."""
        self.hash = key
        self.parent = parent
        self.depth = 1 if parent is None else parent.depth + 1
        self.children = {}
        self.units = [NULL_PAGE] * num_groups
        self.continuations = [0] * num_groups
        self.priority = [0.0] * num_groups
        self.hits = 0
        self.pins = 0
        self.anchored = False
        self.dead = False


class PrefixIndex:
    """All known blocks by key. Nodes live while a unit, a continuation or a running sequence needs them."""

    def __init__(self, num_groups: int) -> None:
        """`num_groups` is the length of the cache table."""
        self.num_groups = num_groups
        self._nodes: dict[BlockHash, Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def walk(self, hashes: Sequence[BlockHash], limit: int) -> list[Node]:
        """The known nodes of a chain's beginning, at most `limit` of them."""
        path: list[Node] = []
        for key in hashes[:limit]:
            node = self._nodes.get(key)
            if node is None:
                break
            path.append(node)
        return path

    def extend(self, parent: Node | None, key: BlockHash) -> Node:
        """The node of `key` under `parent`, made where it is not known."""
        node = self._nodes.get(key)
        if node is None:
            node = Node(key, parent, self.num_groups)
            self._nodes[key] = node
            if parent is not None:
                parent.children[key] = node
        return node

    def prune(self, node: Node | None) -> None:
        """Remove a node that nothing needs any more, then its parents likewise."""
        while node is not None and not (node.dead or node.pins or node.children or any(node.units)):
            self._unlink(node)
            node = node.parent

    def subtree(self, node: Node) -> list[Node]:
        """The node and everything that continues it, continuations before what they continue."""
        order: list[Node] = []
        stack = [node]
        while stack:
            current = stack.pop()
            order.append(current)
            stack.extend(current.children.values())
        order.reverse()
        return order

    def cut(self, node: Node) -> None:
        """Take a node without units and children out of the index even though a sequence is still at it."""
        assert not node.children and not any(node.units), "a node is cut before its units and continuations"
        if not node.dead:
            self._unlink(node)

    def _unlink(self, node: Node) -> None:
        del self._nodes[node.hash]
        if node.parent is not None:
            del node.parent.children[node.hash]
        node.dead = True

    def audit(self) -> None:
        """Check links, depths and that every node is needed."""
        for key, node in self._nodes.items():
            assert node.hash == key and not node.dead, "a node is filed under another key"
            if node.parent is not None:
                assert node.parent.children.get(key) is node, "a node is unknown to its parent"
                assert self._nodes.get(node.parent.hash) is node.parent, "a node's parent is gone"
                assert node.depth == node.parent.depth + 1, "depths do not count blocks"
            for group in range(self.num_groups):
                stored = sum(1 for child in node.children.values() if child.units[group])
                assert node.continuations[group] == stored, "continuations are miscounted"
            assert node.children or node.pins or any(node.units), "a node is kept that nothing needs"
