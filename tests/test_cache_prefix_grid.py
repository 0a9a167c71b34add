"""What a prefix hit restores, counted exactly: prompts around block boundaries, shared beginnings, chats."""

from __future__ import annotations

import pytest
from fake_model import VOCAB, FakeModel, cache_table, continuation

from slimserve.cache.budget import CacheDemand, full_budget, minimum_budget
from slimserve.cache.prefix import CacheIdentity
from slimserve.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from slimserve.engine.loop import Engine
from slimserve.engine.request import Request, SamplingParams
from slimserve.engine.step import RequestOutput
from slimserve.models.contract import CacheKind

A, W, L, X, R = CacheKind.ATTENTION, CacheKind.WINDOW, CacheKind.LATENT, CacheKind.INDEXER, CacheKind.RECURRENT
TABLES = {
    "full": (A,),
    "full and window": (A, W),
    "window": (W,),
    "recurrent": (R,),
    "hybrid": (L, X, R),
    "all kinds": (A, W, L, X, R),
}


class Desk:
    """An engine that answers one request at a time and checks every token."""

    def __init__(
        self, kinds: tuple[CacheKind, ...], *, spacing: int = 256, scale: float | None = None, **limits: int
    ) -> None:
        self.kinds = kinds
        scheduler = SchedulerConfig(
            **{"max_sequences": 4, "max_context": 2048, "token_budget": 300, "mixed_prefill_budget": 128, **limits}
        )
        demand = CacheDemand(scheduler.max_sequences, scheduler.max_context, scheduler.token_budget, spacing)
        specs = cache_table(kinds)
        budget = full_budget(specs, demand) if scale is None else int(minimum_budget(specs, demand) * scale)
        self.engine = Engine(
            FakeModel(kinds),
            EngineConfig(
                num_threads=1, cache=CacheConfig(budget_bytes=budget, snapshot_spacing=spacing), scheduler=scheduler
            ),
            identity=CacheIdentity("fake", "1", "test"),
        )
        self.count = 0

    def ask(self, prompt: list[int], max_tokens: int = 2, salt: str = "") -> tuple[list[int], RequestOutput]:
        """Reply and last output of one request."""
        self.count += 1
        sampling = SamplingParams(temperature=0.0)
        self.engine.submit(Request(f"q{self.count}", prompt, sampling, max_tokens, ignore_eos=True, cache_salt=salt))
        reply: list[int] = []
        last = None
        while self.engine.has_work:
            for last in self.engine.step():
                assert last.error is None
                reply.extend(last.token_ids)
            self.engine.audit()
        assert last is not None and last.finish_reason is not None
        assert reply == continuation(prompt, max_tokens, self.kinds), "a hit changed the text"
        return reply, last


def words(count: int, seed: int) -> list[int]:
    return [(seed * 7919 + i * i * 31 + i * 17) % VOCAB for i in range(count)]


@pytest.mark.parametrize("name", TABLES)
def test_the_same_prompt_twice(name: str) -> None:
    desk = Desk(TABLES[name])
    for k in range(1, 7):
        for length in (64 * k - 1, 64 * k, 64 * k + 1):
            prompt = words(length, seed=length)
            assert desk.ask(prompt)[1].num_cached_tokens == 0
            output = desk.ask(prompt)[1]
            assert output.num_cached_tokens == (length - 1) // 64 * 64, f"length {length}"
            assert output.cache_cut_by is None


@pytest.mark.parametrize("name", TABLES)
def test_shared_beginnings_with_different_tails(name: str) -> None:
    """The first prompt to leave a shared beginning marks the place; from the next one on all of it is restored."""
    kinds = TABLES[name]
    desk = Desk(kinds)
    shared = words(600, seed=1)
    desk.ask(shared + words(150, seed=2))
    second = desk.ask(shared + words(150, seed=3))[1]
    keeps_all = A in kinds and W not in kinds and R not in kinds
    if R in kinds:
        assert second.num_cached_tokens == 512, "the state is kept every 256 tokens of a long prefill"
        assert second.cache_cut_by == "recurrent"
    else:
        assert second.num_cached_tokens == 576 and (second.cache_cut_by is None or not keeps_all)
    for seed in (4, 5, 6):
        output = desk.ask(shared + words(150, seed=seed))[1]
        assert output.num_cached_tokens == 576 and output.cache_cut_by is None


