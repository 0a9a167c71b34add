"""What the scheduler decides: shares of a step, order, skip-ahead, ageing, victims, refusals, deadlines, ends."""

from __future__ import annotations

import pytest
import torch
from fake_model import cache_table, explicit_plan

from slimserve.cache.budget import CacheDemand
from slimserve.cache.manager import CacheManager
from slimserve.engine.config import SchedulerConfig
from slimserve.engine.request import FinishReason, Request, RequestState, SamplingParams
from slimserve.engine.scheduler import Scheduler
from slimserve.engine.step import RequestOutput, Row, RowResult, StepPlan, StepResult
from slimserve.errors import RequestError
from slimserve.models.contract import CacheKind

KINDS = (CacheKind.ATTENTION,)


class Bench:
    """A scheduler over one attention group of `pages` pages; every draw is token 1."""

    def __init__(self, pages: int = 64, max_context: int = 2048, prefix_caching: bool = True, **limits: int) -> None:
        config = SchedulerConfig(
            **{
                "max_sequences": 8,
                "max_context": max_context,
                "token_budget": 256,
                "mixed_prefill_budget": 64,
                **limits,
            }
        )
        demand = CacheDemand(config.max_sequences, max_context, config.token_budget)
        self.cache = CacheManager(
            cache_table(KINDS), explicit_plan(demand, [(pages, 0)], KINDS), prefix_caching=prefix_caching
        )
        self.now = 0.0
        self.scheduler = Scheduler(config, self.cache, end_token_ids=frozenset({9}), clock=lambda: self.now)
        self.requests: dict[str, Request] = {}
        self.outputs: list[RequestOutput] = []

    def submit(self, name: str, prompt: int, max_tokens: int = 50, **options: object) -> Request:
        tokens = [len(self.requests) * 1000 + i for i in range(prompt)]  # no two prompts share a block
        request = Request(name, tokens, SamplingParams(temperature=0.0), max_tokens, **options)  # type: ignore[arg-type]
        self.scheduler.submit(request)
        self.requests[name] = request
        return request

    def plan(self) -> dict[str, int]:
        """Plan and commit one step; q_len per request."""
        plan = self.scheduler.plan()
        self.outputs += self.scheduler.commit(plan, draw(plan))
        self.cache.audit()
        return {row.request.request_id: row.q_len for row in plan.rows}

    def ends(self) -> dict[str, FinishReason]:
        found = {}
        for output in [*self.outputs, *self.scheduler.take_ended()]:
            if output.finish_reason is not None:
                assert output.request_id not in found, "a request ended twice"
                found[output.request_id] = output.finish_reason
        return found


def draw(plan: StepPlan, token: int = 1) -> StepResult:
    return StepResult(tuple(RowResult((token,) if row.num_samples else ()) for row in plan.rows))


def test_a_prompt_is_cut_by_the_budget_at_whole_blocks() -> None:
    bench = Bench(token_budget=200)
    bench.submit("a", 500)
    assert [bench.plan()["a"] for _ in range(4)] == [192, 192, 116, 1]


def test_running_replies_keep_their_share_while_a_long_prompt_prefills() -> None:
    bench = Bench()
    for i in range(4):
        bench.submit(f"chat{i}", 10)
    bench.plan()
    bench.submit("long", 1500)
    for _ in range(20):
        rows = bench.plan()
        assert all(rows[f"chat{i}"] == 1 for i in range(4)), "a running reply waited for a prompt"
        assert 0 < rows["long"] <= 64
    assert all(len(bench.requests[f"chat{i}"].output_token_ids) == 21 for i in range(4))


def test_prefill_goes_on_even_when_decode_rows_fill_the_budget() -> None:
    bench = Bench(token_budget=8, mixed_prefill_budget=8)
    for i in range(7):
        bench.submit(f"chat{i}", 1, 200)
    for _ in range(7):
        bench.plan()
    bench.submit("late", 100)
    assert bench.plan()["late"] == 8


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    bench = Bench()
    bench.submit("long", 1800)
    assert bench.plan() == {"long": 256}
    bench.submit("short", 30)
    rows = bench.plan()
    assert rows["short"] == 30 and rows["long"] >= 192
    assert len(bench.requests["short"].output_token_ids) == 1


