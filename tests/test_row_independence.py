"""A row stands alone: the same ids and log probabilities alone, in company, for any cut, preempted, on a hit."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import nano_models
import pytest
import reference_outputs
import torch

from slimserve.engine.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from slimserve.engine.loop import Engine
from slimserve.engine.request import Request, SamplingParams
from slimserve.engine.speculate import Drafter
from slimserve.weights.loader import LoadedModel, load_model

WHOLE = 1024
GREEDY = SamplingParams(temperature=0.0, logprobs=3)
SEEDED = SamplingParams(temperature=1.0, top_p=0.95, top_k=20, seed=77, logprobs=3)


@dataclass
class Reply:
    """What one request got."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    num_cached: int = 0


class Rig:
    """A loaded model and the engines that a test asks for."""

    def __init__(self, loaded: LoadedModel, *, num_others: int, prompt: int, max_tokens: int) -> None:
        self.loaded = loaded
        self.num_others = num_others
        self.max_tokens = max_tokens
        self.vocab_size = min(loaded.model.config.vocab_size, 30_000)
        rng = random.Random(5)
        self.prompt = [rng.randrange(1, self.vocab_size) for _ in range(prompt)]

    def engine(
        self, token_budget: int = WHOLE, *, prefix_caching: bool = True, drafter: Drafter | None = None
    ) -> Engine:
        return Engine(
            self.loaded.model,
            EngineConfig(
                device=str(self.loaded.device),
                cache=CacheConfig(prefix_caching=prefix_caching),
                scheduler=SchedulerConfig(
                    max_sequences=32,
                    max_context=min(1024, self.loaded.model.config.max_context),
                    token_budget=token_budget,
                    mixed_prefill_budget=token_budget,
                ),
                speculation=SpeculationConfig(max_draft=6, measured=False),
                numerics=self.loaded.numerics,
            ),
            drafter=drafter,
        )

    def run(
        self,
        engine: Engine,
        params: SamplingParams,
        *,
        others: int = 0,
        each_step: Callable[[Engine, int], None] | None = None,
    ) -> Reply:
        """The watched request's reply, with `others` around it that come and go."""
        rng = random.Random(9)
        for i in range(others):
            prompt = [rng.randrange(1, self.vocab_size) for _ in range(rng.choice((1, 7, 30, 64, 90)))]
            sampling = SamplingParams(temperature=rng.choice((0.0, 1.0)), seed=i)
            engine.submit(Request(f"other{i}", prompt, sampling, rng.choice((2, 5, 14)), ignore_eos=True))
            if i == others // 2:
                self._submit(engine, params)
        if not others:
            self._submit(engine, params)
        reply = Reply()
        step = 0
        while engine.has_work:
            if each_step is not None:
                each_step(engine, step)
            for output in engine.step():
                assert output.error is None, output.error
                if output.request_id == "watched":
                    reply.token_ids += output.token_ids
                    reply.logprobs += output.logprobs
                    reply.num_cached = output.num_cached_tokens
            engine.audit()
            step += 1
        assert len(reply.token_ids) == len(reply.logprobs) == self.max_tokens
        return reply

    def _submit(self, engine: Engine, params: SamplingParams) -> None:
        engine.submit(Request("watched", list(self.prompt), params, self.max_tokens, ignore_eos=True))


def _tiny(case: str) -> Callable[[Path, str], LoadedModel]:
    def make(folder: Path, device: str) -> LoadedModel:
        tiny_models = pytest.importorskip("tiny_models", reason="needs transformers")
        return load_model(tiny_models.save_folder(tiny_models.build(case), folder), device=device)

    return make


def _hybrid(kind: str) -> Callable[[Path, str], LoadedModel]:
    def make(folder: Path, device: str) -> LoadedModel:
        tiny_hybrids = pytest.importorskip("tiny_hybrids", reason="needs transformers")
        oracle = getattr(tiny_hybrids, f"build_{kind}")()
        tensors = getattr(tiny_hybrids, f"{kind}_tensors")(oracle)
        return load_model(tiny_hybrids.save_folder(oracle, tensors, folder), device=device)

    return make


def _smollm2(folder: Path, device: str) -> LoadedModel:
    loaded = load_model(reference_outputs.model_file("smollm2-135m"), device=device)
    if device == "cpu" and "reference" in " ".join(loaded.kernels.values()):
        pytest.skip("the C++ kernels are not built here; the torch references would take minutes")
    return loaded


def _nano(name: str) -> Callable[[Path, str], LoadedModel]:
    def make(folder: Path, device: str) -> LoadedModel:
        loaded = load_model(nano_models.any_form(name), device=device)
        if device == "cpu" and nano_models.is_reference(loaded):
            pytest.skip("the C++ kernels are not built here; the torch references would take minutes")
        return loaded

    return make