@pytest.mark.parametrize("name", TABLES)
def test_a_chat_of_ten_turns(name: str) -> None:
    desk = Desk(TABLES[name])
    history = words(130, seed=0)
    computed = 0
    for turn in range(10):
        prompt = history + words(37, seed=turn + 1)
        reply, output = desk.ask(prompt, max_tokens=41)
        assert output.num_cached_tokens == computed // 64 * 64, f"turn {turn}"
        history = prompt + reply
        computed = len(history) - 1  # the last token of a reply is never fed
    before = len(history) - 41 - 37
    output = desk.ask(history[:before] + words(50, seed=99))[1]
    assert output.num_cached_tokens == before // 64 * 64, "editing the last turn goes back to where it began"


def test_four_interleaved_chats() -> None:
    desk = Desk(TABLES["all kinds"])
    chats = [words(70 + 40 * i, seed=i) for i in range(4)]
    for turn in range(5):
        for i in range(4):
            prompt = chats[i] + words(29 + i, seed=10 * turn + i)
            reply, output = desk.ask(prompt, max_tokens=33)
            assert output.num_cached_tokens == (0 if turn == 0 else (len(chats[i]) - 1) // 64 * 64)
            chats[i] = prompt + reply


@pytest.mark.parametrize("name", TABLES)
def test_eviction_in_between_never_changes_text(name: str) -> None:
    desk = Desk(TABLES[name], scale=1.0, max_context=1024)
    popular = words(300, seed=0)
    for i in range(24):
        desk.ask(popular, max_tokens=30)
        output = desk.ask(words(150 + 37 * (i % 8), seed=1 + i), max_tokens=30)[1]
        assert output.num_cached_tokens == 0
    assert any(usage.num_evictions for usage in desk.engine.cache.usage())
    assert desk.engine.scheduler.counters.prefix_hit_tokens >= 20 * 256, "what is asked again and again stays"


def test_salts_and_identities_do_not_share() -> None:
    desk = Desk(TABLES["all kinds"])
    prompt = words(300, seed=1)
    desk.ask(prompt, salt="a")
    assert desk.ask(prompt, salt="b")[1].num_cached_tokens == 0
    assert desk.ask(prompt)[1].num_cached_tokens == 0
    assert desk.ask(prompt, salt="a")[1].num_cached_tokens == 256


def test_equal_prompts_at_the_same_time_end_with_one_copy() -> None:
    desk = Desk((A, W))
    prompt = words(256, seed=3)
    for i in range(4):
        desk.engine.submit(Request(f"same{i}", prompt, SamplingParams(temperature=0.0), 5, ignore_eos=True))
    desk.engine.submit(Request("other", words(70, seed=8), SamplingParams(temperature=0.0), 5, ignore_eos=True))
    cached = {}
    first = {output.request_id for output in desk.engine.step()}
    assert first == {"same0"} or "other" in first, "requests with another prompt need not wait"
    while desk.engine.has_work:
        for output in desk.engine.step():
            cached[output.request_id] = output.num_cached_tokens
        desk.engine.audit()
    assert cached == {"same0": 0, "same1": 192, "same2": 192, "same3": 192, "other": 0}, "computed more than once"
    desk.engine.cache.clear_index()
    assert all(usage.num_held == 0 for usage in desk.engine.cache.usage())


def test_a_block_computed_twice_is_kept_once() -> None:
    """Two requests with one prompt prefill side by side: one was preempted and came back in the middle."""
    desk = Desk((A, W), token_budget=64)
    prompt = words(256, seed=3)
    cache = desk.engine.cache
    admissions = [cache.admit(cache.prompt(prompt)) for _ in range(2)]
    for end in (64, 128, 192, 256):
        for admission in admissions:
            assert admission is not None and cache.reserve(admission[0], end)
        for admission in admissions:
            assert admission is not None
            cache.commit(admission[0], prompt[end - 64 : end])
            cache.audit()
    for admission in admissions:
        assert admission is not None
        cache.release(admission[0])
    stored = {usage.name: usage.num_stored for usage in desk.engine.cache.usage()}
    assert stored["full"] == 4, "every block is kept once, whoever computed it"


def test_without_prefix_caching_nothing_is_kept() -> None:
    config = EngineConfig(
        num_threads=1,
        cache=CacheConfig(budget_bytes=4_000_000, prefix_caching=False),
        scheduler=SchedulerConfig(max_sequences=2, max_context=512),
    )
    engine = Engine(FakeModel(), config)
    for i in range(2):
        engine.submit(Request(f"r{i}", words(200, 1), SamplingParams(temperature=0.0), 3, ignore_eos=True))
        while engine.has_work:
            for output in engine.step():
                assert output.num_cached_tokens == 0
    assert all(usage.num_stored == 0 and usage.num_held == 0 for usage in engine.cache.usage())
    assert engine.info().min_reusable_prefix == 0
