"""Counter-based random numbers: Philox4x32-10, one 32-bit word per (seed, position, purpose, token id).

The generator is Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Key = the
64-bit seed (low word first); counter = (token id, position low, position high, purpose); the first output word is
used. A draw therefore depends on its own request, position and purpose, and on nothing else in the step.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]
FloatArray = npt.NDArray[np.float32]

MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
ROUNDS = 10
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_CHUNK = 16384

SERIES_BELOW = 1.0 / 64.0
"""Below this uniform, -log(1 - v) is taken from its series: the subtraction would round the small values that win."""

GUMBEL_MAX = 23.0
"""No Gumbel draw exceeds this: the smallest uniform is 2^-33, and -log of it is 22.87."""


class Purpose(IntEnum):
    """What a random number decides; draws for different purposes are independent."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def philox4x32(counter: tuple[UInt64Array, ...], key: tuple[int, int]) -> tuple[UInt64Array, ...]:
    """Ten rounds over four counter words (arrays of uint64 below 2^32); returns the four output words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product_0 = c0 * np.uint64(MULTIPLIER_0)
        product_1 = c2 * np.uint64(MULTIPLIER_1)
        c0 = (product_1 >> _SHIFT) ^ c1 ^ np.uint64(k0)
        c1 = product_1 & _MASK
        c2 = (product_0 >> _SHIFT) ^ c3 ^ np.uint64(k1)
        c3 = product_0 & _MASK
        k0, k1 = (k0 + WEYL_0) & 0xFFFFFFFF, (k1 + WEYL_1) & 0xFFFFFFFF
    return c0, c1, c2, c3


def random_bits(token_ids: npt.NDArray[np.int64], seed: int, position: int, purpose: Purpose) -> UInt64Array:
    """The 32-bit word of each token id, as uint64."""
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    out = np.empty(token_ids.shape, dtype=np.uint64)
    for start in range(0, token_ids.size, _CHUNK):
        c0 = token_ids[start : start + _CHUNK].astype(np.uint64)
        c1, c2, c3 = (np.full_like(c0, word) for word in (position & 0xFFFFFFFF, position >> 32, int(purpose)))
        out[start : start + _CHUNK] = philox4x32((c0, c1, c2, c3), key)[0]
    return out


def uniform(bits: UInt64Array) -> FloatArray:
    """(bits + 0.5) / 2^32 in float32, below 1; small values keep their full relative precision."""
    value = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    return np.minimum(value, np.float32(1.0 - 2.0**-24))


def gumbel(bits: UInt64Array) -> FloatArray:
    """Standard Gumbel draws: -log(E) with E = -log(1 - uniform)."""
    v = uniform(bits)
    one = np.float32(1.0)
    series = v * (one + v * (np.float32(0.5) + v * (np.float32(1.0 / 3.0) + v * np.float32(0.25))))
    exponential = np.where(v < np.float32(SERIES_BELOW), series, -np.log(one - v))
    result: FloatArray = -np.log(exponential)
    return result