def test_what_nobody_else_wants_goes_to_the_first_prompt() -> None:
    bench = Bench(pages=40)
    bench.submit("long", 1800)
    bench.plan()
    bench.submit("big", 1500)  # does not fit beside it
    assert bench.plan() == {"long": 256}


def test_small_requests_pass_a_big_one_until_it_has_aged() -> None:
    bench = Bench(pages=20, skip_ahead=4, ageing_steps=6)
    bench.submit("first", 640, 200)
    for _ in range(4):
        bench.plan()
    big = bench.submit("big", 900)
    for i in range(3):
        bench.submit(f"small{i}", 30, 2)
    rows = bench.plan()
    assert "big" not in rows and "small0" in rows, "the big one stands in the way of small ones"
    for _ in range(8):
        bench.plan()
    bench.submit("late", 30, 2)
    for _ in range(5):
        assert "late" not in bench.plan(), "a big request that has aged is passed still"
    assert big.state is RequestState.WAITING
    bench.scheduler.abort("first")
    assert "big" in bench.plan()


def test_higher_priority_goes_first_and_makes_way_for_itself() -> None:
    bench = Bench(pages=20, prefix_caching=False)
    bench.submit("low", 900, 100)
    for _ in range(6):
        bench.plan()
    bench.submit("normal", 900, 100)
    bench.submit("high", 800, 100, priority=1)
    rows = bench.plan()
    assert list(rows) == ["high"]
    assert bench.requests["low"].state is RequestState.PREEMPTED
    while bench.requests["high"].finish_reason is None:
        assert set(bench.plan()) == {"high"}, "a lower priority came back before the higher one was done"
    for _ in range(300):
        bench.plan()
    assert set(bench.ends().values()) == {FinishReason.LENGTH} and len(bench.ends()) == 3


def test_the_cheapest_request_gives_way() -> None:
    bench = Bench(pages=12, prefix_caching=False, max_context=768)
    bench.submit("dear", 380, 300)
    bench.plan(), bench.plan()
    bench.submit("cheap", 60, 300)
    bench.submit("middle", 120, 300)
    while not any(request.num_preemptions for request in bench.requests.values()):
        bench.plan()
    assert bench.requests["cheap"].num_preemptions == 1
    assert not bench.requests["dear"].num_preemptions and not bench.requests["middle"].num_preemptions
    for _ in range(1500):
        bench.plan()
    assert len(bench.ends()) == 3 and set(bench.ends().values()) == {FinishReason.LENGTH}
    assert not bench.requests["dear"].num_preemptions, "the dearest request never gives way"
    assert all(len(request.output_token_ids) == 300 for request in bench.requests.values())


def test_a_full_house_makes_progress_every_step() -> None:
    bench = Bench(pages=6, prefix_caching=False, max_context=384)
    for i in range(8):
        bench.submit(f"r{i}", 100, 250)
    total = 0
    for _ in range(4000):
        before = sum(len(request.output_token_ids) for request in bench.requests.values())
        rows = bench.plan()
        if not bench.scheduler.has_work:
            break
        assert rows
        after = sum(len(request.output_token_ids) for request in bench.requests.values())
        total += after > before or max(rows.values()) > 1
    assert len(bench.ends()) == 8 and set(bench.ends().values()) == {FinishReason.LENGTH}


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param"), [(2048, 1, "prompt"), (3000, 5, "prompt"), (2000, 49, "max_tokens")]
)
def test_what_can_never_fit_is_refused_with_the_numbers(prompt: int, max_tokens: int, param: str) -> None:
    bench = Bench()
    with pytest.raises(
        RequestError, match=rf"{prompt} tokens and max_tokens asks for {max_tokens}.*at most 2048"
    ) as info:
        bench.submit("x", prompt, max_tokens)
    assert info.value.status == 400 and info.value.code == "context_length_exceeded" and info.value.param == param
    bench.submit("fits", 2000, 48)


def test_the_group_that_cannot_hold_a_request_is_named() -> None:
    bench = Bench(pages=5)
    with pytest.raises(RequestError, match=r"need 7 units of cache group full, which has 5.*at most 320 tokens"):
        bench.submit("x", 400, 20)


