"""Random histories: every token right, every request ended once, every page owned as the books say, at every step."""

from __future__ import annotations

import random

import pytest
import torch
from fake_model import VOCAB, FakeModel
from history import House
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from slimserve.models.contract import CacheKind

A, W, L, X, R = CacheKind.ATTENTION, CacheKind.WINDOW, CacheKind.LATENT, CacheKind.INDEXER, CacheKind.RECURRENT

# Pools hold one longest request and little more, so that most steps evict and many preempt.
HOUSES: dict[str, dict] = {
    "all kinds": {"pages": 14, "slots": 5},
    "few slots": {"pages": 11, "slots": 3, "token_budget": 64, "mixed_prefill_budget": 32},
    "small steps": {"pages": 12, "slots": 14, "token_budget": 16, "mixed_prefill_budget": 16},
    "whole prompts": {"pages": 30, "slots": 8, "token_budget": 1000, "mixed_prefill_budget": 1000, "spacing": 64},
    "no prefix cache": {"pages": 16, "slots": 4, "prefix_caching": False},
    "no drafts": {"pages": 16, "slots": 12, "right_drafts": None},
    "drafts right": {"pages": 14, "slots": 6, "right_drafts": 1.0},
    "drafts wrong": {"pages": 14, "slots": 6, "right_drafts": 0.0},
    "full": {"pages": 14, "kinds": (A,)},
    "window": {"pages": 14, "kinds": (W,)},
    "recurrent": {"slots": 6, "kinds": (R,)},
    "full and window": {"pages": 14, "kinds": (A, W)},
    "latent, indexer, recurrent": {"pages": 14, "slots": 6, "kinds": (L, X, R)},
    "roomy": {"pages": 60, "slots": 30},
    "all kinds, padded": {"pages": 14, "slots": 5, "padded": True},
    "no drafts, padded": {"pages": 16, "slots": 12, "right_drafts": None, "padded": True},
}
STEPS_PER_HOUSE = 1_300  # 16 houses: more than 20,000 steps in all


@pytest.mark.parametrize("name", HOUSES)
def test_no_leak_and_no_wrong_token_in_long_histories(name: str) -> None:
    house = House(seed=sum(name.encode()), **HOUSES[name])
    # Steps that are replayed, and rows that only fill them, are a part of a padded house's: it lives twice as long.
    while house.num_steps < STEPS_PER_HOUSE * (2 if "padded" in name else 1):
        choice = house.rng.random()
        if choice < 0.25:
            house.submit()
        elif choice < 0.27:
            house.abort()
        elif choice < 0.275:
            house.fault()
        else:
            house.step(abort_in_flight=house.rng.random() < 0.02)
        house.audit()
    house.drain()
    house.check_nothing_held()
    assert (house.forward.num_replays > 100 and house.model.num_null_rows > 10) == ("padded" in name)
    assert house.num_ended == house.num_submitted > 100
    if name not in ("roomy", "whole prompts"):
        assert house.scheduler.counters.num_preemptions > 0
    if name != "no prefix cache":
        assert house.scheduler.counters.prefix_hit_tokens > 0
    if house.drafter is not None and name != "drafts wrong":
        assert house.scheduler.counters.accepted_tokens > 0


class Histories(RuleBasedStateMachine):
    """The same, with histories that shrink to a short story when they fail."""

    def __init__(self) -> None:
        super().__init__()
        self.house = House(0, pages=12, slots=5, max_sequences=4, token_budget=80, mixed_prefill_budget=64)

    @rule(seed=st.integers(0, 2**16))
    def submit(self, seed: int) -> None:
        self.house.rng.seed(seed)
        self.house.submit()

    @rule(seed=st.integers(0, 2**16))
    def abort(self, seed: int) -> None:
        self.house.rng.seed(seed)
        self.house.abort()

    @rule(seed=st.integers(0, 2**16), in_flight=st.booleans())
    def step(self, seed: int, in_flight: bool) -> None:
        self.house.rng.seed(seed)
        self.house.step(abort_in_flight=in_flight)

    @rule(count=st.integers(1, 30))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.house.step()
            self.house.audit()

    @rule(seed=st.integers(0, 2**16))
    def fault(self, seed: int) -> None:
        self.house.rng.seed(seed)
        self.house.fault()

    @rule()
    def clear_index(self) -> None:
        self.house.cache.clear_index()

    @invariant()
    def owned(self) -> None:
        self.house.audit()

    def teardown(self) -> None:
        self.house.drain()
        self.house.check_nothing_held()
        assert self.house.num_ended == self.house.num_submitted


Histories.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)
TestHistories = Histories.TestCase


@pytest.mark.parametrize("kind", [A, W, L, X, R])
def test_the_histories_notice_a_wrong_cache(kind: CacheKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """One spoiled entry of any kind of cache, in one step, must show: otherwise the histories prove nothing."""
    house = House(1, pages=60, slots=30, right_drafts=None)
    write = FakeModel._write
    spoiled = []

    def spoil(self: FakeModel, step, caches, r, first, start, own, opened) -> None:  # type: ignore[no-untyped-def]
        write(self, step, caches, r, first, start, own, opened)
        if start >= 64 and own.size == 1 and not spoiled:
            spoiled.append(start)
            storage, group = self._storage(step, caches, kind)
            if kind is R:
                storage.state[int(group.state_in[r])] += 1
            elif kind is X:
                storage.keys[int(group.block_table[r, 0]), 3] += 1
            else:
                page = int(group.block_table[r, (start - 20) // 64])
                (storage.latent if kind is L else storage.k)[page] += 1

    monkeypatch.setattr(FakeModel, "_write", spoil)
    house.rng = random.Random(3)
    with pytest.raises(AssertionError):
        for _ in range(20):
            house.submit()
            for _ in range(20):
                house.step()
    assert spoiled


def test_the_fake_model_is_a_function_of_tokens_alone() -> None:
    model = FakeModel()
    logits = model.logits(torch.tensor([[3.0], [VOCAB - 1.0]]))
    assert logits.argmax(dim=-1).tolist() == [3, VOCAB - 1]
