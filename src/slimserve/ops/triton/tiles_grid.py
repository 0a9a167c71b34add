"""Decoding of the I formats whose weights are rows of fixed grids.

All fields of a row and dot of 32 weights are int32 words: grid indices (a byte per grid row), sign bits (bit k for
weight k), and the high bits of the indices; see `relayout`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slimserve.ops.triton.tiles import across_rows, along_rows, load_word


@triton.constexpr_function
def _pairs_row(word: str, out: tuple[str, str, str, str], odd: int) -> str:
    """Assembly for eight weights of a row: one look-up, then per pair a permutation that makes two bfloat16 numbers
    of {8, 25, 43} from a selector, and an operation that signs them."""
    lines = [
        f"prmt.b32 i, {word}, 0, {17472 + 2 * odd}; mad.wide.u32 place, i, 8, table;",
        "ld.global.nc.v2.b32 {lo, hi}, [place];",
    ]
    for pair, target in enumerate(out):
        selector = ("lo", "hi")[pair // 2]
        if pair % 2:
            lines.append(f"shr.b32 {selector}, {selector}, 16;")
        lines.append(f"shl.b32 s, {word}, {pair + 4 * odd}; prmt.b32 v, 0, 1111567560, {selector};")
        lines.append(f"lop3.b32 {target}, s, 2147516416, v, 106;")
    return " ".join(lines)


@triton.constexpr_function
def _pairs_program(dot: int) -> str:
    """Assembly of dot `dot` for the sixteen elements of two rows that a thread holds of a left operand [16, 32]."""
    first = 8 + 2 * (dot // 2)
    return (
        "{ .reg .b32 i, s, v, lo, hi; .reg .b64 place, table; ld.param.u64 table, [linear_kernel_param_5];"
        + _pairs_row(f"${first}", ("$0", "$2", "$4", "$6"), dot % 2)
        + _pairs_row(f"${first + 1}", ("$1", "$3", "$5", "$7"), dot % 2)
        + " }"
    )


PAIRS_OPERANDS = tl.constexpr(",".join(["=r"] * 8 + ["r"] * 8))


@triton.jit
def pairs_order(k):
    """Where the weight at place k of a tile of `pairs_tile` stands in its group of 32.

    In a tensor-core operand, a thread holds the places 2q, 2q + 1 of every eight: here all weights of grid row q, so
    that one look-up serves eight weights.
    """
    return tl.max_contiguous(tl.multiple_of(8 * ((k // 2) % 4) + 2 * (k // 8) + k % 2, 2), 2)


@triton.jit
def pairs_tile(codes, J: tl.constexpr):
    """Signed grid values [BN, 32] of a dot as bfloat16, in the order of `pairs_order`.

    `codes` [BN, 32] are the 16-bit words of a step, arranged so that the words that a thread holds in the layout of a
    left operand are those of its own grid rows. The assembly relies on the order of a thread's elements there: two
    places of a row, the same of the row eight below, then both of the next eight places, and so on. It reads the
    table's address from the kernel's parameters, since a scalar among its operands would keep the compiler from
    giving it that layout.
    """
    return tl.inline_asm_elementwise(
        _pairs_program(J), PAIRS_OPERANDS, [codes], dtype=tl.bfloat16, is_pure=True, pack=16
    )


@triton.jit
def plain_pairs(codes_ptr, table_ptr, step, j, n, rows, KD: tl.constexpr, SWAP: tl.constexpr):
    """The same values in their own order."""
    k = tl.arange(0, KD)
    base = codes_ptr + along_rows((tl.cast(step, tl.int64) * rows + n) * KD, SWAP)
    place = 8 * (j // 2) + 2 * (k // 8)
    grid_row = tl.load(base + across_rows(place + j % 2, SWAP)).to(tl.int32) & 255
    selectors = tl.load(table_ptr + 2 * grid_row + across_rows(k % 8 // 4, SWAP))
    selector = (selectors >> across_rows(16 * (k % 4 // 2) + 8 * (k % 2), SWAP)) & 255
    value = tl.where(selector == 0x60, 8, tl.where(selector == 0x64, 25, 43))
    signs = tl.load(base + across_rows(place + k % 2, SWAP)).to(tl.int32)
    negative = (signs >> across_rows(15 - 4 * (j % 2) - k % 8 // 2, SWAP)) & 1
    return tl.where(negative > 0, -value, value).to(tl.float32).to(tl.bfloat16)


@triton.jit
def grid_tile(
    ptr, table_ptr, step, j, n, rows, KD: tl.constexpr, WORDS: tl.constexpr, DOTS: tl.constexpr,
    GRID_ROW: tl.constexpr, GRID_HIGH: tl.constexpr, DELTA: tl.constexpr, SWAP: tl.constexpr, ASM: tl.constexpr,
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
    place = table_ptr + index * GRID_ROW + across_rows(k % GRID_ROW, SWAP)
    if ASM:
        # A load that stays here: as an ordinary one the compiler would turn it into asynchronous copies past the
        # first-level cache, and every processor would queue for the same few lines of the second.
        value = tl.inline_asm_elementwise(
            "ld.global.nc.b16 $0, [$1];", "=h,l", [place.to(tl.int64)], dtype=tl.bfloat16, is_pure=True, pack=1
        ).to(tl.float32)
    else:
        value = tl.load(place).to(tl.float32)
    if DELTA:
        value = value + tl.where((extra >> 3) > 0, -1.0, 1.0)
    else:
        signs = load_word(ptr, step, FIRST + block, n, rows, WORDS)
        value = tl.where(((along_rows(signs, SWAP) >> across_rows(k, SWAP)) & 1) > 0, -value, value)
    return value.to(tl.bfloat16)
