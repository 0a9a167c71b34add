"""The engine as its callers see it: outputs, errors that stay with their request, prompt log probabilities, health."""

from __future__ import annotations

import math

import pytest
import torch
from fake_model import VOCAB, FakeModel, cache_table, continuation

from slimserve.cache.budget import CacheDemand, full_budget, plan_cache
from slimserve.cache.manager import CacheManager
from slimserve.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from slimserve.engine.inputs import InputBuffers
from slimserve.engine.loop import Engine
from slimserve.engine.request import FinishReason, Request, SamplingParams
from slimserve.engine.step import RequestOutput, Row, StepPlan
from slimserve.errors import RefusalError, RequestError, RunError
from slimserve.measure.overhead import measure_overhead

GREEDY = SamplingParams(temperature=0.0)


def make_engine(end_token_ids: frozenset[int] = frozenset(), **limits: int) -> tuple[Engine, FakeModel]:
    scheduler = SchedulerConfig(**{"max_sequences": 4, "max_context": 1024, "token_budget": 128, **limits})
    demand = CacheDemand(scheduler.max_sequences, scheduler.max_context, scheduler.token_budget)
    model = FakeModel()
    config = EngineConfig(
        num_threads=1, cache=CacheConfig(budget_bytes=full_budget(cache_table(), demand)), scheduler=scheduler
    )
    return Engine(model, config, end_token_ids=end_token_ids), model


def run(engine: Engine) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.audit()
    for parts in outputs.values():
        assert [part.finish_reason is not None for part in parts] == [False] * (len(parts) - 1) + [True]
    return outputs


def text(parts: list[RequestOutput]) -> list[int]:
    return [token for part in parts for token in part.token_ids]


def test_requests_of_all_lengths_together() -> None:
    engine, _ = make_engine()
    prompts = {f"r{n}": [(n * 31 + i) % VOCAB for i in range(n)] for n in (1, 2, 63, 64, 65, 200, 500)}
    for name, prompt in prompts.items():
        engine.submit(Request(name, prompt, GREEDY, 20))
    outputs = run(engine)
    for name, prompt in prompts.items():
        assert text(outputs[name]) == continuation(prompt, 20)
        assert all(part.num_prompt_tokens == len(prompt) for part in outputs[name])
        assert outputs[name][-1].finish_reason is FinishReason.LENGTH


def test_prompt_log_probabilities_cover_the_prompt_once() -> None:
    engine, model = make_engine()
    prompt = [(7 * i * i + 3) % VOCAB for i in range(150)]
    params = SamplingParams(temperature=0.0, prompt_logprobs=True, logprobs=2)
    engine.submit(Request("warm", prompt, GREEDY, 1))
    engine.submit(Request("echo", prompt, params, 0))
    engine.submit(Request("both", prompt, params, 3))
    outputs = run(engine)
    for name, count in (("echo", 0), ("both", 3)):
        scored = [logprob for part in outputs[name] for logprob in part.prompt_logprobs]
        assert len(scored) == len(prompt) - 1
        for position, entry in enumerate(scored):
            raw = model.logits(torch.tensor([[float(continuation(prompt[: position + 1], 1)[0])]])).log_softmax(-1)[0]
            assert math.isclose(entry.logprob, float(raw[prompt[position + 1]]), abs_tol=1e-4)
            assert [token for token, _ in entry.top] == raw.topk(2).indices.tolist()
        assert text(outputs[name]) == continuation(prompt, count)
        assert sum(len(part.logprobs) for part in outputs[name]) == count
        assert outputs[name][-1].num_cached_tokens == 0, "scored prompts are computed whole"


def test_a_step_scores_few_prompt_tokens_whoever_asks() -> None:
    engine, _ = make_engine()
    params = SamplingParams(temperature=0.0, prompt_logprobs=True, logprobs=1)
    prompts = {f"r{n}": [(n * 13 + i) % VOCAB for i in range(n)] for n in (300, 130, 1, 65, 40, 128)}
    for name, prompt in prompts.items():
        engine.submit(Request(name, prompt, params, 4))
    engine.submit(Request("plain", list(range(100)), GREEDY, 20))
    most, plan = 0, engine.scheduler.plan

    def watched() -> StepPlan:
        nonlocal most
        made = plan()
        most = max(most, sum(row.num_scored for row in made.rows))
        return made

    engine.scheduler.plan = watched  # type: ignore[method-assign]
    outputs = run(engine)
    assert 0 < most <= 64
    for name, prompt in prompts.items():
        assert sum(len(part.prompt_logprobs) for part in outputs[name]) == len(prompt) - 1
        assert text(outputs[name]) == continuation(prompt, 4)
    assert text(outputs["plain"]) == continuation(list(range(100)), 20)


