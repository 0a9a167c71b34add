"""Decoding of the I formats whose weights are rows of fixed grids.

All fields of a row and dot of 32 weights are int32 words: grid indices (a byte per grid row), sign bits (bit k for
weight k), and the high bits of the indices; see `relayout`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slimserve.ops.triton.tiles import across_rows, along_rows, load_word


@triton.jit
def grid_tile(
    ptr, table_ptr, step, j, n, rows, KD: tl.constexpr, WORDS: tl.constexpr, DOTS: tl.constexpr,
    GRID_ROW: tl.constexpr, GRID_HIGH: tl.constexpr, DELTA: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Signed grid values [BN, KD] of dot j as bfloat16.

    Words of a step, after the scale words: signs (one per 32 weights; none with DELTA), index bytes (32 // GRID_ROW
    per 32 weights), then GRID_HIGH further index bits per grid row, packed low first; with DELTA the topmost of those
    bits is the sign of 1/8, and the table holds eight times the grid.
    """
    k = tl.arange(0, KD) + (j * KD) % 32
    block = (j * KD) // 32
    BLOCKS: tl.constexpr = DOTS * KD // 32
    INDEX_WORDS: tl.constexpr = 8 // GRID_ROW
    SIGN_WORDS: tl.constexpr = 0 if DELTA else BLOCKS
    HIGH_BITS: tl.constexpr = GRID_HIGH * (32 // GRID_ROW)
    FIRST: tl.constexpr = WORDS - SIGN_WORDS - BLOCKS * INDEX_WORDS - (BLOCKS * HIGH_BITS) // 32
    row_of_k = k // GRID_ROW
    if INDEX_WORDS == 1:
        word = load_word(ptr, step, FIRST + SIGN_WORDS + block, n, rows, WORDS)
        word = along_rows(word, SWAP)
    else:
        low = load_word(ptr, step, FIRST + SIGN_WORDS + 2 * block, n, rows, WORDS)
        high = load_word(ptr, step, FIRST + SIGN_WORDS + 2 * block + 1, n, rows, WORDS)
        word = tl.where(across_rows(row_of_k < 4, SWAP), along_rows(low, SWAP), along_rows(high, SWAP))
    index = (word >> across_rows(8 * (row_of_k % 4), SWAP)) & 255
    if GRID_HIGH > 0:
        bit = block * HIGH_BITS
        extra = load_word(ptr, step, FIRST + SIGN_WORDS + BLOCKS * INDEX_WORDS + bit // 32, n, rows, WORDS)
        extra = (along_rows(extra, SWAP) >> across_rows(bit % 32 + GRID_HIGH * row_of_k, SWAP)) & ((1 << GRID_HIGH) - 1)
        if DELTA:
            index = index | ((extra & 7) << 8)
        else:
            index = index | (extra << 8)
    value = tl.load(table_ptr + index * GRID_ROW + across_rows(k % GRID_ROW, SWAP)).to(tl.float32)
    if DELTA:
        value = value + tl.where((extra >> 3) > 0, -1.0, 1.0)
    else:
        signs = load_word(ptr, step, FIRST + block, n, rows, WORDS)
        value = tl.where(((along_rows(signs, SWAP) >> across_rows(k, SWAP)) & 1) > 0, -value, value)
    return value.to(tl.bfloat16)
