"""Decoding of the I formats whose weights are rows of fixed grids.

IQ2_XXS has planes of its own (`pairs_tile`). All fields of the others, for a row and dot of 32 weights, are int32
words: grid indices (a byte per grid row), sign bits (bit k for weight k), and the high bits of the indices; see
`relayout`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slimserve.ops.triton.tiles import place_of


@triton.constexpr_function
def _pairs_row(row: int, dot: int) -> str:
    """Assembly for eight weights of a row: one look-up, then per half an operation that signs four selectors, and per
    pair a permutation that makes two bfloat16 numbers of {8, 25, 43} with their signs."""
    index, signs = f"${8 + dot // 2 * 2}", f"${9 + dot // 2 * 2}"
    lines = [
        f"prmt.b32 i, {index}, 0, {0x4440 + 2 * (dot % 2) + row}; mad.wide.u32 place, i, 8, $12;",
        "ld.global.nc.v2.b32 {lo, hi}, [place];",
    ]
    for half, selector in enumerate(("lo", "hi")):
        bit = 4 * (dot % 2) + 2 * row + half
        shift = f"shl.b32 s, {signs}, {5 - bit};" if bit < 5 else f"shr.b32 s, {signs}, {bit - 5};"
        lines.append(f"{shift} lop3.b32 {selector}, s, 538976288, {selector}, 106;")
        # Outputs stand in the order of a thread's registers: half, then pair, then row.
        lines.append(f"prmt.b32 ${4 * half + row}, 2934784, 3267445313, {selector}; shr.b32 s, {selector}, 16;")
        lines.append(f"prmt.b32 ${4 * half + 2 + row}, 2934784, 3267445313, s;")
    return " ".join(lines)


@triton.constexpr_function
def _pairs_program(dot: int) -> str:
    """Assembly of a dot for the sixteen elements of two rows that a thread holds of two left operands."""
    return "{ .reg .b32 i, s, lo, hi; .reg .b64 place; " + _pairs_row(0, dot) + " " + _pairs_row(1, dot) + " }"


PAIRS_OPERANDS = tl.constexpr(",".join(["=r"] * 8 + ["r"] * 4 + ["l"] * 8))


@triton.jit
def pairs_tiles(c, table_ptr, DOT: tl.constexpr):
    """Signed grid values of dot DOT (0 to 3) of a fragment c [T, 256], two tiles in fragment order.

    A fragment holds for every thread of a left operand two pairs of 32-bit words: four grid indices (dot, then row)
    and signs, where bit 4 (dot mod 2) + 2 row + half of byte b is the sign of weight 4 half + b. A thread holds whole
    grid rows, so that one look-up serves eight weights; the table has a selector of eight bits per weight, of which
    bit 5 is the sign.
    """
    table = tl.broadcast_to(table_ptr.to(tl.int64), c.shape)
    return tl.inline_asm_elementwise(
        _pairs_program(DOT), PAIRS_OPERANDS, [c, table], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=8
    )


@triton.jit
def plain_pairs(codes_ptr, table_ptr, step, j, n, k, tiles, COUNT: tl.constexpr):
    """The same values of dot j of a step, for rows n and places k of its operands, each weight's fields loaded."""
    element = place_of(k, 32)
    lane = (n % 8)[:, None] * 4 + (k // 2 % 4)[None, :]
    fragment = (tl.cast(step, tl.int64) * tiles + n // 16) * COUNT + j // 4
    words = codes_ptr.to(tl.pointer_type(tl.int32)) + fragment[:, None] * 128 + 4 * lane + 2 * (j % 4 // 2)
    row = (n % 16 // 8)[:, None]
    index = (tl.load(words) >> (8 * (2 * (j % 2) + row))) & 255
    half, byte = (element % 8 // 4)[None, :], (element % 4)[None, :]
    selector = (tl.load(table_ptr + 2 * index + half) >> (8 * byte)) & 255
    value = tl.where(selector == 0x40, 8, tl.where(selector == 0x41, 25, 43))
    negative = (tl.load(words + 1) >> (8 * byte + 4 * (j % 2) + 2 * row + half)) & 1
    return tl.where(negative > 0, -value, value).to(tl.float32).to(tl.bfloat16)


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
