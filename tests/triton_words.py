"""A kernel that writes out the sampler's random words and draws, for comparison with the reference."""

from __future__ import annotations

import triton
import triton.language as tl

from slimserve.ops.triton.sampling import gumbel_noise, philox_word


@triton.jit
def words_kernel(out_ptr, noise_ptr, token_ptr, low, high, purpose, seed_low, seed_high, BLOCK: tl.constexpr):
    """Words and Gumbel draws of BLOCK token ids."""
    at = tl.arange(0, BLOCK)
    token = tl.load(token_ptr + at).to(tl.uint32)
    zero = token * 0
    word = philox_word(
        token,
        zero + tl.cast(low, tl.uint32),
        zero + tl.cast(high, tl.uint32),
        zero + tl.cast(purpose, tl.uint32),
        zero + tl.cast(seed_low, tl.uint32),
        zero + tl.cast(seed_high, tl.uint32),
    )
    tl.store(out_ptr + at, word.to(tl.int64))
    tl.store(noise_ptr + at, gumbel_noise(word, 1.0 / 64.0))
