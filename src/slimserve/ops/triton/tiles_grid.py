"""Decoding of the I formats whose weights are rows of fixed grids.

IQ2_XXS multiplies as integers (`integers`). All fields of the others, for a row and dot of 32 weights, are int32
words: grid indices (a byte per grid row), sign bits (bit k for weight k), and the high bits of the indices; see
`relayout`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load_word(ptr, step, word, n, rows, WORDS: tl.constexpr):
    """One int32 per row [BN]; words are laid out [steps, WORDS, rows]."""
    return tl.load(ptr + (tl.cast(step, tl.int64) * WORDS + word) * rows + n)


@triton.jit
def grid_tile(
    ptr, table_ptr, step, j, n, place, rows, KD: tl.constexpr, WORDS: tl.constexpr, DOTS: tl.constexpr,
    GRID_ROW: tl.constexpr, GRID_HIGH: tl.constexpr, DELTA: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Signed grid values of elements `place` [W] of dot j of rows n as bfloat16 [BN, W].

    Words of a step, after the scale words: signs (one per 32 weights; none with DELTA), index bytes (32 // GRID_ROW
    per 32 weights), then GRID_HIGH further index bits per grid row, packed low first; with DELTA the topmost of those
    bits is the sign of 1/8, and the table holds eight times the grid.
    """
    k = place + (j * KD) % 32
    block = (j * KD) // 32
    BLOCKS: tl.constexpr = DOTS * KD // 32
    INDEX_WORDS: tl.constexpr = 8 // GRID_ROW
    SIGN_WORDS: tl.constexpr = 0 if DELTA else BLOCKS
    HIGH_BITS: tl.constexpr = GRID_HIGH * (32 // GRID_ROW)
    FIRST: tl.constexpr = WORDS - SIGN_WORDS - BLOCKS * INDEX_WORDS - (BLOCKS * HIGH_BITS) // 32
    row_of_k = k // GRID_ROW
    if INDEX_WORDS == 1:
        word = _load_word(ptr, step, FIRST + SIGN_WORDS + block, n, rows, WORDS)
        word = word[:, None]
    else:
        low = _load_word(ptr, step, FIRST + SIGN_WORDS + 2 * block, n, rows, WORDS)
        high = _load_word(ptr, step, FIRST + SIGN_WORDS + 2 * block + 1, n, rows, WORDS)
        word = tl.where((row_of_k < 4)[None, :], low[:, None], high[:, None])
    index = (word >> (8 * (row_of_k % 4))[None, :]) & 255
    if GRID_HIGH > 0:
        bit = block * HIGH_BITS
        extra = _load_word(ptr, step, FIRST + SIGN_WORDS + BLOCKS * INDEX_WORDS + bit // 32, n, rows, WORDS)
        extra = (extra[:, None] >> (bit % 32 + GRID_HIGH * row_of_k)[None, :]) & ((1 << GRID_HIGH) - 1)
        if DELTA:
            index = index | ((extra & 7) << 8)
        else:
            index = index | (extra << 8)
    at = table_ptr + index * GRID_ROW + (k % GRID_ROW)[None, :]
    if ASM:
        # A load that stays here: as an ordinary one the compiler would turn it into asynchronous copies past the
        # first-level cache, and every processor would queue for the same few lines of the second.
        value = tl.inline_asm_elementwise(
            "ld.global.nc.b16 $0, [$1];", "=h,l", [at.to(tl.int64)], dtype=tl.bfloat16, is_pure=True, pack=1
        ).to(tl.float32)
    else:
        value = tl.load(at).to(tl.float32)
    if DELTA:
        value = value + tl.where((extra >> 3) > 0, -1.0, 1.0)
    else:
        signs = _load_word(ptr, step, FIRST + block, n, rows, WORDS)
        value = tl.where(((signs[:, None] >> k[None, :]) & 1) > 0, -value, value)
    return value.to(tl.bfloat16)