def test_a_full_queue_refuses_at_once() -> None:
    bench = Bench(max_queue=2)
    bench.submit("a", 5), bench.submit("b", 5)
    with pytest.raises(RequestError) as info:
        bench.submit("c", 5)
    assert info.value.status == 429 and info.value.code == "queue_full"
    bench.plan()
    bench.submit("c", 5)


def test_empty_prompts_negative_limits_and_used_ids_are_refused() -> None:
    bench = Bench()
    bench.submit("a", 5)
    for name, prompt, most, param in (("b", 0, 5, "prompt"), ("b", 5, -1, "max_tokens"), ("a", 5, 5, None)):
        with pytest.raises(RequestError) as info:
            bench.submit(name, prompt, most)
        assert info.value.param == param and info.value.status == 400


def test_a_deadline_ends_waiting_and_running_requests() -> None:
    bench = Bench(max_sequences=1)
    bench.submit("runs", 5, deadline=10.0)
    bench.submit("waits", 5, deadline=5.0)
    bench.plan()
    bench.now = 6.0
    bench.plan()
    assert bench.ends() == {"waits": FinishReason.ERROR}
    bench.now = 11.0
    assert bench.plan() == {}
    assert bench.ends() == {"waits": FinishReason.ERROR, "runs": FinishReason.ERROR}
    assert all(usage.num_held == 0 for usage in bench.cache.usage())


def test_abort_is_idempotent_at_every_stage() -> None:
    bench = Bench(max_sequences=2)
    bench.scheduler.abort("unknown")
    for name in ("prefilling", "running", "waiting"):
        bench.submit(name, 700 if name == "prefilling" else 5)
        if name != "waiting":
            bench.plan()
    plan = bench.scheduler.plan()
    for name in ("prefilling", "running", "waiting", "running"):
        bench.scheduler.abort(name)
    bench.cache.audit()
    assert any(usage.num_held for usage in bench.cache.usage()), "pages of a step that runs are not given away"
    bench.outputs += bench.scheduler.commit(plan, draw(plan))
    assert set(bench.ends().values()) == {FinishReason.ABORT} and len(bench.ends()) == 3
    assert all(usage.num_held == 0 for usage in bench.cache.usage())
    bench.submit("running", 5)
    assert bench.plan() == {"running": 5}
    bench.scheduler.abort("running")
    with pytest.raises(RequestError, match="in use"):
        bench.submit("running", 5)  # its end has not been delivered


def test_tokens_after_an_end_are_dropped() -> None:
    bench = Bench()
    request = bench.submit("a", 5)
    bench.plan()
    plan = bench.scheduler.plan()
    row = plan.rows[0]
    drafted = (3, 9, 4)
    wide = Row(row.request, row.sequence, row.start_position, (*row.token_ids, *drafted), drafted, 4)
    assert bench.cache.reserve(row.sequence, row.start_position + 4, 3)
    outputs = bench.scheduler.commit(StepPlan((wide,)), StepResult((RowResult((3, 9, 4, 7), num_accepted_drafts=3),)))
    assert outputs[0].token_ids == (3, 9) and outputs[0].finish_reason is FinishReason.STOP
    assert request.output_token_ids == [1, 3, 9]
    bench.cache.audit()


@pytest.mark.parametrize(
    ("options", "draws", "count", "reason"),
    [
        ({}, [1, 9], 2, FinishReason.STOP),
        ({"ignore_eos": True}, [1, 9, 1, 1], 4, FinishReason.LENGTH),
        ({"stop_token_ids": frozenset({5}), "ignore_eos": True}, [9, 5], 2, FinishReason.STOP),
        ({"min_tokens": 2}, [9, 9, 9], 3, FinishReason.STOP),
        ({"max_tokens": 1}, [9], 1, FinishReason.STOP),
        ({"max_tokens": 0}, [], 0, FinishReason.LENGTH),
    ],
)
def test_end_rules(options: dict, draws: list[int], count: int, reason: FinishReason) -> None:
    bench = Bench()
    sampling = SamplingParams(temperature=0.0, min_tokens=options.pop("min_tokens", 0))
    request = Request("a", [2, 3, 4], sampling, options.pop("max_tokens", 4), **options)
    bench.scheduler.submit(request)
    for token in [*draws, 1, 1]:
        plan = bench.scheduler.plan()
        bench.outputs += bench.scheduler.commit(plan, draw(plan, token))
    assert bench.ends() == {"a": reason} and len(request.output_token_ids) == count
    assert not bench.scheduler.has_work


