"""Prompt lookup drafts what stood there before; drafting changes no token and stops where it does not pay."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tiny_hybrids
import tiny_models

from slimserve.engine.config import CacheConfig, DrafterKind, EngineConfig, SchedulerConfig, SpeculationConfig
from slimserve.engine.loop import Engine
from slimserve.engine.request import FinishReason, Request, SamplingParams
from slimserve.engine.speculate import PromptLookup, SpeculationControl
from slimserve.errors import UsageError
from slimserve.weights.loader import LoadedModel, load_model


def propose(drafter: PromptLookup, request: Request, limit: int = 8) -> tuple[int, ...]:
    return drafter.propose([request], [limit])[0]


def request_of(prompt: list[int], output: list[int], name: str = "r") -> Request:
    request = Request(name, prompt, SamplingParams(), 100)
    request.output_token_ids.extend(output)
    return request


def test_it_proposes_what_followed_the_same_tokens() -> None:
    drafter = PromptLookup(8)
    request = request_of([1, 2, 3, 4, 5, 6, 7, 8, 9], [2, 3])
    assert propose(drafter, request) == (4, 5, 6)
    request.output_token_ids += [4, 5, 6, 7]
    assert propose(drafter, request) == (8, 9, 2, 3, 4, 5)[:6], "a draft that held makes the next one longer"
    request.output_token_ids += [77]
    assert propose(drafter, request) == (), "nothing like this was seen"
    request.output_token_ids += [5, 6]
    assert propose(drafter, request, limit=2) == (7, 77), "the newest place, and no more than the request's limit"


def test_the_longest_run_decides_and_the_newest_place_wins() -> None:
    drafter = PromptLookup(1)
    assert propose(drafter, request_of([1, 2, 3, 4, 50, 9, 3, 4, 60, 9], [1, 2, 3, 4])) == (50,)
    assert propose(PromptLookup(1), request_of([3, 4, 50, 9, 3, 4, 60, 9], [3, 4])) == (60,)


def test_a_place_is_kept_while_it_is_right() -> None:
    """The newest place with the same last tokens is another one; what followed the old one goes on coming true."""
    old, new = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 5, 6, 30, 31], [40, 41, 5, 6, 50, 51]
    request = request_of([*old, *new], [1, 2])
    drafter = PromptLookup(3)
    assert propose(drafter, request) == (3, 4, 5)
    request.output_token_ids += [3, 4, 5, 6]
    assert propose(drafter, request) == (7, 8, 9)
    request.output_token_ids += [7, 77, 5, 6]
    assert propose(drafter, request)[0] == 7, "the newest of equal places, once the old one was wrong"


def test_a_text_that_repeats_itself_is_drafted_beyond_its_end() -> None:
    drafter = PromptLookup(7)
    request = request_of([1, 2, 3, 9, 9], [9])
    assert propose(drafter, request) == (9, 9, 9)
    request = request_of([5, 6, 7, 8, 6, 7], [8], "other")
    assert propose(drafter, request) == (6, 7, 8)


def test_long_texts_are_searched_without_an_index() -> None:
    rng = random.Random(5)
    prompt = [rng.randrange(50_000) for _ in range(20_000)]
    for place in (17, 9_000, 19_990):
        request = request_of(prompt, prompt[place : place + 6], f"at {place}")
        wanted = (prompt + request.output_token_ids)[place + 6 : place + 9]
        assert propose(PromptLookup(7), request) == tuple(wanted)
    assert propose(PromptLookup(7), request_of(prompt, [50_001, 50_002], "unknown")) == ()
    assert propose(PromptLookup(7), request_of([3], [], "short")) == ()


def test_wrong_drafts_shrink_and_pause() -> None:
    drafter = PromptLookup(8)
    rng = random.Random(1)
    request = request_of([1, 2] * 3, [])
    lengths = []
    for _ in range(40):
        request.output_token_ids += [rng.randrange(1000, 1 << 30), 1, 2]
        lengths.append(len(propose(drafter, request)))
    assert lengths[0] == 3 and lengths[1] == 1
    assert lengths.count(0) > 25, "a request whose drafts never hold is left alone most of the time"


def test_requests_do_not_see_each_other_and_are_forgotten() -> None:
    drafter = PromptLookup(4)
    one, two = request_of([1, 2, 3, 4, 5], [2, 3], "one"), request_of([7, 2, 3, 9, 9], [2, 3], "two")
    assert drafter.propose([one, two], [4, 4]) == [(4, 5, 2), (9, 9, 2)]
    drafter.release("one")
    drafter.release("unknown")
    other = request_of([5, 6, 7], [2, 3], "one")
    assert propose(drafter, other) == ()


class Clock:
    """A machine on which a step costs `plain` seconds, or `drafted` with drafts that bring `tokens` per row."""

    def __init__(self, control: SpeculationControl, rows: int, plain: float, drafted: float, tokens: float) -> None:
        self.control, self.rows, self.plain, self.drafted, self.tokens = control, rows, plain, drafted, tokens
        self.seconds = self.produced = 0.0

    def run(self, steps: int) -> float:
        """Share of steps that drafted."""
        count = 0
        for _ in range(steps):
            drafting = self.control.draft_length(self.rows) > 0
            count += drafting
            seconds = self.drafted if drafting else self.plain
            produced = self.rows * (self.tokens if drafting else 1.0)
            self.seconds += seconds
            self.produced += produced
            self.control.observe(self.rows, drafting, round(produced), seconds)
        return count / steps


def test_drafting_stays_on_where_it_pays_and_goes_off_where_it_does_not() -> None:
    pays = Clock(SpeculationControl(4), 8, plain=1.0, drafted=1.3, tokens=2.0)
    assert pays.run(1000) > 0.95
    loses = Clock(SpeculationControl(4), 8, plain=1.0, drafted=1.6, tokens=1.25)
    assert loses.run(4000) < 0.02
    assert loses.seconds / loses.produced < 1.03, "what drafting costs where it loses"


def test_it_comes_back_when_the_load_changes() -> None:
    clock = Clock(SpeculationControl(4), 2, plain=1.0, drafted=1.5, tokens=1.0)
    assert clock.run(500) < 0.05
    clock.tokens = 3.0
    clock.run(600)
    assert clock.run(200) > 0.9
    assert clock.control.gains()[2] > 1.5


def test_batch_sizes_are_judged_apart_and_the_schedule_bounds() -> None:
    control = SpeculationControl(4, ((1, 4, 3), (5, 8, 1), (9, 64, 0)), measured=False)
    assert [control.draft_length(rows) for rows in (1, 4, 5, 8, 9, 64, 65)] == [3, 3, 1, 1, 0, 0, 4]
    measured = SpeculationControl(4)
    Clock(measured, 32, plain=1.0, drafted=9.0, tokens=1.0).run(100)
    assert Clock(measured, 1, plain=1.0, drafted=1.1, tokens=2.0).run(100) > 0.9


def _qwen_hybrid(folder: Path) -> LoadedModel:
    oracle = tiny_hybrids.build_qwen()
    return load_model(tiny_hybrids.save_folder(oracle, tiny_hybrids.qwen_tensors(oracle), folder))


@pytest.fixture(scope="module", params=["qwen2", "gemma3", "qwen3_5"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model")
    if request.param == "qwen3_5":
        return _qwen_hybrid(folder)
    return load_model(tiny_models.save_folder(tiny_models.build(request.param), folder))


def replies(
    loaded: LoadedModel, drafter: DrafterKind, num_requests: int, *, speculate: bool = True
) -> tuple[dict, Engine]:
    """Tokens, log probabilities and ends of prompts that repeat themselves, greedy and seeded."""
    config = EngineConfig(
        cache=CacheConfig(),
        scheduler=SchedulerConfig(max_sequences=16, max_context=256, token_budget=128, mixed_prefill_budget=64),
        speculation=SpeculationConfig(drafter=drafter, max_draft=6, measured=False),
        numerics=loaded.numerics,
    )
    engine = Engine(loaded.model, config)
    rng = random.Random(3)
    for i in range(num_requests):
        piece = [rng.randrange(1, 120) for _ in range(rng.choice((3, 9, 17)))]
        sampling = SamplingParams(
            temperature=0.0 if i % 2 else 1.0,
            top_p=0.95,
            top_k=20,
            seed=i,
            logprobs=2,
            repetition_penalty=1.1 if i % 3 == 0 else 1.0,
        )
        prompt = (piece * 12)[: rng.choice((20, 64, 100))]
        stops = frozenset({rng.randrange(1, 120)})
        engine.submit(Request(f"r{i}", prompt, sampling, 60, stop_token_ids=stops, speculate=speculate))
    found: dict[str, tuple[list[int], list[object], list[FinishReason | None]]] = {}
    while engine.has_work:
        for output in engine.step():
            tokens, logprobs, ends = found.setdefault(output.request_id, ([], [], []))
            tokens += output.token_ids
            logprobs += output.logprobs
            ends += [output.finish_reason] * (output.finish_reason is not None)
        engine.audit()
    return found, engine


@pytest.mark.parametrize("num_requests", [1, 32])
def test_on_equals_off_bit_for_bit(loaded: LoadedModel, num_requests: int) -> None:
    plain, _ = replies(loaded, DrafterKind.NONE, num_requests)
    drafted, engine = replies(loaded, DrafterKind.LOOKUP, num_requests)
    assert drafted == plain
    assert all(len(ends) == 1 for _, _, ends in drafted.values())
    if num_requests > 1:
        stats = engine.read_stats()
        assert stats.num_drafted > 0
        # The random hybrid's replies do not repeat themselves: there the drafts prove that wrong ones do no harm.
        assert stats.num_accepted > 0 or loaded.model.config.architecture == "qwen3_5"
        assert not engine.scheduler._drafting._drafter._histories, "ended requests are kept"  # type: ignore[union-attr]


def test_a_request_may_opt_out(loaded: LoadedModel) -> None:
    _, engine = replies(loaded, DrafterKind.LOOKUP, 4, speculate=False)
    assert engine.read_stats().num_drafted == 0


@pytest.mark.parametrize("max_draft", [0, 16])
def test_draft_lengths_out_of_range_are_refused(loaded: LoadedModel, max_draft: int) -> None:
    config = EngineConfig(
        scheduler=SchedulerConfig(max_context=128), speculation=SpeculationConfig(max_draft=max_draft)
    )
    with pytest.raises(UsageError, match=r"it must be 1 \.\. 15"):
        Engine(loaded.model, config)