MODELS: dict[str, tuple[Callable[[Path, str], LoadedModel], int, int]] = {
    "qwen2": (_tiny("qwen2"), 40, 150),
    "mistral-sliding": (_tiny("mistral-sliding"), 40, 150),
    "gemma3": (_tiny("gemma3"), 40, 150),
    "qwen3_5": (_hybrid("qwen"), 60, 150),
    "glm5_next": (_hybrid("glm"), 60, 150),
    "smollm2": (_smollm2, 20, 150),
    "nano-qwen3_5": (_nano(nano_models.QWEN), 24, 330),
    "nano-glm5-next": (_nano(nano_models.GLM), 24, 330),
}
"""Per model: how to load it, how many tokens to watch, and after a prompt of how many (GLM selects from 260 on)."""

CASES = [
    *(pytest.param((name, "cpu"), id=name) for name in MODELS),
    *(pytest.param((name, "cuda"), id=f"{name}-cuda", marks=pytest.mark.gpu) for name in MODELS),
]


@pytest.fixture(scope="module", params=CASES)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    name, device = request.param
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    make, max_tokens, prompt = MODELS[name]
    loaded = make(tmp_path_factory.mktemp("model"), device)
    return Rig(loaded, num_others=31, prompt=prompt, max_tokens=max_tokens)


@pytest.fixture(scope="module")
def alone(rig: Rig) -> dict[str, Reply]:
    """The reply of a request that has the engine to itself, its prompt in one piece, nothing cached."""
    return {
        name: rig.run(rig.engine(prefix_caching=False), params)
        for name, params in (("greedy", GREEDY), ("seeded", SEEDED))
    }


def same(reply: Reply, expected: Reply, what: str) -> None:
    assert reply.token_ids == expected.token_ids, f"{what}: other tokens"
    assert reply.logprobs == expected.logprobs, f"{what}: same tokens, other bits in the log probabilities"


@pytest.mark.parametrize("budget", [16, 64, 512])
def test_any_prefill_budget(rig: Rig, alone: dict[str, Reply], budget: int) -> None:
    same(rig.run(rig.engine(budget), GREEDY), alone["greedy"], f"budget {budget}")


@pytest.mark.parametrize("budget", [16, 64, 512, WHOLE])
def test_in_company_for_any_budget(rig: Rig, alone: dict[str, Reply], budget: int) -> None:
    same(rig.run(rig.engine(budget), SEEDED, others=rig.num_others), alone["seeded"], f"company, budget {budget}")


def test_greedy_in_company(rig: Rig, alone: dict[str, Reply]) -> None:
    same(rig.run(rig.engine(64), GREEDY, others=rig.num_others), alone["greedy"], "company")


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_after_preemption(rig: Rig, alone: dict[str, Reply], prefix_caching: bool) -> None:
    """Recomputed from the start, or restored from what was kept: the reply goes on with the same bits."""
    preempted = []

    def preempt(engine: Engine, step: int) -> None:
        job = engine.scheduler._jobs.get("watched")
        if step in (2, 9, 17) and job is not None and job.sequence is not None:
            engine.scheduler._preempt(job, {})
            preempted.append(step)

    engine = rig.engine(64, prefix_caching=prefix_caching)
    same(rig.run(engine, SEEDED, others=5, each_step=preempt), alone["seeded"], f"preempted at {preempted}")
    assert len(preempted) >= 2


def test_on_a_prefix_hit(rig: Rig, alone: dict[str, Reply]) -> None:
    engine = rig.engine(512)
    same(rig.run(engine, GREEDY), alone["greedy"], "cold")
    for params, name in ((GREEDY, "greedy"), (SEEDED, "seeded")):
        reply = rig.run(engine, params, others=3)
        assert reply.num_cached == (len(rig.prompt) - 1) // 64 * 64
        same(reply, alone[name], "prefix hit")


class _RandomDrafts:
    """Right, wrong and partly right drafts of every length."""

    def __init__(self, expected: list[int], num_prompt: int) -> None:
        self._expected, self._num_prompt = expected, num_prompt
        self._rng = random.Random(1)

    def propose(self, requests: list[Request], limits: list[int]) -> list[tuple[int, ...]]:
        return [self._propose(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def release(self, request_id: str) -> None:
        """Nothing is kept."""

    def _propose(self, request: Request, limit: int) -> tuple[int, ...]:
        if request.request_id != "watched":
            return tuple(self._rng.randrange(100) for _ in range(self._rng.randint(0, limit)))
        done = len(request.output_token_ids)
        right = self._expected[done : done + self._rng.randint(0, limit)]
        return tuple(token if self._rng.random() < 0.8 else 1 for token in right)


@pytest.mark.parametrize("name", ["greedy", "seeded"])
def test_with_drafts(rig: Rig, alone: dict[str, Reply], name: str) -> None:
    drafter = _RandomDrafts(alone[name].token_ids, len(rig.prompt))
    engine = rig.engine(64, drafter=drafter)
    reply = rig.run(engine, GREEDY if name == "greedy" else SEEDED, others=7)
    same(reply, alone[name], "drafts")
    counters = engine.scheduler.counters
    assert 0 < counters.accepted_tokens < counters.drafted_tokens


def test_log_probabilities_are_finite(alone: dict[str, Reply]) -> None:
    for reply in alone.values():
        values = [entry.logprob for entry in reply.logprobs]  # type: ignore[attr-defined]
        assert torch.tensor(values).isfinite().all()
