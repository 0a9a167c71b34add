"""Recorded steps give the bits of plain ones: widened with null rows on any device, replayed as graphs on a GPU."""

from __future__ import annotations

import contextlib
import random
from types import SimpleNamespace

import pytest
import tiny_synthetic
import torch
from history import PlainRecorder

from slimserve.engine import forward as forward_module
from slimserve.engine.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from slimserve.engine.forward import LEAST_CONTEXT, Computed, ForwardPass, GraphRecorder, row_counts
from slimserve.engine.loop import Engine
from slimserve.engine.memory import draw_widest
from slimserve.engine.request import Request, SamplingParams
from slimserve.weights.loader import LoadedModel, load_source
from slimserve.weights.synthetic import lay_out

CASES = [
    *(pytest.param((name, "cpu"), id=name) for name in tiny_synthetic.NAMES),
    *(pytest.param((name, "cuda"), id=f"{name}-cuda", marks=pytest.mark.gpu) for name in tiny_synthetic.NAMES),
]
SAMPLINGS = (
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(temperature=1.0, top_k=20, top_p=0.95, seed=7, logprobs=0),
)


@pytest.fixture(scope="module", params=CASES)
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    name, device = request.param
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return load_source(lay_out(tiny_synthetic.tiny(name)).source(device), device=device)


class EqualDrafts:
    """Three tokens for every request, mostly wrong: rows of one length, so that verification is recorded too."""

    def propose(self, requests: list[Request], limits: list[int]) -> list[tuple[int, ...]]:
        return [tuple((request.num_tokens + i) % 512 for i in range(min(3, limit)))
                for request, limit in zip(requests, limits, strict=True)]  # fmt: skip

    def release(self, request_id: str) -> None:
        """Nothing is kept."""


def engine_of(loaded: LoadedModel, *, recorded: bool, drafts: bool = False, max_sequences: int = 11) -> Engine:
    engine = Engine(
        loaded.model,
        EngineConfig(
            device=str(loaded.device),
            cache=CacheConfig(budget_bytes=96 << 20),
            scheduler=SchedulerConfig(max_sequences=max_sequences, max_context=4096, token_budget=64),
            speculation=SpeculationConfig(max_draft=3, measured=False),
            numerics=loaded.numerics,
            graphs=recorded,
        ),
        drafter=EqualDrafts() if drafts else None,
    )
    if recorded and loaded.device.type == "cpu":
        engine.runner.forward.recorder = PlainRecorder()
    return engine