@pytest.mark.parametrize("poison", ["nan", "raise"])
def test_a_bad_row_ends_alone_and_is_not_remembered(poison: str) -> None:
    """A row that is not finite ends alone; a step that raises ends the requests of that step. Both leave no trace."""
    engine, model = make_engine()
    bad, good = [200, *list(range(100))], [1, *list(range(100))]
    model.fail_on[200] = poison
    engine.submit(Request("good", good, GREEDY, 30))
    first = engine.step()
    engine.submit(Request("bad", bad, GREEDY, 30))
    outputs = run(engine)
    assert outputs["bad"][-1].finish_reason is FinishReason.ERROR and outputs["bad"][-1].error
    if poison == "nan":
        assert "not finite" in outputs["bad"][-1].error
        assert text(first + outputs["good"]) == continuation(good, 30), "a neighbour was hurt"
    else:
        assert "RuntimeError" in outputs["bad"][-1].error
    assert engine.healthy
    model.fail_on.clear()
    for name, prompt in (("bad again", bad), ("good again", good)):
        engine.submit(Request(name, prompt, GREEDY, 30))
    outputs = run(engine)
    assert text(outputs["bad again"]) == continuation(bad, 30)
    assert text(outputs["good again"]) == continuation(good, 30)
    assert outputs["bad again"][-1].num_cached_tokens == 0, "blocks of a bad row were kept"


def test_nan_in_a_later_chunk_withdraws_the_blocks_of_the_earlier_ones() -> None:
    engine, model = make_engine()
    prompt = [i % 190 for i in range(400)]
    prompt[390] = 200
    model.fail_on[200] = "nan"
    engine.submit(Request("bad", prompt, GREEDY, 5))
    assert run(engine)["bad"][-1].finish_reason is FinishReason.ERROR
    usage = {group.name: group for group in engine.cache.usage()}
    assert all(group.num_stored == 0 and group.num_held == 0 for group in usage.values())
    storage = engine.cache.storage
    assert storage is not None and storage.layers[2].latent is not None
    assert not storage.layers[2].latent.latent.any(), "pages of a bad row were left unwiped"


def test_steps_that_always_fail_end_the_engine() -> None:
    engine, model = make_engine()
    model.fail_on = dict.fromkeys(range(VOCAB), "raise")
    for i in range(20):
        try:
            engine.submit(Request(f"r{i}", [3, 4], GREEDY, 5))
        except RequestError as error:
            assert error.status == 503 and "RuntimeError" in str(error)
            break
        assert [output.finish_reason for output in engine.step()] == [FinishReason.ERROR]
    assert not engine.healthy and engine.has_work
    with pytest.raises(RunError, match="a step failed"):
        engine.step()


def test_a_fault_in_the_books_ends_everything_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make_engine()
    for i in range(6):
        engine.submit(Request(f"r{i}", [3, 4, i], GREEDY, 50))
    engine.step()

    def broken(*_: object) -> None:
        raise AssertionError("the books are wrong")

    monkeypatch.setattr(engine.cache, "commit", broken)
    ended = engine.step()
    assert sorted(output.request_id for output in ended) == [f"r{i}" for i in range(6)]
    assert all(output.finish_reason is FinishReason.ERROR for output in ended)
    assert not engine.healthy
    with pytest.raises(RunError):
        engine.step()


def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    engine, _ = make_engine()
    for bad in (-1, VOCAB):
        with pytest.raises(RequestError, match=f"outside 0 .. {VOCAB - 1}"):
            engine.submit(Request("x", [1, bad], GREEDY, 5))


def test_an_end_token_of_the_model_ends_unless_ignored() -> None:
    prompt = [5, 6, 7]
    reply = continuation(prompt, 12)
    end = next(token for i, token in enumerate(reply) if token not in reply[:i] and i >= 3)
    engine, _ = make_engine(end_token_ids=frozenset({end}))
    engine.submit(Request("stops", prompt, GREEDY, 12))
    engine.submit(Request("ignores", prompt, GREEDY, 12, ignore_eos=True))
    engine.submit(Request("waits", prompt, SamplingParams(temperature=0.0, min_tokens=12), 12))
    outputs = run(engine)
    assert text(outputs["stops"]) == reply[: reply.index(end) + 1]
    assert outputs["stops"][-1].finish_reason is FinishReason.STOP
    assert text(outputs["ignores"]) == reply
    assert end not in text(outputs["waits"]) and len(text(outputs["waits"])) == 12


