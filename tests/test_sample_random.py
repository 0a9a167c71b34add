"""Philox4x32-10 against its published answers, and the uniforms and Gumbel draws made from it."""

from __future__ import annotations

import numpy as np
import pytest

from slimserve.ops.reference import random as rnd

KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_answers(counter, key, expected) -> None:
    words = tuple(np.full(3, word, dtype=np.uint64) for word in counter)
    assert [int(word[1]) for word in rnd.philox4x32(words, key)] == list(expected)


def test_words_depend_on_seed_position_purpose_and_token_only() -> None:
    ids = np.arange(40000)
    whole = rnd.random_bits(ids, 7, 5, rnd.Purpose.TARGET)
    assert np.array_equal(whole[39000:], rnd.random_bits(ids[39000:], 7, 5, rnd.Purpose.TARGET))
    for seed, position, purpose in ((8, 5, 0), (7 + (1 << 32), 5, 0), (7, 6, 0), (7, 5 + (1 << 32), 0), (7, 5, 1)):
        other = rnd.random_bits(ids, seed, position, rnd.Purpose(purpose))
        assert (other == whole).mean() < 0.001


def test_uniforms_stay_inside_and_gumbel_draws_are_bounded() -> None:
    extremes = np.asarray([0, 1, 1 << 31, (1 << 32) - 1], dtype=np.uint64)
    v = rnd.uniform(extremes)
    assert (v > 0).all() and (v < 1).all()
    draws = rnd.gumbel(extremes)
    assert np.isfinite(draws).all() and draws.max() < rnd.GUMBEL_MAX
    exact = -np.log(-np.log1p(-v.astype(np.float64)))
    assert np.abs(draws - exact).max() < 1e-4


def test_gumbel_matches_float64_and_its_distribution() -> None:
    bits = rnd.random_bits(np.arange(200000), 1, 2, rnd.Purpose.DRAFT)
    draws = rnd.gumbel(bits)
    exact = -np.log(-np.log1p(-rnd.uniform(bits).astype(np.float64)))
    assert np.abs(draws - exact).max() < 1e-4
    assert abs(draws.mean() - 0.5772) < 0.01 and abs(draws.var() - np.pi**2 / 6) < 0.03
