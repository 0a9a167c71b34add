"""A smaller model drafts: its own caches, its own limits, and no word of a reply changed."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import reference_outputs
from speculation_rig import make_engine, mixed_requests, said, serve

from slimserve.engine.build import check_vocabularies
from slimserve.engine.config import DrafterKind
from slimserve.engine.loop import Engine
from slimserve.engine.request import Request, SamplingParams
from slimserve.engine.speculate.model_drafter import MOST_READ, ModelDrafter
from slimserve.errors import RefusalError, UsageError
from slimserve.weights.loader import LoadedModel, load_model
from slimserve.weights.source import open_source

tiny_models = pytest.importorskip("tiny_models", reason="needs transformers")
MODEL = DrafterKind.MODEL


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(tiny_models.save_folder(tiny_models.build("qwen2"), tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module", params=["itself", "gemma3", "mistral-sliding"])
def companion(request: pytest.FixtureRequest, target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The target itself (every draft holds) and models that think otherwise, with sliding windows."""
    if request.param == "itself":
        return target.model
    folder = tmp_path_factory.mktemp("companion")
    return load_model(tiny_models.save_folder(tiny_models.build(request.param), folder)).model


def drafter_of(engine: Engine) -> ModelDrafter:
    assert isinstance(engine.drafter, ModelDrafter)
    return engine.drafter


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_on_equals_off(target: LoadedModel, companion: Any, prefix_caching: bool) -> None:
    requests = [r for r in mixed_requests(24, 131) if len(r.prompt_token_ids) + r.max_tokens <= 256]
    plain = serve(make_engine(target, prefix_caching=prefix_caching, max_context=256), requests)
    engine = make_engine(
        target, MODEL, companion=companion, prefix_caching=prefix_caching, max_context=256, max_draft=5
    )
    for _ in range(2):
        assert said(serve(engine, requests)) == said(plain)
    assert len(drafter_of(engine)) == 0 and all(usage.num_held == 0 for usage in drafter_of(engine).cache.usage())
    counters = engine.scheduler.counters
    assert counters.drafted_tokens > 0
    if companion is target.model:
        # Penalties see drafts only once they are tokens, so drafts of such requests may differ from their draws.
        assert counters.accepted_tokens > 0.8 * counters.drafted_tokens


def test_a_drafter_that_is_the_target_is_always_right(target: LoadedModel) -> None:
    rng = random.Random(1)
    requests = [
        Request(f"r{i}", [rng.randrange(1, 131) for _ in range(5 + 20 * i)],
                SamplingParams(temperature=float(i % 2), top_k=9, top_p=0.9, seed=i), 40, ignore_eos=True)
        for i in range(6)
    ]  # fmt: skip
    engine = make_engine(target, MODEL, companion=target.model, max_context=256, max_draft=5)
    serve(engine, requests)
    counters = engine.scheduler.counters
    assert counters.accepted_tokens == counters.drafted_tokens > 100


def test_drafts_that_held_are_not_computed_again(target: LoadedModel) -> None:
    engine = make_engine(target, MODEL, companion=target.model, max_context=256, max_draft=5, max_sequences=1)
    drafter, read = drafter_of(engine), []
    original = drafter._read

    def counting(rows: Any) -> Any:
        read.append(sum(len(row.token_ids) for row in rows))
        return original(rows)

    drafter._read = counting  # type: ignore[method-assign]
    serve(engine, [Request("r0", list(range(1, 70)), SamplingParams(temperature=0.0), 31, ignore_eos=True)])
    assert read[0] == 70 and set(read[1:]) == {2}, "the last draft, which was not fed, and the token behind it"


def test_past_its_range_it_stops_for_that_request_alone(target: LoadedModel) -> None:
    short = load_model_with_context(target, 128)
    engine = make_engine(target, MODEL, companion=short, max_context=256, max_draft=4)
    rng = random.Random(2)
    prompts = {"long": 150, "grows": 90, "short": 20}
    requests = [
        Request(name, [rng.randrange(1, 131) for _ in range(n)], SamplingParams(temperature=0.0), 60, ignore_eos=True)
        for name, n in prompts.items()
    ]
    drafted: dict[str, int] = {}
    drafter = drafter_of(engine)
    propose = drafter.propose

    def watching(asked: Any, limits: Any) -> Any:
        found = propose(asked, limits)
        for request, proposal in zip(asked, found, strict=True):
            drafted[request.request_id] = drafted.get(request.request_id, 0) + len(proposal)
            assert not proposal or request.num_tokens + len(proposal) <= 128
        return found

    drafter.propose = watching  # type: ignore[method-assign]
    plain = serve(make_engine(target, max_context=256), requests)
    assert said(serve(engine, requests)) == said(plain)
    assert drafted["long"] == 0 < drafted["grows"] < drafted["short"]


