"""Decoding packed codes to bfloat16 in registers, exactly.

Every code of every format is an integer of at most eight significant bits (or a small float that bfloat16 holds
exactly), so a tile of codes multiplies on tensor cores without rounding; scales act on float32 sums.

Codes stand in 16-bit words in the order in which a tensor core's left operand is held ("fragments", `from_fragment`):
a thread's sixteen bytes are its eight elements of a [16, 16] operand, so a load of full width needs no shared memory,
no barrier and no exchange between threads. A word holds the codes of several operands, one field for each.

On a device, two words are decoded at a time in inline assembly: placing a code q < 128 in the low byte of 0x43xx makes
the bfloat16 number 128 + q, so one mask converts two codes at once, and one fused multiply-add takes the bias away
again, exactly. In lop3, table 234 is (a & b) | c. The interpreter takes the plain form beside it; both give the same
numbers.
"""
# ruff: noqa: RUF005 (kernels know no starred expressions)
# mypy: disable-error-code=assignment

from __future__ import annotations

import triton
import triton.language as tl

# Code kinds: how codes lie in the planes.
FIELDS = tl.constexpr(0)
SIGNED_BYTE = tl.constexpr(1)
FLOAT8 = tl.constexpr(2)
NIBBLE_LEVELS = tl.constexpr(3)
NIBBLE_E2M1 = tl.constexpr(4)
WORD_E2M1 = tl.constexpr(5)
GRID = tl.constexpr(7)
PLAIN = tl.constexpr(9)

# Scale kinds: how a group's scale (and offset) lie in the words of a row and step.
SCALE_NONE = tl.constexpr(0)
SCALE_HALF = tl.constexpr(1)
SCALE_HALF_PAIR = tl.constexpr(2)
SCALE_BYTE = tl.constexpr(4)
SCALE_FLOAT = tl.constexpr(6)
SCALE_POWER = tl.constexpr(7)
SCALE_ODD_NIBBLE = tl.constexpr(8)
SCALE_E4M3 = tl.constexpr(9)


@triton.jit
def from_fragment(words, T: tl.constexpr):
    """Words or numbers [T, 256], in the order of a thread's registers, as a left operand [16 T, 16].

    Index of a word: row mod 8, then q, then bits for kh, rh, kl; it stands at row 8 rh + (row mod 8) and place
    8 kh + 2 q + kl of its operand. Operand i of a group of KD elements has those at KD / 4 * q + 4 i + 2 kh + kl
    (`place_of`), so that a thread's part of x is contiguous too. No value changes its thread.
    """
    held = tl.permute(tl.reshape(words, (T, 8, 4, 2, 2, 2)), (0, 4, 1, 3, 2, 5))
    return tl.reshape(held, (16 * T, 16))


@triton.jit
def side_by_side(tiles, COUNT: tl.constexpr):
    """COUNT (1, 2, 4 or 8) left operands [BN, W] as one [BN, W COUNT]."""
    if COUNT == 1:
        one = tiles[0]
    elif COUNT == 2:
        both = tl.permute(tl.join(tiles[0], tiles[1]), (0, 2, 1))
        one = tl.reshape(both, (both.shape[0], 2 * both.shape[2]))
    elif COUNT == 8:
        first = tl.join(tl.join(tiles[0], tiles[1]), tl.join(tiles[2], tiles[3]))
        second = tl.join(tl.join(tiles[4], tiles[5]), tl.join(tiles[6], tiles[7]))
        eight = tl.permute(tl.join(first, second), (0, 4, 3, 2, 1))
        one = tl.reshape(eight, (eight.shape[0], 8 * eight.shape[4]))
    else:
        pairs = tl.join(tl.join(tiles[0], tiles[1]), tl.join(tiles[2], tiles[3]))
        pairs = tl.permute(pairs, (0, 3, 2, 1))
        one = tl.reshape(pairs, (pairs.shape[0], 4 * pairs.shape[3]))
    return one


