"""Prompt lookup and DFlash2 on the trained hybrids: no token changes, whatever of their drafts holds."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import nano_models
import pytest
import tiny_dflash2
from speculation_rig import Reply, ScriptedDrafter, make_engine, mixed_requests, said, serve

from slimserve.engine.config import DrafterKind
from slimserve.engine.loop import Engine
from slimserve.engine.request import Request, SamplingParams
from slimserve.models.dflash2 import DFlash2Model
from slimserve.weights.loader import LoadedModel, load_model

VOCAB, COUNT, LENGTH = 4096, 32, 14
KINDS = (DrafterKind.LOOKUP, DrafterKind.DFLASH2)


@pytest.fixture(scope="module", params=nano_models.on_devices((nano_models.QWEN, nano_models.GLM)))
def trained(request: pytest.FixtureRequest) -> LoadedModel:
    return nano_models.load_on(*request.param)


def requests_for_all() -> list[Request]:
    """Mixed ones, the last of which says two tokens only, so that its text repeats itself whatever the weights are."""
    *requests, last = mixed_requests(COUNT, VOCAB, LENGTH)
    few = SamplingParams(temperature=0.0, allowed_token_ids=(50, 51))
    return [*requests, Request(last.request_id, last.prompt_token_ids, few, 2 * LENGTH, ignore_eos=True)]


@pytest.fixture(scope="module")
def plain(trained: LoadedModel) -> dict[str, Reply]:
    return serve(make_engine(trained, prefix_caching=False), requests_for_all())


@pytest.fixture(scope="module")
def block_drafter(trained: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> DFlash2Model:
    """A random one of the nano models' size: it reads their layers and is nearly always wrong."""
    config: dict[str, Any] = copy.deepcopy(tiny_dflash2.CONFIG) | {"vocab_size": VOCAB, "hidden_size": 256}
    config["dflash_config"]["mask_token_id"] = 3
    folder = tiny_dflash2.save_folder(tmp_path_factory.mktemp("drafter"), tiny_dflash2.tensors(config), config)
    model = load_model(folder, device=str(trained.device), drafter=True).model
    assert isinstance(model, DFlash2Model)
    return model


class Helped:
    """Stands before an engine's drafter; two thirds of the time right tokens take the place of its own."""

    def __init__(self, engine: Engine, expected: dict[str, Reply], right: float) -> None:
        planner: Any = engine.scheduler._drafting
        self._own = planner._drafter
        tokens = {name: reply.token_ids for name, reply in expected.items()}
        self._script = ScriptedDrafter(tokens, right, vocab_size=VOCAB)
        self.num_own = 0
        planner._drafter = self

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[tuple[int, ...]]:
        proposals = list(self._own.propose(requests, limits))
        for place, tokens in enumerate(self._script.propose(requests, limits)):
            self.num_own += len(proposals[place])
            if requests[place].num_tokens % 3:
                proposals[place] = tokens
        return proposals

    def release(self, request_id: str) -> None:
        self._own.release(request_id)


def drafting(
    loaded: LoadedModel, kind: DrafterKind, companion: DFlash2Model, plain: dict[str, Reply], **settings: Any
) -> tuple[Engine, Helped]:
    own = companion if kind is DrafterKind.DFLASH2 else None
    engine = make_engine(loaded, kind, companion=own, max_draft=5, **settings)
    return engine, Helped(engine, plain, 0.8)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_on_equals_off_among_32(
    trained: LoadedModel, plain: dict[str, Reply], block_drafter: DFlash2Model, kind: DrafterKind, prefix_caching: bool
) -> None:
    engine, helped = drafting(trained, kind, block_drafter, plain, prefix_caching=prefix_caching)
    for turn in range(1 + prefix_caching):
        found = serve(engine, requests_for_all())
        assert said(found) == said(plain), f"turn {turn}"
        assert sum(reply.num_cached for reply in found.values()) >= 1500 * turn
    counters = engine.scheduler.counters
    assert 0 < counters.accepted_tokens < counters.drafted_tokens
    assert helped.num_own > (100 if kind is DrafterKind.DFLASH2 else 0)
    if kind is DrafterKind.DFLASH2:
        drafter: Any = engine.drafter
        assert len(drafter._tracker) == 0 and not drafter._sampler._kept, "ended requests are kept"


@pytest.mark.parametrize("kind", KINDS)
def test_on_equals_off_alone_and_preempted(
    trained: LoadedModel, plain: dict[str, Reply], block_drafter: DFlash2Model, kind: DrafterKind
) -> None:
    rng = random.Random(5)
    requests = requests_for_all()
    engine, _ = drafting(trained, kind, block_drafter, plain)
    for i in (0, 3, 5, 14):
        assert serve(engine, [requests[i]])[f"r{i}"].said == plain[f"r{i}"].said, f"request {i}"

    def preempt(engine: Engine, step: int) -> None:
        running = [job for job in engine.scheduler._running if job.sequence is not None]
        if step % 3 == 2 and running:
            engine.scheduler._preempt(rng.choice(running), {})

    for prefix_caching in (True, False):
        engine, _ = drafting(trained, kind, block_drafter, plain, prefix_caching=prefix_caching)
        found = serve(engine, requests[:8], each_step=preempt)
        assert engine.scheduler.counters.num_preemptions > 3
        assert said(found) == said({r.request_id: plain[r.request_id] for r in requests[:8]})
