"""Drafting as users meet it: a request's field, flags, a record's schedule, metrics, and what bench reads of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import tiny_models
from speculation_rig import ScriptedDrafter, make_engine, mixed_requests, said, serve

from slimserve.cli.opening import EngineFlags
from slimserve.engine.config import Acceptance, DrafterKind, EngineConfig, SchedulerConfig
from slimserve.engine.loop import Engine
from slimserve.engine.request import Request, SamplingParams
from slimserve.engine.speculate import planner
from slimserve.errors import UsageError
from slimserve.hardware import Hardware
from slimserve.measure.engine_counts import EngineCounts, drafting_words, total_counts
from slimserve.profiles.resolve import resolve
from slimserve.serve.admission import submission
from slimserve.serve.metrics import Metrics
from slimserve.serve.protocol import CompletionBody, parse_body
from slimserve.weights.loader import LoadedModel, load_model

LAPTOP = Hardware("a processor", 4, frozenset({"avx2"}), 16 << 30, 12 << 30)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(tiny_models.save_folder(tiny_models.build("qwen2"), tmp_path_factory.mktemp("model")))


def complete(engine: Engine, count: int, **fields: Any) -> None:
    """Requests as the server's door makes them."""
    for i in range(count):
        body = parse_body(CompletionBody, {"prompt": [], "ignore_eos": True, **fields})
        prompt = [5 + i, 6, 7, 8] * 6
        greedy = SamplingParams(temperature=0.0, repetition_penalty=1.0)
        engine.submit(submission(body, prompt, engine.info(), greedy, 40).to_request(0.0))
    while engine.has_work:
        assert all(output.error is None for output in engine.step())


def test_a_request_opts_out(loaded: LoadedModel) -> None:
    engine = make_engine(loaded, DrafterKind.LOOKUP, max_context=256)
    complete(engine, 2, speculate=False)
    assert engine.read_stats().num_drafted == 0
    complete(engine, 1, speculate=True)
    complete(engine, 1)
    assert engine.read_stats().num_drafted > 0


class Failing(ScriptedDrafter):
    """Right for three proposals, then broken."""

    calls = 0

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[tuple[int, ...]]:
        self.calls += 1
        if self.calls > 3:
            raise RuntimeError("no memory left for drafts")
        return super().propose(requests, limits)


def test_a_drafter_that_fails_costs_its_drafts_and_nothing_else(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = mixed_requests(6, loaded.model.config.vocab_size)
    plain = serve(make_engine(loaded), requests)
    expected = {name: reply.token_ids for name, reply in plain.items()}
    drafter = Failing(expected, 1.0)
    told: list[str] = []
    monkeypatch.setattr(planner.logger, "exception", told.append)
    drafted = serve(make_engine(loaded, drafter=drafter), requests)
    assert said(drafted) == said(plain)
    assert drafter.calls == 4 and told == ["the drafter failed; nothing is drafted from here on"]


def test_metrics_tell_steps_and_acceptance_apart(loaded: LoadedModel) -> None:
    engine = make_engine(loaded, DrafterKind.MODEL, companion=loaded.model, max_context=256)
    metrics = Metrics()
    complete(engine, 3)
    before = EngineCounts.parse(metrics.render(engine.read_stats()).decode())
    complete(engine, 3)
    text = metrics.render(engine.read_stats()).decode()
    after, counters = EngineCounts.parse(text), engine.scheduler.counters
    assert before is not None and after is not None
    assert (after.drafter, after.drafted, after.accepted) == (
        "model", tuple(counters.drafted_at), tuple(counters.accepted_at),
    )  # fmt: skip
    assert 'slimserve_draft_length{drafter="model",rows="4"}' in text
    assert 'slimserve_draft_decisions_total{drafter="model",kind="switch"}' in text
    assert 'slimserve_draft_gain{drafter="model",rows="4"}' in text
    found = after.since(before)
    assert found.steps > 0 and found.decode_tokens == 3 * 39 and found.decode_rows < 3 * 39
    assert found.tokens_per_row is not None and found.tokens_per_row > 1.0
    assert found.acceptance is not None and 0 < found.acceptance <= 1
    words = drafting_words(found.as_json())
    assert f"{found.tokens_per_row:.2f} tokens per stream and step; model: {found.acceptance:.0%}" in words
    assert total_counts([before, found]) == after


def test_other_servers_have_no_such_counters() -> None:
    assert EngineCounts.parse("# HELP x y\nvllm:num_requests 3.0\n\n") is None
    plain = EngineCounts.parse("slimserve_steps_total 12.0\nslimserve_decode_rows_total 9.0\n")
    assert plain == EngineCounts(12, 9, 0) and plain.acceptance is None and plain.acceptance_by_position == []
    assert "no drafts" in drafting_words(plain.as_json())


def test_a_records_schedule_bounds_drafts_by_batch_size(loaded: LoadedModel) -> None:
    flags = {"drafter": "model", "draft_schedule": [[1, 1, 5], [2, 3, 2], [4, 64, 0]]}
    speculation = resolve("smollm2-135m", hardware=LAPTOP, flags=flags).engine_config().speculation
    assert speculation.max_draft == 5
    speculation = dataclasses.replace(speculation, measured=False)
    config = EngineConfig(
        scheduler=SchedulerConfig(max_sequences=8, max_context=256, token_budget=256),
        speculation=speculation,
        numerics=loaded.numerics,
    )
    for count, longest in ((1, 5), (3, 2), (8, 0)):
        engine = Engine(loaded.model, config, companion=loaded.model)
        complete(engine, count)
        drafted_at = engine.scheduler.counters.drafted_at
        # Requests of one length end together, so the batch size is `count` from the first decoded token to the last.
        assert len(drafted_at) == longest, f"{count} requests"


def test_no_spec_and_the_drafters_model_on_the_command_line() -> None:
    def speculation(**flags: Any) -> Any:
        given = EngineFlags(**flags)
        resolved = resolve("smollm2-135m", hardware=LAPTOP, flags=given.settings())
        return given.speculation(resolved.engine_config().speculation)

    assert speculation(drafter="lookup", drafts=3).max_draft == 3
    assert speculation(drafter="lookup", speculate=False).drafter is DrafterKind.NONE
    assert speculation(drafter="model", draft_model="x", speculate=False).drafter is DrafterKind.NONE
    assert speculation(drafter="model", draft_model="x").model_path == "x"
    assert speculation(drafter="lookup").acceptance is Acceptance.EXACT
    assert speculation(drafter="lookup", draft_acceptance="rejection").acceptance is Acceptance.REJECTION
    with pytest.raises(UsageError, match="choose from exact, rejection"):
        speculation(drafter="lookup", draft_acceptance="typical")
    with pytest.raises(UsageError, match="--draft-model"):
        speculation(drafter="model")
    with pytest.raises(UsageError, match="without --drafter"):
        speculation(drafter="lookup", draft_model="x")