@triton.jit
def load_operands(ptr, m, width, first, x_end, BM: tl.constexpr, KD: tl.constexpr, TAIL: tl.constexpr):
    """Elements [first, first + KD) of input rows m as KD / 16 right operands [16, BM], a tuple in the order of
    `from_fragment`: a thread reads what it multiplies, at most eight elements at a time."""
    PART: tl.constexpr = KD // 4 if KD < 64 else 8
    found = ()
    for h in tl.static_range(KD // 4 // PART):
        k = first + h * PART + (tl.arange(0, 4) * (KD // 4))[:, None, None] + tl.arange(0, PART)[None, None, :]
        at = ptr + (m.to(tl.int64) * width)[None, :, None] + k
        if TAIL:
            x = tl.load(at, mask=k < x_end, other=0.0)
        else:
            x = tl.load(at)
        if PART == 4:
            held = tl.permute(tl.reshape(x, (4, BM, 2, 2)), (2, 0, 3, 1))
            found = found + (tl.reshape(held, (16, BM)),)
        else:
            even, odd = tl.split(tl.permute(tl.reshape(x, (4, BM, 2, 2, 2)), (0, 1, 3, 4, 2)))
            even = tl.reshape(tl.permute(even, (2, 0, 3, 1)), (16, BM))
            found = found + (even, tl.reshape(tl.permute(odd, (2, 0, 3, 1)), (16, BM)))
    return found


@triton.jit
def to_fragments(v, T: tl.constexpr):
    """A value per weight row and q [16 T, 4] beside words in fragment order: [T, 8, 4, 1, 2, 1]."""
    return tl.reshape(tl.permute(tl.reshape(v, (T, 2, 8, 4)), (0, 2, 3, 1)), (T, 8, 4, 1, 2, 1))


@triton.jit
def to_sums(v, BN: tl.constexpr, BM: tl.constexpr):
    """A value per weight row and q [BN, 4] (the same for every q) beside sums [BN, BM], whose columns 8 i + 2 q and
    8 i + 2 q + 1 a thread holds."""
    return tl.reshape(tl.broadcast_to(v[:, None, :, None], (BN, BM // 8, 4, 2)), (BN, BM))


@triton.jit
def by_thread(total, T: tl.constexpr, WIDTH: tl.constexpr, PER: tl.constexpr):
    """Sums [16 T, WIDTH], of which a thread holds PER neighbouring columns, as [4, 8, T, WIDTH / 4 / PER, 2 PER], what
    a thread holds last, and before it what it holds more of: lanes and warps come first, so that no sum changes its
    thread."""
    held = tl.permute(tl.reshape(total, (T, 2, 8, WIDTH // 4 // PER, 4, PER)), (4, 2, 0, 3, 1, 5))
    return tl.reshape(held, (4, 8, T, WIDTH // 4 // PER, 2 * PER))


@triton.jit
def from_thread(held, T: tl.constexpr, WIDTH: tl.constexpr, PER: tl.constexpr):
    """`by_thread` backwards."""
    held = tl.reshape(held, (4, 8, T, WIDTH // 4 // PER, 2, PER))
    return tl.reshape(tl.permute(held, (2, 4, 1, 3, 0, 5)), (16 * T, WIDTH))


@triton.jit
def places_by_thread(T: tl.constexpr, WIDTH: tl.constexpr, PER: tl.constexpr):
    """Places of `by_thread`'s values in memory, a thread's beside those of its neighbours."""
    lane = tl.arange(0, 4)[:, None, None, None, None] + tl.arange(0, 8)[None, :, None, None, None] * 4
    block = tl.arange(0, WIDTH // 4 // PER)[None, None, None, :, None] * T + tl.arange(0, T)[None, None, :, None, None]
    return (block * 32 + lane) * (2 * PER) + tl.arange(0, 2 * PER)[None, None, None, None, :]


@triton.jit
def held_rows(first, T: tl.constexpr):
    """Weight rows [4, 8, T, 2] from `first` on: dimensions so ordered that a load of them gives every thread the two
    rows of each sixteen whose sums it holds. (Four threads read the same.)"""
    row = tl.reshape(tl.arange(0, 8), (1, 8, 1, 1))
    sixteen = tl.reshape(tl.arange(0, T), (1, 1, T, 1)) * 16
    half = tl.reshape(tl.arange(0, 2), (1, 1, 1, 2)) * 8
    return tl.broadcast_to(first + row + sixteen + half, (4, 8, T, 2))


@triton.jit
def by_row(v, T: tl.constexpr):
    """Values [4, 8, T, 2] of `held_rows` as [16 T, 4]."""
    return tl.reshape(tl.permute(v, (2, 3, 1, 0)), (16 * T, 4))


@triton.constexpr_function
def word_block(word: int, words: int) -> tuple[int, int]:
    """Words of a step lie in blocks [rows, 4], then [rows, 2] and [rows, 1]: first word and width of word's block."""
    whole = words // 4 * 4
    if word < whole:
        return word // 4 * 4, 4
    if words % 4 >= 2 and word < whole + 2:
        return whole, 2
    return words - 1, 1


@triton.jit
def place_of(k, KD: tl.constexpr):
    """Which element of a group of KD stands at place k of an operand."""
    return KD // 4 * (k // 2 % 4) + 4 * (k // 16) + 2 * (k // 8 % 2) + k % 2


@triton.jit
def fragments_of_step(ptr, step, tiles, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Where a step's fragments begin in a plane [steps, tiles, COUNT, SIZE]: 256 words or 512 bytes each."""
    return ptr + tl.cast(step, tl.int64) * tiles * (COUNT * SIZE)


@triton.jit
def load_fragments(base, tile, COUNT: tl.constexpr, SIZE: tl.constexpr, POLICY: tl.constexpr):
    """COUNT fragments of the step at base as a tuple of [T, SIZE].

    With the policy "evict_first" what x and tables hold of the first-level cache stays there.
    """
    at = tile[:, None] * (COUNT * SIZE) + tl.arange(0, SIZE)[None, :]
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (tl.load(base + i * SIZE + at, eviction_policy=POLICY),)
    return found


@triton.jit
def words_of_step(ptr, step, rows, WORDS: tl.constexpr):
    """Where a step's words begin; they are laid out [steps, blocks (`word_block`)]."""
    return ptr + tl.cast(step, tl.int64) * WORDS * rows


@triton.jit
def load_words(base, rows_held, rows, WORDS: tl.constexpr, T: tl.constexpr):
    """The int32 words of the step at base as a tuple of [16 T, 4]."""
    found = ()
    for w in tl.static_range(WORDS):
        if word_block(w, WORDS)[0] == w:
            if word_block(w, WORDS)[1] == 4:
                four = base + w * rows + rows_held[:, :, :, :, None] * 4 + tl.arange(0, 4)
                even, odd = tl.split(tl.reshape(tl.load(four), (4, 8, T, 2, 2, 2)))
                first, third = tl.split(even)
                second, fourth = tl.split(odd)
                found = found + (by_row(first, T), by_row(second, T), by_row(third, T), by_row(fourth, T))
            elif word_block(w, WORDS)[1] == 2:
                two = base + w * rows + rows_held[:, :, :, :, None] * 2 + tl.arange(0, 2)
                first, second = tl.split(tl.load(two))
                found = found + (by_row(first, T), by_row(second, T))
            else:
                found = found + (by_row(tl.load(base + w * rows + rows_held), T),)
    return found


@triton.jit
def hidden_word(at):
    """An int32 word at addresses, whose load the compiler does not see."""
    return tl.inline_asm_elementwise(
        "ld.global.nc.b32 $0, [$1];", "=r,l", [at], dtype=tl.int32, is_pure=True, pack=1
    )  # fmt: skip


@triton.jit
def hidden_words(at, COUNT: tl.constexpr, ALIGNED: tl.constexpr, T: tl.constexpr, ASM: tl.constexpr):
    """COUNT (1, 2 or 4) int32 words at addresses [4, 8, T, 2], a tuple of [16 T, 4]. On a device the compiler does not
    see a load: it would take every thread's copy of them through shared memory. ALIGNED: addresses are multiples of
    what is read at each."""
    found = ()
    if ASM and ALIGNED and COUNT == 2:
        first, second = tl.inline_asm_elementwise(
            "ld.global.nc.v2.b32 {$0, $1}, [$2];", "=r,=r,l", [at], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
        found = (by_row(first, T), by_row(second, T))
    elif ASM and ALIGNED and COUNT == 4:
        first, second, third, fourth = tl.inline_asm_elementwise(
            "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", [at],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        found = (by_row(first, T), by_row(second, T), by_row(third, T), by_row(fourth, T))
    else:
        for i in tl.static_range(COUNT):
            if ASM:
                found = found + (by_row(hidden_word(at + i), T),)
            else:
                found = found + (by_row(tl.load(at + i), T),)
    return found


@triton.jit
def load_hidden_words(
    base, rows_held, rows, WORDS: tl.constexpr, ALIGNED: tl.constexpr, T: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """`load_words` by `hidden_words`. ALIGNED: rows are a multiple of four, so that words that stand together are
    aligned in every step."""
    found = ()
    for w in tl.static_range(WORDS):
        if word_block(w, WORDS)[0] == w:
            at = base + w * rows + rows_held * word_block(w, WORDS)[1]
            found = found + hidden_words(at, word_block(w, WORDS)[1], ALIGNED, T, ASM)
    return found


@triton.jit
def row_words(ptr, step, n, rows, WORDS: tl.constexpr):
    """The words of a step of rows n as a tuple of [BN]."""
    found = ()
    for w in tl.static_range(WORDS):
        place = w * rows + n
        if word_block(w, WORDS)[1] > 1:
            place = word_block(w, WORDS)[0] * rows + n * word_block(w, WORDS)[1] + (w - word_block(w, WORDS)[0])
        found = found + (tl.load(ptr + tl.cast(step, tl.int64) * WORDS * rows + place),)
    return found


@triton.jit
def _widen(code, BIAS: tl.constexpr):
    """Plain form: integer codes [BN, W] to bfloat16 of code - BIAS (exact)."""
    return (code.to(tl.float32) - BIAS).to(tl.bfloat16)


@triton.jit
def word_field(c, SHIFT: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, ASM: tl.constexpr):
    """Field (c >> SHIFT) & MASK of 16-bit words, less BIAS: two words to a register, no permutation needed."""
    if ASM:
        if BIAS == -128:
            return tl.inline_asm_elementwise(
                f"{{ .reg .b32 t; shr.b32 t, $1, {SHIFT}; lop3.b32 $0, t, {MASK * 65537}, 1124090624, 234; }}",
                "=r,r", [c], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        return tl.inline_asm_elementwise(
            f"{{ .reg .b32 t, one, b; shr.b32 t, $1, {SHIFT}; lop3.b32 t, t, {MASK * 65537}, 1124090624, 234;"
            f" mov.b32 one, 1065369472; mov.b32 b, {3271607040 + BIAS * 65537}; fma.rn.bf16x2 $0, t, one, b; }}",
            "=r,r", [c], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    return _widen((c.to(tl.int32) >> SHIFT) & MASK, BIAS)


@triton.jit
def word_fields(
    c, h, SHIFT: tl.constexpr, MASK: tl.constexpr, SHIFT_H: tl.constexpr, MASK_H: tl.constexpr,
    LIFT: tl.constexpr, BIAS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Codes ((c >> SHIFT) & MASK) | (((h >> SHIFT_H) & MASK_H) << LIFT) of 16-bit words, less BIAS."""
    if ASM:
        LEFT: tl.constexpr = LIFT - SHIFT_H if LIFT > SHIFT_H else 0
        RIGHT: tl.constexpr = SHIFT_H - LIFT if SHIFT_H > LIFT else 0
        return tl.inline_asm_elementwise(
            f"{{ .reg .b32 t, u, one, b; shr.b32 t, $1, {SHIFT}; lop3.b32 t, t, {MASK * 65537}, 1124090624, 234;"
            f" shl.b32 u, $2, {LEFT}; shr.b32 u, u, {RIGHT}; lop3.b32 t, u, {(MASK_H << LIFT) * 65537}, t, 234;"
            f" mov.b32 one, 1065369472; mov.b32 b, {3271607040 + BIAS * 65537}; fma.rn.bf16x2 $0, t, one, b; }}",
            "=r,r,r", [c, h], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    low = (c.to(tl.int32) >> SHIFT) & MASK
    return _widen(low | (((h.to(tl.int32) >> SHIFT_H) & MASK_H) << LIFT), BIAS)


@triton.jit
def word_e2m1(c, factor, FIELD: tl.constexpr, ASM: tl.constexpr):
    """E2M1 code FIELD of 16-bit words times factor / 2^126, factor from `group_factor` and in the shape of c.

    Moved to bits 6..8 and 15 of a bfloat16 number, exponent, mantissa and sign of a code read as its value / 2^126,
    subnormals included; the product with the scale is exact. `relayout` puts the bits of the first three codes where
    one shift and one mask move them (`E2M1_BITS` in formats).
    """
    if ASM:
        # -0.0 as the addend makes the fused multiply-add a plain product on every architecture.
        if FIELD < 3:
            return tl.inline_asm_elementwise(
                f"{{ .reg .b32 t, z; shl.b32 t, $1, {3 * FIELD}; and.b32 t, t, 2176876992;"
                " mov.b32 z, 2147516416; fma.rn.bf16x2 $0, t, $2, z; }",
                "=r,r,r,r", [c, factor], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t, u, z; shr.b32 t, $1, 4; and.b32 t, t, 12583104;"
            " shr.b32 u, $1, 5; lop3.b32 t, u, 16777472, t, 234; shl.b32 u, $1, 1; lop3.b32 t, u, 2147516416, t, 234;"
            " mov.b32 z, 2147516416; fma.rn.bf16x2 $0, t, $2, z; }",
            "=r,r,r,r", [c, factor], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    word = c.to(tl.int32)
    if FIELD < 3:
        code = ((word >> (6 - 3 * FIELD)) & 7) | (((word >> (15 - 3 * FIELD)) & 1) << 3)
    else:
        code = ((word >> 10) & 3) | (((word >> 13) & 3) << 2)
    unit = (factor & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True).to(tl.float32)
    return (_e2m1_doubled(code) * (unit * 5.877471754111438e-39)).to(tl.bfloat16)


@triton.jit
def _e2m1_doubled(code):
    index = code & 7
    magnitude = tl.where(index < 4, index, tl.where(index == 7, 12, 2 * index - 4))
    return tl.where(code > 7, -magnitude, magnitude).to(tl.float32)


@triton.jit
def signed_byte(c, HIGH: tl.constexpr, ASM: tl.constexpr):
    """Byte HIGH of 16-bit words as int8. A byte u = 128 s + r is (128 + r) + (-128 - 128 s), both exact bfloat16
    numbers."""
    if ASM:
        return tl.inline_asm_elementwise(
            f"{{ .reg .b32 t, u, v, one; mov.b32 one, 1065369472; shr.b32 t, $1, {8 * HIGH};"
            " lop3.b32 u, t, 8323199, 1124090624, 234; lop3.b32 v, t, 8388736, 3271607040, 234;"
            " fma.rn.bf16x2 $0, u, one, v; }",
            "=r,r", [c], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    return (c.to(tl.int32) >> (8 * HIGH)).to(tl.int8).to(tl.float32).to(tl.bfloat16)


@triton.jit
def float8(c, FIELD: tl.constexpr, ASM: tl.constexpr):
    """E4M3 code FIELD of 16-bit words, whose bits lie as `E4M3_BITS` in formats says.

    Moved to bits 4..10 and 15 of a bfloat16 number, exponent, mantissa and sign of a code read as its value / 2^120,
    subnormals included; the product is exact. (The code of NaN would read as 480: `quant.scales.check_weight` lets none
    in.)
    """
    if ASM:
        if FIELD == 0:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 t, u, z; and.b32 t, $1, 2280687600; mov.b32 u, 2072017792; mov.b32 z, 2147516416;"
                " fma.rn.bf16x2 $0, t, u, z; }",
                "=r,r", [c], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t, u, z; shl.b32 t, $1, 4; and.b32 t, t, 2163245296; shr.b32 u, $1, 4;"
            " lop3.b32 t, u, 117442304, t, 234; mov.b32 u, 2072017792; mov.b32 z, 2147516416;"
            " fma.rn.bf16x2 $0, t, u, z; }",
            "=r,r", [c], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    word = c.to(tl.int32)
    if FIELD == 0:
        byte = ((word >> 4) & 127) | (((word >> 15) & 1) << 7)
    else:
        byte = (word & 15) | (((word >> 12) & 7) << 4) | (((word >> 11) & 1) << 7)
    return byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32).to(tl.bfloat16)


@triton.jit
def levels(c, LOW: tl.constexpr, ASM: tl.constexpr):
    """The levels of IQ4_NL at nibbles LOW and LOW + 2 of 16-bit words, two tiles.

    A permutation looks four levels up; a set index bit 3 reads as zero there, so the lower and the upper eight come
    from two look-ups whose difference is the level.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            f"{{ .reg .b32 t, u, v, one; shr.b32 t, $2, {4 * LOW}; and.b32 t, t, 252645135;"
            " shr.b32 u, t, 4; or.b32 t, t, u; prmt.b32 t, t, 0, 17440; mov.b32 one, 1065369472;"
            # Magnitudes 127 104 83 65 | 49 35 22 10 of the negative levels, then 1 13 25 38 | 53 69 89 113.
            " prmt.b32 u, 1095985279, 169222961, t; xor.b32 t, t, 34952; prmt.b32 v, 639175937, 1901675829, t;"
            # Bytes v - u without borrows: one of the two is zero in each byte; u > 0 becomes -u as 256 - u.
            " sub.u32 t, 2155905152, u; add.u32 t, t, v; xor.b32 t, t, 2155905152;"
            " prmt.b32 u, t, 0, 17217; prmt.b32 t, t, 0, 16960;"
            " lop3.b32 v, t, 8388736, 3271607040, 234; lop3.b32 t, t, 8323199, 1124090624, 234;"
            " fma.rn.bf16x2 $0, t, one, v;"
            " lop3.b32 v, u, 8388736, 3271607040, 234; lop3.b32 u, u, 8323199, 1124090624, 234;"
            " fma.rn.bf16x2 $1, u, one, v; }",
            "=r,=r,r", [c], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    first = _level_of((c.to(tl.int32) >> (4 * LOW)) & 15).to(tl.bfloat16)
    return first, _level_of((c.to(tl.int32) >> (4 * LOW + 8)) & 15).to(tl.bfloat16)


@triton.jit
def _level_of(i):
    value = tl.where(i == 0, -127.0, 0.0)
    value = tl.where(i == 1, -104.0, value)
    value = tl.where(i == 2, -83.0, value)
    value = tl.where(i == 3, -65.0, value)
    value = tl.where(i == 4, -49.0, value)
    value = tl.where(i == 5, -35.0, value)
    value = tl.where(i == 6, -22.0, value)
    value = tl.where(i == 7, -10.0, value)
    value = tl.where(i == 8, 1.0, value)
    value = tl.where(i == 9, 13.0, value)
    value = tl.where(i == 10, 25.0, value)
    value = tl.where(i == 11, 38.0, value)
    value = tl.where(i == 12, 53.0, value)
    value = tl.where(i == 13, 69.0, value)
    value = tl.where(i == 14, 89.0, value)
    return tl.where(i == 15, 113.0, value)


@triton.jit
def e2m1(c, LOW: tl.constexpr, ASM: tl.constexpr):
    """Twice the E2M1 values of nibbles LOW and LOW + 2 of 16-bit words, two tiles.

    Doubled magnitudes 0 1 2 3 4 6 8 12; index bit 3 is the sign and reads as zero in a permutation, so positive and
    negated codes come from two look-ups; 192 + value is built in the low byte and 192 taken away.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            f"{{ .reg .b32 t, u, v, one, b; shr.b32 t, $2, {4 * LOW}; and.b32 t, t, 252645135;"
            " shr.b32 u, t, 4; or.b32 t, t, u; prmt.b32 t, t, 0, 17440;"
            " prmt.b32 u, 50462976, 201852420, t; xor.b32 t, t, 34952; prmt.b32 v, 50462976, 201852420, t;"
            " add.u32 u, u, 1077952576; sub.u32 t, u, v; mov.b32 one, 1065369472; mov.b32 b, 3275801408;"
            " prmt.b32 u, t, 1128481603, 16960; fma.rn.bf16x2 $0, u, one, b;"
            " prmt.b32 v, t, 1128481603, 17217; fma.rn.bf16x2 $1, v, one, b; }",
            "=r,=r,r", [c], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    first = _e2m1_doubled((c.to(tl.int32) >> (4 * LOW)) & 15).to(tl.bfloat16)
    return first, _e2m1_doubled((c.to(tl.int32) >> (4 * LOW + 8)) & 15).to(tl.bfloat16)


@triton.jit
def _byte_raised(word, raiser, INDEX: tl.constexpr, ASM: tl.constexpr):
    """2^23 + byte INDEX of words as float32: the byte in the lowest mantissa bits, no slow integer conversion.

    raiser: bits of 2^23 in a register. (Of two constants the assembler would move one into a register every time.)
    """
    if ASM:
        return tl.inline_asm_elementwise(
            f"prmt.b32 $0, $1, $2, {29760 + INDEX};", "=r,r,r", [word, tl.broadcast_to(raiser, word.shape)],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return (((word >> (8 * INDEX)) & 255) | 0x4B000000).to(tl.float32, bitcast=True)


@triton.jit
def _odd_raised(word, INDEX: tl.constexpr, ASM: tl.constexpr):
    """2^23 + 2 * nibble INDEX + 1 of words as float32."""
    if ASM:
        LEFT: tl.constexpr = 1 if INDEX == 0 else 0
        RIGHT: tl.constexpr = 4 * INDEX - 1 + LEFT
        return tl.inline_asm_elementwise(
            f"{{ .reg .b32 t; shl.b32 t, $1, {LEFT}; shr.b32 t, t, {RIGHT}; lop3.b32 $0, t, 30, 1258291201, 234; }}",
            "=r,r", [word], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    nibble = (word.to(tl.uint32, bitcast=True) >> (4 * INDEX)) & 15
    return ((nibble * 2) | 0x4B000001).to(tl.float32, bitcast=True)


@triton.jit
def _lowered(raised, unit):
    """(raised - 2^23) * unit in one fused multiply-add, exactly: 2^23 * unit is exact, and so is the result."""
    return tl.fma(raised, unit, unit * -8388608.0)


@triton.jit
def half_of(word, index):
    """Half `index` of words, an IEEE half, as float32."""
    return ((word >> (16 * index)) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def group_scale(words, j, raiser, SCALE: tl.constexpr, BIAS: tl.constexpr, ASM: tl.constexpr):
    """Scale and offset [BN] of dot j: the dot's weights are scale * tile + offset (BIAS is what the tile has left)."""
    offset = tl.zeros_like(words[0]).to(tl.float32)
    if SCALE == SCALE_HALF:
        scale = half_of(words[j // 2], j % 2)
    elif SCALE == SCALE_HALF_PAIR:
        scale = half_of(words[j], 0)
        offset = tl.fma(scale, tl.full(scale.shape, BIAS, tl.float32), half_of(words[j], 1))
    elif SCALE == SCALE_BYTE:
        # Stored with 128 added.
        whole = _byte_raised(words[1 + j // 4], raiser, j % 4, ASM) - 8388736.0
        scale = whole * words[0].to(tl.float32, bitcast=True)
    elif SCALE == SCALE_ODD_NIBBLE:
        # unit * (2 * nibble + 1)
        scale = _lowered(_odd_raised(words[1 + j // 8], j % 8, ASM), words[0].to(tl.float32, bitcast=True))
    elif SCALE == SCALE_POWER:
        # 2^(e - 128), subnormal below e = 2.
        exponent = (words[j // 4] >> (8 * (j % 4))) & 255
        bits = tl.where(exponent < 2, 0x200000 << exponent, (exponent - 1) << 23)
        scale = bits.to(tl.float32, bitcast=True)
    else:
        scale = words[0].to(tl.float32, bitcast=True)
    return scale, offset


@triton.jit
def group_factor(word, q, ASM: tl.constexpr):
    """E4M3 scale q of words times 2^119 as a pair of equal bfloat16 numbers in an int32, from a byte of five exponent
    and three mantissa bits.

    `relayout` re-encodes E4M3 scales so: subnormal ones become ordinary numbers of the wider exponent (exact), and
    the codes of a group with scale zero become zero. Shifting the byte into place and raising its exponent is all
    that is left to do here.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; prmt.b32 t, $1, 0, $2; mad.lo.u32 $0, t, 16, 1979741696; }",
            "=r,r,r", [word, 16448 + 257 * q], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return (((word >> (8 * q)) & 255) << 4) + 30208


@triton.jit
def code_tiles(
    low, high, factor, chunk: tl.constexpr, CODE: tl.constexpr, COUNT: tl.constexpr, LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr, BIAS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Codes of COUNT consecutive operands from operand `chunk` of a step on, a tuple of bfloat16 tensors in the shape
    of the planes' words. low, high: the planes' words of the step; factor: of the group, where tiles hold scaled codes.
    """
    PER: tl.constexpr = 16 // LOW_BITS
    PER_HIGH: tl.constexpr = 16 // (HIGH_BITS if HIGH_BITS > 0 else 16)
    found = ()
    if CODE == NIBBLE_LEVELS:
        # Operands 0, 1, 2, 3 of a word stand at nibbles 0, 2, 1, 3.
        found = levels(low[chunk // 4], chunk % 4 // 2, ASM)
    elif CODE == NIBBLE_E2M1:
        found = e2m1(low[chunk // 4], chunk % 4 // 2, ASM)
    else:
        # Fields are computed where they are used: a name would make run-time numbers of them.
        for i in tl.static_range(COUNT):
            c = low[(chunk + i) // PER]
            if HIGH_BITS > 0:
                tile = word_fields(
                    c, high[(chunk + i) // PER_HIGH], LOW_BITS * ((chunk + i) % PER), (1 << LOW_BITS) - 1,
                    HIGH_BITS * ((chunk + i) % PER_HIGH), (1 << HIGH_BITS) - 1, LOW_BITS, BIAS, ASM,
                )  # fmt: skip
            elif CODE == WORD_E2M1:
                tile = word_e2m1(c, factor, (chunk + i) % PER, ASM)
            elif CODE == SIGNED_BYTE:
                tile = signed_byte(c, (chunk + i) % PER, ASM)
            elif CODE == FLOAT8:
                tile = float8(c, (chunk + i) % PER, ASM)
            else:
                tile = word_field(c, LOW_BITS * ((chunk + i) % PER), (1 << LOW_BITS) - 1, BIAS, ASM)
            found = found + (tile,)
    return found
