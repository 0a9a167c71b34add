"""Units and their order of eviction; keys of the prefix index."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimserve.cache.pool import UnitPool, UnitStore
from slimserve.cache.prefix import CacheIdentity, Node, PrefixIndex, block_hash, block_hashes, root_hash


def test_a_pool_gives_each_unit_once_and_never_the_null_unit() -> None:
    pool = UnitPool(5)
    units = [pool.take() for _ in range(4)]
    assert sorted(units) == [1, 2, 3, 4] and pool.num_free == 0
    pool.share(units[0])
    assert pool.drop(units[0]) == 1 and pool.num_free == 0
    assert pool.drop(units[0]) == 0 and pool.num_free == 1
    with pytest.raises(AssertionError):
        pool.drop(units[0])
    with pytest.raises(AssertionError):
        pool.share(units[0])
    pool.audit(dict.fromkeys(units[1:], 1))
    with pytest.raises(AssertionError):
        pool.audit({units[1]: 2, units[2]: 1, units[3]: 1})


class Chain:
    """A store over chains of nodes, without sequences' other groups."""

    def __init__(self, num_units: int, chained: bool) -> None:
        self.index = PrefixIndex(1)
        self.store = UnitStore(0, num_units + 1, chained=chained, on_evict=self.evicted)
        self.gone: list[bytes] = []

    def evicted(self, node: Node) -> None:
        self.gone.append(node.hash)
        self.store.remove(node)
        self.index.prune(node)

    def add(self, parent: Node | None, key: bytes) -> Node:
        node = self.index.extend(parent, key)
        unit = self.store.take()
        self.store.put(node, unit)
        self.store.give_back(unit)
        return node


def test_a_chain_is_evicted_from_its_end_and_shared_beginnings_last() -> None:
    chain = Chain(5, chained=True)
    system = chain.add(None, b"system")
    first = chain.add(system, b"a1")
    chain.add(first, b"a2")
    chain.add(system, b"b1")
    for _ in range(5):
        chain.store.take()
    assert chain.gone == [b"a2", b"b1", b"a1", b"system"]
    assert len(chain.index) == 0


def test_hits_and_recency_keep_an_entry() -> None:
    chain = Chain(3, chained=False)
    often, seldom = chain.add(None, b"often"), chain.add(None, b"seldom")
    chain.add(None, b"new")
    for node in (often, seldom):
        unit = node.units[0]
        chain.store.hold(unit)
        node.hits += 7 if node is often else 0
        chain.store.give_back(unit)
    units = [chain.store.take() for _ in range(3)]
    assert chain.gone == [b"new", b"seldom", b"often"]
    assert sorted(units) == [1, 2, 3]


def test_old_popularity_fades() -> None:
    """The clock moves on with every eviction, so that what was popular long ago gives way in the end."""
    chain = Chain(4, chained=False)
    popular = chain.add(None, b"popular")
    chain.store.hold(popular.units[0])
    popular.hits = 1000
    chain.store.give_back(popular.units[0])
    for i in range(60):
        chain.add(None, b"%d" % i)
    assert b"popular" in chain.gone
    assert chain.gone.index(b"popular") > 10


def test_listings_do_not_pile_up() -> None:
    chain = Chain(8, chained=True)
    node = chain.add(None, b"x")
    for _ in range(5_000):
        unit = node.units[0]
        chain.store.hold(unit)
        node.hits += 1
        chain.store.give_back(unit)
    assert len(chain.store._heap) < 200


def test_every_part_of_the_identity_separates_keys() -> None:
    base = CacheIdentity("m", "w", "l")
    roots = {
        root_hash(base, ""),
        root_hash(CacheIdentity("m2", "w", "l"), ""),
        root_hash(CacheIdentity("m", "w2", "l"), ""),
        root_hash(CacheIdentity("m", "w", "l2"), ""),
        root_hash(base, "salt"),
        root_hash(CacheIdentity("", "m", "wl"), ""),
        root_hash(CacheIdentity("mw", "", "l"), ""),
        root_hash(CacheIdentity("m", "w", ""), "l"),
        root_hash(CacheIdentity("m", "", "w"), "l"),
    }
    assert len(roots) == 9


@settings(deadline=None, max_examples=200)
@given(st.lists(st.text(max_size=6), min_size=8, max_size=8))
def test_no_choice_of_names_makes_two_identities_share_a_root(names: list[str]) -> None:
    left = (CacheIdentity(*names[:3]), names[3])
    right = (CacheIdentity(*names[4:7]), names[7])
    assert (root_hash(*left) == root_hash(*right)) == (left == right)


def test_block_keys_chain() -> None:
    root = root_hash(CacheIdentity(), "")
    tokens = list(range(200))
    hashes = block_hashes(root, tokens)
    assert len(hashes) == 3 and len({*hashes}) == 3 and all(len(key) == 32 for key in hashes)
    assert hashes[1] == block_hash(hashes[0], tokens[64:128])
    changed = block_hashes(root, [*tokens[:10], 999, *tokens[11:]])
    assert not {*changed} & {*hashes}, "a change in the first block must change every key behind it"
    assert block_hashes(root, [*tokens[:100], 999, *tokens[101:]])[0] == hashes[0]


def test_nodes_live_as_long_as_they_are_needed() -> None:
    index = PrefixIndex(1)
    first = index.extend(None, b"1")
    second = index.extend(first, b"2")
    second.pins = 1
    index.prune(second)
    assert index.walk([b"1", b"2", b"3"], 9) == [first, second]
    assert index.walk([b"1", b"2", b"3"], 1) == [first]
    second.pins = 0
    index.prune(second)
    assert len(index) == 0 and first.dead and second.dead
