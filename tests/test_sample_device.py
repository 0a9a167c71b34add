"""The device sampler's kernels against the host sampler; under the interpreter they run on CPU tensors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from triton_device import DEVICE, ON_DEVICE, triton_marks

from slimserve.engine.request import SamplingParams
from slimserve.engine.sample import SamplingRow, TokenCounts, build_batch, device, host
from slimserve.ops.reference.random import Purpose, gumbel, random_bits

pytestmark = triton_marks()
VOCAB = 248320 if ON_DEVICE else 5000


def rows_of_every_kind(count: int) -> list[SamplingRow]:
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_k": 20, "top_p": 0.95},
        {"temperature": 0.6, "top_p": 0.9},
        {"temperature": 1.5, "min_p": 0.05},
        {"temperature": 1.0, "top_k": 3, "banned_token_ids": (5, 7), "logit_bias": ((9, 4.0),)},
        {"temperature": 0.0, "allowed_token_ids": (3, 4, 900)},
        {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.5, "top_k": 50},
    ]
    return [
        SamplingRow(SamplingParams(**kinds[r % len(kinds)]), 2**63 + r, r, counts=TokenCounts([1, 2, 900], [4, 4, 900]))
        for r in range(count)
    ]


def test_uniform_words_are_those_of_the_reference() -> None:
    from triton_words import words_kernel

    tokens = np.concatenate((np.arange(200), np.arange(248320 - 56, 248320)))
    seed, position = 0xFEDCBA9876543210, 1048575
    out = torch.empty(256, dtype=torch.int64, device=DEVICE)
    noise = torch.empty(256, device=DEVICE)
    ids = torch.from_numpy(tokens).to(DEVICE)
    words_kernel[(1,)](out, noise, ids, position, 0, 1, seed & 0xFFFFFFFF, seed >> 32, BLOCK=256)
    expected = random_bits(tokens, seed, position, Purpose.DRAFT)
    assert np.array_equal(out.cpu().numpy().astype(np.uint64), expected)
    assert np.abs(noise.cpu().numpy() - gumbel(expected)).max() < 2e-5


def test_device_draws_equal_host_draws() -> None:
    torch.manual_seed(0)
    count = 64 if ON_DEVICE else 16
    logits = torch.randn(count, VOCAB) * 3
    batch = build_batch(rows_of_every_kind(count), VOCAB)
    got = device.sample_device(logits.to(DEVICE), batch).tolist()
    expected = [
        host.sample_row(logits[r].numpy(), row, batch.edits[r], batch.purpose) for r, row in enumerate(batch.rows)
    ]
    # Approximate exp and log may flip a near-tie between two draws, not more.
    assert sum(a != b for a, b in zip(got, expected, strict=True)) <= (1 if ON_DEVICE else 0)


def test_a_row_alone_equals_the_row_among_others() -> None:
    torch.manual_seed(1)
    logits = (torch.randn(24, VOCAB) * 3).to(DEVICE)
    rows = rows_of_every_kind(24)
    together = device.sample_device(logits, build_batch(rows, VOCAB))
    for r in range(24):
        alone = device.sample_device(logits[r : r + 1], build_batch(rows[r : r + 1], VOCAB))
        assert alone[0] == together[r]


def test_filters_beyond_the_candidates_fall_back_to_the_whole_row() -> None:
    flat = torch.zeros(3, VOCAB)
    rows = [SamplingRow(SamplingParams(**o), 5, 5) for o in ({"top_p": 0.9}, {"min_p": 0.5}, {"top_k": 2000})]
    batch = build_batch(rows, VOCAB)
    expected = [host.sample_row(flat[r].numpy(), row, None, batch.purpose) for r, row in enumerate(rows)]
    assert device.sample_device(flat.to(DEVICE), batch).tolist() == expected
    assert max(expected) > device.CANDIDATES


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_logits_give_ids_in_range_and_finite_logprobs(bad: float) -> None:
    mixed = torch.randn(8, VOCAB)
    mixed[:, ::7] = bad
    for logits in (mixed, torch.full((8, VOCAB), bad)):
        tokens = device.sample_device(logits.to(DEVICE), build_batch(rows_of_every_kind(8), VOCAB))
        assert ((tokens >= 0) & (tokens < VOCAB)).all()
        chosen, ids, values = device.score_device(logits.to(DEVICE), tokens, 5)
        assert torch.isfinite(chosen).all() and torch.isfinite(values).all() and ((ids >= 0) & (ids < VOCAB)).all()


def test_log_probabilities_match_float64() -> None:
    logits = torch.randn(6, VOCAB) * 5
    tokens = torch.arange(6)
    chosen, ids, values = device.score_device(logits.to(DEVICE), tokens.to(DEVICE), 10)
    expected = torch.log_softmax(logits.double(), -1)
    assert torch.allclose(chosen.cpu().double(), expected.gather(1, tokens[:, None])[:, 0], atol=1e-4)
    best = expected.topk(10)
    assert torch.equal(ids.cpu(), best.indices) and torch.allclose(values.cpu().double(), best.values, atol=1e-4)