def replies(engine: Engine, count: int, tokens: int = 24) -> dict[str, list[object]]:
    """Requests of many lengths that come and go; prompts of 65 end in a chunk of one token."""
    rng = random.Random(4)
    found: dict[str, list[object]] = {}
    for number in range(count):
        prompt = [rng.randrange(512) for _ in range(rng.choice((3, 64, 65, 130)))]
        length = rng.choice((tokens // 2, tokens))
        engine.submit(Request(f"r{number}", prompt, SAMPLINGS[number % 2], length, ignore_eos=True))
        found[f"r{number}"] = []
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            found[output.request_id] += [*output.token_ids, *output.logprobs]
        engine.audit()
    return found


@pytest.mark.parametrize("drafts", [False, True])
def test_same_bits_with_and_without(loaded: LoadedModel, drafts: bool) -> None:
    plain = engine_of(loaded, recorded=False, drafts=drafts)
    expected = replies(plain, 7)
    assert plain.runner.forward.num_replays == 0
    recorded = engine_of(loaded, recorded=True, drafts=drafts)
    assert replies(recorded, 7) == expected
    least = 1 if drafts else 10
    assert recorded.runner.forward.num_replays > least
    # Again with everything recorded and every prompt in the prefix index.
    before = recorded.runner.forward.num_replays
    assert replies(recorded, 7) == expected
    assert recorded.runner.forward.num_replays > before + least


def test_a_longer_context_takes_another_recording(loaded: LoadedModel) -> None:
    engine = engine_of(loaded, recorded=True, max_sequences=2)
    rng = random.Random(1)
    prompt = [rng.randrange(512) for _ in range(LEAST_CONTEXT - 4)]
    engine.submit(Request("long", prompt, SAMPLINGS[0], 12, ignore_eos=True))
    tokens: list[int] = []
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            tokens += output.token_ids
    shapes = engine.runner.forward.recorded_shapes
    assert {shape.max_context for shape in shapes} == {LEAST_CONTEXT, 2 * LEAST_CONTEXT}
    alone = engine_of(loaded, recorded=False, max_sequences=2)
    alone.submit(Request("long", prompt, SAMPLINGS[0], 12, ignore_eos=True))
    expected = [
        token for _ in iter(lambda: alone.has_work, False) for output in alone.step() for token in output.token_ids
    ]
    assert tokens == expected


@pytest.mark.parametrize("max_rows", [1, 2, 3, 7, 8, 31, 64, 65, 300, 4096])
def test_every_number_of_rows_has_a_recording_not_much_larger(max_rows: int) -> None:
    counts = row_counts(max_rows)
    assert counts == tuple(sorted(set(counts))) and counts[-1] == max_rows and counts[0] == 1
    for rows in range(1, max_rows + 1):
        padded = next(count for count in counts if count >= rows)
        assert padded < 2 * rows or padded - rows < 8


def test_steps_that_no_recording_serves(loaded: LoadedModel) -> None:
    engine = engine_of(loaded, recorded=True)
    forward: ForwardPass = engine.runner.forward
    engine.submit(Request("a", [1, 2, 3], SAMPLINGS[0], 4, ignore_eos=True))
    plan = engine.scheduler.plan()
    assert forward.shape_of(plan.rows) is None, "a prompt of three tokens"
    engine.scheduler.commit(plan, engine.runner.run(plan))
    plan = engine.scheduler.plan()
    shape = forward.shape_of(plan.rows)
    assert shape is not None and (shape.num_rows, shape.q_len, shape.max_context) == (1, 1, LEAST_CONTEXT)
    engine.scheduler.commit(plan, engine.runner.run(plan))
    engine.close()


@pytest.mark.parametrize("drafts", [False, True])
def test_the_widest_step_and_its_draw_leave_nothing(loaded: LoadedModel, drafts: bool) -> None:
    engine = engine_of(loaded, recorded=True, drafts=drafts)
    forward = engine.runner.forward
    computed = forward.compute_widest()
    assert computed.logits.shape[0] == 11 * (4 if drafts else 1)
    draw_widest(engine)
    forward.record_widest()
    assert {shape.q_len for shape in forward.recorded_shapes} == {4 if drafts else 1}
    engine.audit()
    assert not engine.has_work
    engine.close()


def test_a_recording_that_gives_the_kept_block_back_has_it_kept_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives whole free segments back when a recording begins; one in which something lies stays."""
    reserved, gives_back, kept = [1000], [0], []

    class Entered(contextlib.AbstractContextManager["Entered"]):
        def __init__(self, *_: object, **__: object) -> None: ...

        def __enter__(self) -> Entered:
            reserved[0] -= gives_back[0]
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(pool=lambda: (0, 1), replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", Entered)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved[0])
    monkeypatch.setattr(forward_module, "keep_block", lambda device, size: kept.append(size))
    computed = Computed(torch.zeros(2, 4), torch.zeros(2, 8), [], torch.ones(2, dtype=torch.bool))
    recorder = GraphRecorder(torch.device("cuda:0"))
    for block, given, expected in ((0, 500, []), (300, 200, []), (300, 300, [300]), (300, 400, [300, 300])):
        recorder.kept, reserved[0], gives_back[0] = block, 1000, given
        replay = recorder.record(lambda: computed, computed)
        assert kept == expected and torch.equal(replay().logits, computed.logits)
    assert recorder.num_graphs == 4
