"""Rejection sampling: replies follow the target's own distribution, whatever the drafter's is."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from slimserve.cache.budget import CacheDemand, full_budget
from slimserve.engine.config import Acceptance, CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from slimserve.engine.loop import Engine
from slimserve.engine.request import Request, SamplingParams
from slimserve.engine.sample.batch import SamplingRow
from slimserve.engine.speculate.acceptance import accept_by_ratio
from slimserve.engine.speculate.distribution import Distribution, certain, distribution
from slimserve.engine.speculate.draws import DraftSampler
from slimserve.layers.contract import Caches, StepInput
from slimserve.models.contract import BufferSpec, CacheKind, CacheSpec

VOCAB = 12
GENERATOR = torch.Generator().manual_seed(7)
TARGET = 1.5 * torch.randn(VOCAB, VOCAB, generator=GENERATOR)
DRAFT = 0.7 * TARGET + torch.randn(VOCAB, VOCAB, generator=GENERATOR)


@dataclass(frozen=True)
class MarkovConfig:
    architecture: str = "markov"
    vocab_size: int = VOCAB
    hidden_size: int = VOCAB
    num_layers: int = 1
    max_context: int = 128

    def caches(self, kv_dtype: torch.dtype) -> tuple[CacheSpec, ...]:
        page = tuple(BufferSpec(name, (1, 64, 1), torch.float32) for name in ("k", "v"))
        return (CacheSpec("attention", CacheKind.ATTENTION, (0,), page=page),)


class MarkovModel:
    """The next token depends on the last one alone, so that exact probabilities are known."""

    config = MarkovConfig()

    def __call__(self, step: StepInput, caches: Caches) -> torch.Tensor:
        return torch.nn.functional.one_hot(step.token_ids.long(), VOCAB).float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return TARGET[hidden.argmax(dim=1)]


class MarkovDrafter:
    """Draws from another chain, through the sampler that all drafters use."""

    def __init__(self, config: SpeculationConfig, *, tells: bool = True) -> None:
        self._sampler = DraftSampler(config, VOCAB, frozenset())
        if tells:
            self.distributions = self._sampler.distributions

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[tuple[int, ...]]:
        self._sampler.start(requests)
        proposals = []
        for request, limit in zip(requests, limits, strict=True):
            tokens = [request.output_token_ids[-1]]
            for offset in range(limit):
                tokens.append(int(self._sampler.draw(DRAFT[tokens[-1:]], [request], offset)))
            proposals.append(tuple(tokens[1:]))
        return proposals

    def release(self, request_id: str) -> None:
        self._sampler.release(request_id)


def exact(params: SamplingParams, count: int) -> np.ndarray:
    """Joint probabilities of `count` tokens behind token 0."""
    rows = []
    for last in range(VOCAB):
        found = distribution(TARGET[last].numpy(), SamplingRow(params, 0, 0), None)
        rows.append(np.bincount(found.token_ids, found.probabilities, minlength=VOCAB))
    table = np.stack(rows)
    joint = table[0]
    for _ in range(count - 1):
        joint = joint[..., None] * table.reshape((1,) * (joint.ndim - 1) + table.shape)
    return joint


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square, cells below 5 expected merged into one; 0 where something impossible was drawn."""
    if counts[expected == 0].any():
        return 0.0
    small = (expected < 5) & (expected > 0)
    observed = [*counts[expected >= 5], counts[small].sum()]
    wanted = [*expected[expected >= 5], expected[small].sum()]
    pairs = [(o, w) for o, w in zip(observed, wanted, strict=True) if w > 0]
    statistic = sum((o - w) ** 2 / w for o, w in pairs)
    half = torch.tensor([(len(pairs) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def sample_replies(params: SamplingParams, count: int, *, tells: bool = True) -> tuple[list[tuple[int, ...]], Engine]:
    """Replies of 4 tokens to prompts that end in token 0; the last three of them come from one drafted row at best."""
    speculation = SpeculationConfig(max_draft=3, measured=False, acceptance=Acceptance.REJECTION)
    model = MarkovModel()
    budget = full_budget(model.config.caches(torch.float32), CacheDemand(64, 128, 128))
    config = EngineConfig(
        cache=CacheConfig(prefix_caching=False, budget_bytes=budget),
        scheduler=SchedulerConfig(max_sequences=64, max_context=128, token_budget=512, max_queue=1 << 20),
        speculation=speculation,
    )
    engine = Engine(model, config, drafter=MarkovDrafter(speculation, tells=tells))
    for i in range(count):
        sampling = SamplingParams(params.temperature, params.top_k, params.top_p, seed=1000 + i)
        engine.submit(Request(f"r{i}", [3, 0], sampling, 4, ignore_eos=True))
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
    return [tuple(tokens) for tokens in found.values()], engine


@pytest.mark.parametrize(
    ("params", "count", "tells"),
    [
        pytest.param(SamplingParams(temperature=1.0), 20_000, True, marks=pytest.mark.slow),
        (SamplingParams(temperature=1.0), 4_000, True),
        (SamplingParams(temperature=0.6, top_k=7, top_p=0.9), 4_000, True),
        (SamplingParams(temperature=1.0), 4_000, False),
    ],
    ids=["20,000", "plain", "filtered", "drafter without probabilities"],
)
def test_replies_follow_the_targets_distribution(params: SamplingParams, count: int, tells: bool) -> None:
    replies, engine = sample_replies(params, count, tells=tells)
    counters = engine.scheduler.counters
    assert len(replies) == count and 0.1 < counters.accepted_tokens / counters.drafted_tokens < 0.95
    joint = exact(params, 4)
    table = np.zeros((VOCAB,) * 4)
    for reply, number in Counter(replies).items():
        table[reply] = number
    for position in range(4):
        others = tuple(axis for axis in range(4) if axis != position)
        p = p_value(table.sum(others), count * joint.sum(others))
        print(f"{count:,} replies, token {position + 1}: p = {p:.3f}")
        assert p > 0.001, f"token {position + 1}: p = {p:.5f}"
    for pair in itertools.combinations(range(4), 2):
        others = tuple(axis for axis in range(4) if axis not in pair)
        p = p_value(table.sum(others), count * joint.sum(others))
        assert p > 0.0005, f"tokens {pair} together: p = {p:.5f}"


def test_greedy_requests_accept_the_best_token_only() -> None:
    replies, engine = sample_replies(SamplingParams(temperature=0.0), 50)
    expected, last = [], 0
    for _ in range(4):
        last = int(TARGET[last].argmax())
        expected.append(last)
    assert set(replies) == {tuple(expected)}
    assert engine.scheduler.counters.drafted_tokens > 0


def test_shared_noise_would_be_found() -> None:
    """The check has teeth: drafts that reuse the noise of acceptance bend the distribution."""
    rng = np.random.default_rng(1)
    target = distribution(TARGET[0].numpy(), SamplingRow(SamplingParams(), 0, 0), None)
    source = distribution(DRAFT[0].numpy(), SamplingRow(SamplingParams(), 0, 0), None)
    counts = np.zeros(VOCAB)
    for _ in range(20_000):
        u = rng.random()
        place = min(int(np.searchsorted(np.cumsum(source.probabilities), u)), VOCAB - 1)
        token = int(source.token_ids[place])
        if u * source.of(token) >= target.of(token):
            left = target.without(source)
            token = int(rng.choice(left.token_ids, p=left.probabilities))
        counts[token] += 1
    assert p_value(counts, 20_000 * target.probabilities) < 1e-6


def test_distributions() -> None:
    one = Distribution(np.array([2, 5, 9]), np.array([0.5, 0.25, 0.25]))
    assert (one.of(5), one.of(4), one.of(10)) == (0.25, 0.0, 0.0)
    left = one.without(Distribution(np.array([2, 9]), np.array([0.6, 0.4])))
    assert left.token_ids.tolist() == [5] and left.probabilities.tolist() == [1.0]
    assert one.without(one) is one
    assert certain(7).without(certain(3)).token_ids.tolist() == [7]


def test_a_draft_that_the_filters_exclude_is_refused() -> None:
    params = SamplingParams(temperature=1.0, top_k=2)
    logits = torch.tensor([[0.0, 5.0, 4.0, 1.0]] * 2)
    rows = [SamplingRow(params, seed, 5) for seed in (1, 1)]
    for seed in range(50):
        rows = [SamplingRow(params, seed, position) for position in (5, 6)]
        tokens = accept_by_ratio([3], [certain(3)], logits, rows, 4)
        assert len(tokens) == 1 and tokens[0] in (1, 2)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=1.0), SamplingParams(temperature=0.8, top_k=12, top_p=0.95)],
    ids=["plain", "filtered"],
)
def test_a_walk_among_candidates_leaves_the_targets_distribution(params: SamplingParams) -> None:
    """DFlash2 draws among its 16 best candidates; tokens outside of them come from the residual alone."""
    rng = np.random.default_rng(3)
    vocab, count = 40, 8_000
    target = torch.tensor(1.5 * rng.standard_normal((2, vocab)), dtype=torch.float32)
    guess = (target[0].numpy() + 0.8 * rng.standard_normal(vocab)).astype(np.float32)
    ids = np.argsort(-guess)[:16].astype(np.int64)
    scores = guess[ids]
    sampler = DraftSampler(SpeculationConfig(acceptance=Acceptance.REJECTION), vocab, frozenset())
    counts, drafted, accepted = np.zeros(vocab), np.zeros(vocab), 0
    for seed in range(count):
        request = Request(f"r{seed}", [1, 2], params, 4)
        request.output_token_ids.append(3)
        request.seed = seed
        sampler.start([request])
        token = int(ids[sampler.draw_among(request, 0, ids, scores)])
        rows = [SamplingRow(params, seed, position) for position in (3, 4)]
        tokens = accept_by_ratio([token], sampler.distributions(request.request_id), target, rows, vocab)
        sampler.release(request.request_id)
        drafted[token] += 1
        counts[tokens[0]] += 1
        accepted += len(tokens) == 2
    wanted = distribution(target[0].numpy(), SamplingRow(params, 0, 0), None)
    expected = np.bincount(wanted.token_ids, wanted.probabilities, minlength=vocab)
    p = p_value(counts, count * expected)
    assert p > 0.001, f"p = {p:.5f}"
    order = np.argsort(ids)
    own = distribution(scores[order], SamplingRow(params, 0, 0), None)
    expected = np.zeros(vocab)
    expected[ids[order][own.token_ids]] = own.probabilities
    p = p_value(drafted, count * expected)
    assert p > 0.001, f"drafts: p = {p:.5f}"
    assert 0.3 < accepted / count < 0.95
