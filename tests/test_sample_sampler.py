"""The sampler against naive definitions: filters, penalties, bans, log probabilities, determinism."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from slimserve.engine.request import SamplingParams
from slimserve.engine.sample import LOGPROB_FLOOR, SamplingRow, TokenCounts, build_batch, sample, score
from slimserve.engine.sample.host import kept_tokens
from slimserve.ops.reference.random import Purpose, gumbel, random_bits


def row(seed: int = 1, position: int = 10, **options) -> SamplingRow:
    names = ("num_output_tokens", "end_token_ids", "counts", "drafted", "allowed_bitmask")
    own = {name: options.pop(name) for name in names if name in options}
    return SamplingRow(SamplingParams(**options), seed, position, **own)


def draw(x: np.ndarray, *rows: SamplingRow) -> list[int]:
    table = torch.from_numpy(np.broadcast_to(x, (len(rows), x.shape[-1])).astype(np.float32).copy())
    return sample(table, build_batch(rows, x.shape[-1])).token_ids.tolist()


def naive_kept(x: np.ndarray, params: SamplingParams) -> set[int]:
    order = sorted(range(x.size), key=lambda i: (-x[i], i))
    if 0 < params.top_k < x.size:
        order = order[: params.top_k]
    scaled = x.astype(np.float64) / params.temperature
    p = np.exp(scaled - scaled.max())
    total, cumulative, kept = sum(p[i] for i in order), 0.0, []
    for i in order:
        if params.top_p < 1.0 and kept and cumulative >= params.top_p * total:
            break
        kept.append(i)
        cumulative += p[i]
    return {i for i in kept if p[i] >= params.min_p * (1 - 1e-6)}


@pytest.mark.parametrize("vocab", [5, 50, 3000])
def test_filters_keep_what_their_definitions_keep(vocab: int) -> None:
    rng = np.random.default_rng(0)
    for trial in range(60):
        x = (rng.standard_normal(vocab) * 2).astype(np.float32)
        if trial % 3 == 0:
            x = np.round(x)  # many ties
        params = SamplingParams(
            temperature=float(rng.choice([0.3, 1.0, 2.5])),
            top_k=int(rng.choice([0, 1, 3, 40, 2 * vocab])),
            top_p=float(rng.choice([1.0, 0.95, 0.5, 0.01])),
            min_p=float(rng.choice([0.0, 0.1, 1.0])),
        )
        ids = kept_tokens(x, params)
        kept = set(range(vocab)) if ids is None else set(ids.tolist())
        assert kept == naive_kept(x, params), params


def test_top_p_widens_its_candidates_until_the_mass_is_reached() -> None:
    x = np.zeros(20000, dtype=np.float32)  # flat: half the mass is half the vocabulary
    ids = kept_tokens(x, SamplingParams(top_p=0.5))
    assert ids is not None and ids.tolist() == list(range(10000))


@pytest.mark.parametrize("temperature", [0.2, 1.0, 3.0])
def test_unfiltered_draw_equals_the_full_gumbel_argmax(temperature: float) -> None:
    rng = np.random.default_rng(1)
    x = (rng.standard_normal(30000) * 3).astype(np.float32)
    for seed in range(20):
        noise = gumbel(random_bits(np.arange(x.size), seed, 3, Purpose.TARGET))
        expected = int(((x - x.max()) * np.float32(1 / temperature) + noise).argmax())
        assert draw(x, row(seed, 3, temperature=temperature)) == [expected]


def test_draws_follow_the_distribution() -> None:
    x = np.log(np.asarray([0.5, 0.25, 0.15, 0.1], dtype=np.float32))
    rows = [row(seed=9, position=i) for i in range(20000)]
    counts = np.bincount(draw(x, *rows), minlength=4) / 20000
    assert np.abs(counts - np.exp(x)).max() < 0.015


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    x = np.asarray([1.0, 7.0, 7.0, 7.0, 2.0], dtype=np.float32)
    assert draw(x, row(temperature=0.0), row(temperature=1e-9)) == [1, 1]


def test_a_row_does_not_depend_on_the_rows_beside() -> None:
    torch.manual_seed(0)
    logits = torch.randn(12, 5000) * 3
    rows = [
        row(seed=r, position=r, temperature=[0.0, 0.7, 1.3][r % 3], top_p=[1.0, 0.9][r % 2], top_k=[0, 50, 7][r % 3])
        for r in range(12)
    ]
    together = sample(logits, build_batch(rows, 5000)).token_ids
    for r in range(12):
        assert sample(logits[r : r + 1], build_batch([rows[r]], 5000)).token_ids[0] == together[r]


def test_penalties_follow_their_definitions() -> None:
    x = np.asarray([2.0, -2.0, 1.0, 0.5, 3.0], dtype=np.float32)
    counts = TokenCounts([0, 1, 1], [4, 4])
    counts.append(2)
    options = {"repetition_penalty": 2.0, "presence_penalty": 0.25, "frequency_penalty": 0.125}
    batch = build_batch([row(counts=counts, drafted=(4, 3), **options)], 5)
    edit = batch.edits[0]
    assert edit is not None
    expected = [2.0 / 2, -2.0 * 2, 1.0 / 2 - 0.375, 0.5 / 2 - 0.375, 3.0 / 2 - 0.25 - 3 * 0.125]
    from slimserve.engine.sample.host import apply_edit

    assert np.allclose(apply_edit(x, edit), expected)
    with pytest.raises(ValueError, match="token counts"):
        build_batch([row(**options)], 5)


def test_token_counts_grow_with_the_output() -> None:
    counts = TokenCounts([3, 3, 5])
    for token in [7, 3, *range(100, 200), 7]:
        counts.append(token)
    found = dict(zip(counts.token_ids.tolist(), counts.output_counts.tolist(), strict=True))
    assert found[3] == 1 and found[5] == 0 and found[7] == 2 and found[150] == 1 and len(found) == 103


def test_bias_bans_allowed_and_min_tokens() -> None:
    x = np.asarray([5.0, 4.0, 3.0, 2.0, 1.0], dtype=np.float32)
    greedy = {"temperature": 0.0}
    bitmask = np.asarray([0b11000], dtype=np.int32)
    rows = [
        row(**greedy, logit_bias=((4, 10.0), (99, 100.0), (-1, 100.0))),
        row(**greedy, banned_token_ids=(0, 1)),
        row(**greedy, allowed_token_ids=(3, 2, 77)),
        row(**greedy, min_tokens=2, num_output_tokens=1, end_token_ids=frozenset({0})),
        row(**greedy, min_tokens=2, num_output_tokens=1, drafted=(4,), end_token_ids=frozenset({0})),
        row(**greedy, allowed_bitmask=bitmask),
        row(**greedy, allowed_bitmask=bitmask, allowed_token_ids=(4, 0)),
    ]
    assert draw(x, *rows) == [4, 2, 2, 1, 0, 3, 4]
    drawn = draw(x, *[row(position=i, banned_token_ids=(0, 1, 2)) for i in range(50)])
    assert set(drawn) <= {3, 4}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}])
def test_no_logits_produce_an_id_out_of_range(bad: float, options: dict) -> None:
    mixed = np.random.default_rng(2).standard_normal(64).astype(np.float32)
    mixed[[3, 60]] = bad
    for x in (mixed, np.full(64, bad, dtype=np.float32)):
        rows = [row(position=i, logprobs=5, **options) for i in range(5)]
        table = torch.from_numpy(np.tile(x, (5, 1)))
        batch = build_batch(rows, 64)
        tokens, found = sample(table, batch).to_host(batch)
        assert all(0 <= token < 64 for token in tokens)
        assert all(math.isfinite(f.logprob) and all(math.isfinite(v) for _, v in f.top) for f in found if f)
    if not bad > 0:
        assert draw(mixed, row(temperature=0.0)) == [int(np.nanargmax(np.where(np.isinf(mixed), -1e9, mixed)))]


def test_everything_banned_still_gives_an_id() -> None:
    x = np.zeros(4, dtype=np.float32)
    assert 0 <= draw(x, row(allowed_token_ids=()))[0] < 4


def test_logprobs_are_of_the_raw_distribution_and_finite() -> None:
    torch.manual_seed(1)
    logits = torch.randn(4, 300) * 4
    logits[0, 5] = -math.inf
    options = {"temperature": 0.5, "banned_token_ids": (7,)}
    rows = [row(position=r, logprobs=[0, 3, 20, None][r], **options) for r in range(4)]
    batch = build_batch(rows, 300)
    tokens, found = sample(logits, batch).to_host(batch)
    expected = torch.log_softmax(logits.double(), -1)
    assert found[3] is None
    for r, count in enumerate((0, 3, 20)):
        own = found[r]
        assert own is not None and len(own.top) == count
        assert own.logprob == pytest.approx(float(expected[r, tokens[r]]), abs=1e-4)
        values, ids = expected[r].topk(count) if count else ([], [])
        assert [i for i, _ in own.top] == [int(i) for i in ids]
        assert [v for _, v in own.top] == pytest.approx([float(v) for v in values], abs=1e-4)
    given = score(logits, torch.tensor([5, 1, 2, 3]), 2)
    assert given.logprobs is not None and given.logprobs[0] == LOGPROB_FLOOR
    assert given.logprobs[2] == pytest.approx(float(expected[2, 2]), abs=1e-4)


def test_a_wrong_shape_or_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="expected float32"):
        sample(torch.zeros(2, 5), build_batch([row()], 5))
    with pytest.raises(ValueError, match="expected float32"):
        sample(torch.zeros(1, 5, dtype=torch.bfloat16), build_batch([row()], 5))
