"""Candidates of a Gumbel draw: the winner of the reference arithmetic is always among them, and they are few."""

from __future__ import annotations

import numpy as np
import pytest

from slimserve.ops.cpu.build import find_compiler
from slimserve.ops.cpu.sampling import gumbel_candidates
from slimserve.ops.reference.random import Purpose, gumbel, random_bits

if find_compiler() is None:
    pytest.skip("no C++ compiler: the CPU kernels cannot be built", allow_module_level=True)


@pytest.mark.parametrize("spread", [0.05, 1.0, 6.0])
def test_the_reference_winner_is_a_candidate(spread: float) -> None:
    rng = np.random.default_rng(int(spread * 100))
    for _ in range(60):
        size = int(rng.integers(1, 40_000))
        x = (rng.standard_normal(size) * spread).astype(np.float32)
        x[rng.random(size) < 0.2] = -np.inf
        x[int(rng.integers(size))] = 1.0
        inverse = np.float32(1.0 / rng.choice([0.3, 1.0, 2.0]))
        seed, position = int(rng.integers(1 << 63)) * 2 + 1, int(rng.integers(1 << 40))
        purpose = Purpose(int(rng.integers(4)))
        noise = gumbel(random_bits(np.arange(size), seed, position, purpose))
        winner = int(((x - x.max()) * inverse + noise).argmax())
        found = gumbel_candidates(x, float(inverse), seed, position, purpose)
        assert found is not None
        assert winner in found
        assert found.size < 16
        assert (np.diff(found) > 0).all()


def test_masses_of_equals_and_nothing_at_all_are_left_to_the_caller() -> None:
    found = gumbel_candidates(np.full(1000, -np.inf, dtype=np.float32), 1.0, 1, 1, Purpose.TARGET)
    assert found is None
