"""One byte budget over all groups: exact bytes, the group that binds, refusals with numbers, storage as planned."""

from __future__ import annotations

import pytest
import torch
from fake_model import cache_table
from hypothesis import given, settings
from hypothesis import strategies as st

from slimserve.cache.budget import CacheDemand, cache_bytes, full_budget, minimum_budget, plan_cache
from slimserve.cache.storage import CacheStorage
from slimserve.errors import RefusalError
from slimserve.models.contract import BufferSpec, CacheKind, CacheSpec

KINDS = list(CacheKind)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=5, unique=True),
    st.integers(1, 64),
    st.integers(1, 20_000),
    st.integers(1, 4_096),
    st.integers(64, 4_096),
    st.floats(1.0, 30.0),
)
def test_the_budget_is_used_as_far_as_whole_blocks_go(
    kinds: list[CacheKind], sequences: int, context: int, chunk: int, spacing: int, factor: float
) -> None:
    specs = cache_table(tuple(kinds))
    demand = CacheDemand(sequences, context, chunk, spacing)
    budget = int(minimum_budget(specs, demand) * factor)
    plan = plan_cache(specs, demand, budget)
    assert plan.used_bytes + plan.unused_bytes == budget and plan.unused_bytes >= 0
    assert plan.used_bytes == sum(
        g.num_units * (s.page_bytes() + s.slot_bytes()) + g.num_open * s.open_bytes()
        for g, s in zip(plan.groups, specs, strict=True)
    )
    assert plan.concurrency >= 1
    grows = cache_bytes(specs, demand, plan.num_blocks + 1) > plan.used_bytes
    assert not grows or cache_bytes(specs, demand, plan.num_blocks + 1) > budget, "one more block would have fitted"
    assert plan.binding in {spec.name for spec in specs}
    for group, spec in zip(plan.groups, specs, strict=True):
        if spec.kind is CacheKind.RECURRENT:
            assert group.num_units - 1 >= 2 * sequences, "a sequence needs its running slot and the one being written"
        if spec.open:
            assert group.num_open == sequences + 1


def test_a_full_budget_serves_all_sequences_at_full_length() -> None:
    specs = cache_table()
    demand = CacheDemand(8, 2_000, 256)
    plan = plan_cache(specs, demand, full_budget(specs, demand))
    assert plan.concurrency >= 8
    less = plan_cache(specs, demand, full_budget(specs, demand) // 2)
    assert 1 <= less.concurrency < 8
    assert less.binding in ("full", "latent", "indexer")


def test_too_small_a_budget_is_refused_with_the_numbers() -> None:
    specs = cache_table()
    demand = CacheDemand(4, 10_000, 512)
    with pytest.raises(RefusalError, match=r"MiB for 4 sequences of which one reaches 10000 tokens.*budget is"):
        plan_cache(specs, demand, minimum_budget(specs, demand) - 1)
    assert plan_cache(specs, demand, minimum_budget(specs, demand)).num_blocks == demand.blocks_per_sequence


def test_storage_takes_exactly_the_planned_bytes() -> None:
    specs = cache_table()
    plan = plan_cache(specs, CacheDemand(3, 700, 128), 3_000_000)
    storage = CacheStorage(specs, plan, torch.device("cpu"))
    assert storage.num_bytes == plan.used_bytes
    full, window, shared, recurrent = storage.layers
    assert full.attention is not None and full.attention.k.shape[0] == plan.groups[0].num_units
    assert window.attention is not None and window.attention.group == 1
    assert shared.latent is not None and shared.indexer is not None and shared.indexer.raw.shape[0] == 4
    assert recurrent.recurrent is not None and recurrent.recurrent.state.shape[0] == plan.groups[4].num_units
    storage.layers[0].attention.k.fill_(7)  # type: ignore[union-attr]
    storage.clear(0, [2], [])
    assert full.attention.k[2].eq(0).all() and full.attention.k[3].eq(7).all()


def test_tables_that_contradict_the_storage_classes_are_refused() -> None:
    buffer = BufferSpec("keys", (64, 1), torch.float32)
    wrong = (CacheSpec("a", CacheKind.ATTENTION, (0,), page=(buffer,)),)
    plan = plan_cache(wrong, CacheDemand(1, 64, 64), 1 << 20)
    with pytest.raises(ValueError, match="names the buffers"):
        CacheStorage(wrong, plan, torch.device("cpu"))
    k, v = BufferSpec("k", (1, 64, 1), torch.float32), BufferSpec("v", (1, 64, 1), torch.float32)
    twice = tuple(CacheSpec(name, CacheKind.ATTENTION, (0,), page=(k, v)) for name in "ab")
    with pytest.raises(ValueError, match="two attention caches"):
        CacheStorage(twice, plan_cache(twice, CacheDemand(1, 64, 64), 1 << 20), torch.device("cpu"))