def test_a_lost_step_ends_its_requests_and_nothing_it_wrote_is_reused() -> None:
    bench = Bench()
    bench.submit("a", 200)
    bench.submit("waiting behind", 5, priority=-1)
    plan = bench.scheduler.plan()
    bench.outputs += bench.scheduler.fail(plan, "the step was lost")
    bench.cache.audit()
    ended = set(bench.ends())
    assert ended == {row.request.request_id for row in plan.rows}
    again = Request("b", bench.requests["a"].prompt_token_ids, SamplingParams(), 5)
    bench.scheduler.submit(again)
    bench.plan()
    assert again.num_cached == 0


def test_seeds_are_kept_or_drawn() -> None:
    bench = Bench()
    given = Request("a", [1], SamplingParams(seed=2**70 + 3), 1)
    drawn = [Request(f"d{i}", [1], SamplingParams(), 1) for i in range(3)]
    for request in (given, *drawn):
        bench.scheduler.submit(request)
    assert given.seed == 3 and len({request.seed for request in drawn}) == 3


def test_nothing_of_the_plan_is_on_a_device() -> None:
    bench = Bench()
    bench.submit("a", 5)
    row = bench.scheduler.plan().rows[0]
    assert not any(isinstance(getattr(row, name), torch.Tensor) for name in row.__dataclass_fields__)


@pytest.mark.parametrize(("count", "context"), [(2, 16384), (4, 8192), (32, 4096)])
def test_as_many_longest_requests_as_the_pages_are_for_run_at_once(count: int, context: int) -> None:
    bench = Bench(
        pages=count * context // 64,
        max_context=context,
        max_sequences=count,
        token_budget=2048,
        mixed_prefill_budget=1024,
    )
    reply = count * context // 1024 + count + 8  # the first still decodes when the last one's prompt is done
    for number in range(count):
        bench.submit(f"r{number}", context - reply, reply, ignore_eos=True)
    together = 0
    while bench.scheduler.has_work:
        plan = bench.scheduler.plan()
        together = max(together, bench.scheduler.num_running)
        bench.scheduler.commit(plan, draw(plan))
    assert together == count and bench.scheduler.counters.num_preemptions == 0


@pytest.mark.parametrize(("prompt", "reply", "together"), [(60, 5, 2), (64, 1, 2), (64, 0, 2), (60, 6, 1)])
def test_replies_that_end_in_the_last_page_need_no_other(prompt: int, reply: int, together: int) -> None:
    bench = Bench(pages=2, max_context=128, prefix_caching=False)
    for name in ("a", "b"):
        bench.submit(name, prompt, reply, ignore_eos=True)
    assert len(bench.plan()) == together
    for _ in range(30):
        bench.plan()
    assert len(bench.ends()) == 2 and bench.scheduler.counters.num_preemptions == 0


def test_a_request_that_comes_to_fit_is_not_passed_over_until_another_ends() -> None:
    bench = Bench(pages=8, max_context=512, prefix_caching=False)
    store = bench.cache.groups[0].store
    bench.submit("long", 60, 300, ignore_eos=True)
    bench.plan()
    held = [store.take() for _ in range(store.available())]  # as a step's drafts and copies of blocks hold them
    bench.submit("short", 60, 4, ignore_eos=True)

    def step() -> bool:
        plan = bench.scheduler.plan()
        bench.scheduler.commit(plan, draw(plan))
        return any(row.request.request_id == "short" for row in plan.rows)

    assert not step()
    for page in held:
        store.give_back(page)
    assert sum(not step() for _ in range(20)) < 20 and bench.scheduler.num_waiting == 0
    assert bench.scheduler.num_running == 1, "it was not admitted while the long reply ran"