def test_sampled_replies_depend_on_seed_and_position_alone() -> None:
    params = SamplingParams(temperature=2.0, seed=11, top_k=20)
    prompt = list(range(90))
    replies = []
    for company in (0, 3):
        engine, _ = make_engine()
        for i in range(company):
            engine.submit(Request(f"other{i}", [i] * 70, SamplingParams(seed=i), 40))
        engine.submit(Request("own", prompt, params, 40))
        replies.append(text(run(engine)["own"]))
    assert replies[0] == replies[1]
    engine, _ = make_engine()
    engine.submit(Request("other seed", prompt, SamplingParams(temperature=2.0, seed=12, top_k=20), 40))
    assert text(run(engine)["other seed"]) != replies[0]


def test_penalties_survive_preemption_of_the_counts() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.4)
    prompt = list(range(40))
    alone, _ = make_engine()
    alone.submit(Request("p", prompt, params, 120))
    expected = text(run(alone)["p"])
    assert len(set(expected)) > 60
    crowded, _ = make_engine()
    request = Request("p", prompt, params, 120)
    crowded.submit(request)
    for step in range(400):
        if step in (20, 60, 61):
            job = crowded.scheduler._jobs["p"]
            crowded.scheduler._preempt(job, {})
        if not crowded.has_work:
            break
        crowded.step()
    assert request.num_preemptions == 3 and request.output_token_ids == expected


def test_statistics_add_up() -> None:
    engine, _ = make_engine()
    prompt = list(range(200))
    for i in range(3):
        engine.submit(Request(f"r{i}", prompt, GREEDY, 10))
        run(engine)
    engine.submit(Request("running", [1, 2], GREEDY, 100))
    engine.step()
    stats = engine.read_stats()
    assert stats.num_running == 1 and stats.num_waiting == 0
    assert stats.prefix_query_tokens == 602 and stats.prefix_hit_tokens == 2 * 192
    assert 0 < stats.cache_used < stats.cache_total
    assert stats.num_steps > 30
    ended = engine.close()
    assert [output.finish_reason for output in ended] == [FinishReason.ABORT] and engine.close() == []
    info = engine.info({"a": "b"})
    assert (info.vocab_size, info.max_request_tokens, info.min_reusable_prefix) == (VOCAB, 1024, 64)


def test_a_budget_that_cannot_hold_one_request_is_refused() -> None:
    config = EngineConfig(cache=CacheConfig(budget_bytes=1000), scheduler=SchedulerConfig(max_context=512))
    with pytest.raises(RefusalError, match="raise the budget"):
        Engine(FakeModel(), config)


def test_inputs_are_persistent_and_hold_no_leftovers() -> None:
    """The same addresses step after step; rows of a shorter table do not show the pages of a longer one."""
    specs = cache_table()
    demand = CacheDemand(4, 1024, 512)
    plan = plan_cache(specs, demand, full_budget(specs, demand))
    cache = CacheManager(specs, plan)
    buffers = InputBuffers(specs, 4, 600, 1024, torch.device("cpu"))
    pointers = []
    for length in (500, 70, 300, 3):
        tokens = list(range(length))
        admission = cache.admit(cache.prompt(tokens))
        assert admission is not None
        sequence, _ = admission
        assert cache.reserve(sequence, length)
        request = Request("x", tokens, GREEDY, 1)
        row = Row(request, sequence, 0, tuple(tokens))
        step = buffers.fill(StepPlan((row,)), cache)
        assert step.token_ids.tolist() == tokens and step.positions.tolist() == tokens
        assert step.row_offsets.tolist() == [0, length] and step.logit_indices.tolist() == [length - 1]
        blocks = -(-length // 64)
        for group in step.groups[:4]:
            assert group.block_table.is_contiguous() and group.block_table.shape == (1, 16)
            assert group.block_table[0, :blocks].all() and not group.block_table[0, blocks:].any()
        out = step.groups[4].state_out
        assert out.shape == (1, max(1, length // 64)) and out.is_contiguous()
        assert bool(out[0, -1]) == (length >= 64)
        pointers.append((step.token_ids.data_ptr(), step.groups[0].block_table.data_ptr(), out.data_ptr()))
        cache.release(sequence)
        cache.clear_index()
    assert len(set(pointers)) == 1
    with pytest.raises(ValueError, match="exceeds the buffers"):
        buffers.fill(StepPlan((Row(request, sequence, 0, tuple(range(700))),)), cache)


def test_the_overhead_of_a_step_can_be_measured() -> None:
    found = measure_overhead(3, 50, num_steps=5)
    assert found.plan > 0 and found.run > 0 and found.commit > 0