def load_model_with_context(loaded: LoadedModel, max_context: int) -> Any:
    """The same model under a config of a shorter range."""
    import copy

    model = copy.copy(loaded.model)
    model.config = replace(loaded.model.config, max_context=max_context)
    return model


def test_long_prompts_are_read_in_pieces_while_replies_go_on(target: LoadedModel) -> None:
    """What the drafter reads in one step is bounded; a request that it does not know yet is decoded plainly."""
    model = load_model_with_context(target, 2048)
    loaded = replace(target, model=model, config=model.config)
    engine = make_engine(loaded, MODEL, companion=model, max_context=2048, max_draft=3, token_budget=1024)
    rng = random.Random(3)
    requests = [
        Request(
            f"r{i}", [rng.randrange(1, 131) for _ in range(n)], SamplingParams(temperature=0.0), 30, ignore_eos=True
        )
        for i, n in enumerate((900, 40))
    ]
    largest = 0
    drafter = drafter_of(engine)
    original = drafter._read

    def counting(rows: Any) -> Any:
        nonlocal largest
        largest = max(largest, sum(len(row.token_ids) for row in rows))
        return original(rows)

    drafter._read = counting  # type: ignore[method-assign]
    assert said(serve(engine, requests)) == said(serve(make_engine(loaded, max_context=2048), requests))
    assert MOST_READ <= largest <= MOST_READ + 32
    assert engine.scheduler.counters.accepted_tokens > 20


def test_without_memory_it_does_not_draft(target: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches for one longest request serve the drafter of many: who finds no room is decoded plainly."""
    from slimserve.cache.budget import minimum_budget
    from slimserve.engine.speculate import build

    monkeypatch.setattr(build, "full_budget", minimum_budget)
    requests = mixed_requests(16, 131)[:16]
    requests = [r for r in requests if len(r.prompt_token_ids) + r.max_tokens <= 256]
    engine = make_engine(target, MODEL, companion=target.model, max_context=256, max_draft=5)
    assert said(serve(engine, requests)) == said(serve(make_engine(target, max_context=256), requests))
    assert engine.scheduler.counters.accepted_tokens > 0


def test_tokens_that_only_the_target_knows_stop_one_request(target: LoadedModel, tmp_path: Path) -> None:
    """Tables of one vocabulary may be padded differently; a token behind the drafter's end must never be read there."""
    oracle = tiny_models.build("qwen2", vocab_size=120)
    companion = load_model(tiny_models.save_folder(oracle, tmp_path)).model
    rng = random.Random(4)
    prompts = {"usual": [rng.randrange(1, 120) for _ in range(70)], "strange": [*range(1, 60), 125, *range(60, 90)]}
    requests = [
        # The target itself draws tokens that the drafter does not know, too.
        Request(name, prompt, SamplingParams(temperature=1.0, seed=number), 60, ignore_eos=True)
        for number, (name, prompt) in enumerate(prompts.items())
    ]
    engine = make_engine(target, MODEL, companion=companion, max_context=256, max_draft=4)
    drafter, read = drafter_of(engine), []
    original = drafter._read

    def watching(rows: Any) -> Any:
        read.extend(token for row in rows for token in row.token_ids)
        return original(rows)

    drafter._read = watching  # type: ignore[method-assign]
    found = serve(engine, requests)
    assert said(found) == said(serve(make_engine(target, max_context=256), requests))
    assert max(token for reply in found.values() for token in reply.token_ids) >= 120 > max(read)
    assert engine.scheduler.counters.drafted_tokens > 0 and not drafter._strangers


def test_what_cannot_draft_is_refused(target: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="name its path"):
        make_engine(target, MODEL)
    with pytest.raises(UsageError, match="takes no model"):
        make_engine(target, DrafterKind.LOOKUP, companion=target.model)
    tiny_hybrids = pytest.importorskip("tiny_hybrids", reason="needs transformers")
    oracle = tiny_hybrids.build_qwen()
    hybrid = load_model(tiny_hybrids.save_folder(oracle, tiny_hybrids.qwen_tensors(oracle), tmp_path))
    with pytest.raises(RefusalError, match="has recurrent layers"):
        make_engine(target, MODEL, companion=hybrid.model)
    model: Any = load_model_with_context(target, 128)
    model.config = replace(model.config, vocab_size=5000)
    with pytest.raises(RefusalError, match="5000 tokens and the model 131"):
        make_engine(target, MODEL, companion=model)


def test_vocabularies_are_compared() -> None:
    one = open_source(reference_outputs.model_file("qwen25-coder-0.5b"))
    check_vocabularies(one, one)
    with pytest.raises(RefusalError, match="token 0 is"):
        check_vocabularies(one, open_source(reference_outputs.model_file("smollm2-135m")))
