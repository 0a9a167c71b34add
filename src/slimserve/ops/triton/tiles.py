"""Decoding packed codes to bfloat16 tiles in registers, exactly.

Every code of every format is an integer of at most eight significant bits (or a small float that bfloat16 holds
exactly), so a tile of codes multiplies on tensor cores without rounding; scales act on float32 sums.

On a device, four bytes (or two 16-bit words) are decoded at a time in inline assembly: placing a code q < 128 in the
low byte of 0x43xx makes the bfloat16 number 128 + q, so one byte permutation or one mask converts two codes at once,
and one fused multiply-add takes the bias away again, exactly. In lop3, table 234 is (a & b) | c. The interpreter takes
the plain form beside it; both give the same numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Code kinds: how a dot's codes lie in the planes.
NIBBLE = tl.constexpr(0)
FIVE_BITS = tl.constexpr(1)
SIX_BITS = tl.constexpr(2)
TWO_BITS = tl.constexpr(3)
THREE_BITS = tl.constexpr(4)
SIGNED_BYTE = tl.constexpr(5)
FLOAT8 = tl.constexpr(6)
NIBBLE_LEVELS = tl.constexpr(7)
NIBBLE_E2M1 = tl.constexpr(8)
GRID = tl.constexpr(9)
PLAIN = tl.constexpr(10)
WORD_E2M1 = tl.constexpr(11)
SCALED_TWO_BITS = tl.constexpr(12)
GRID_PAIRS = tl.constexpr(13)
WORD_NIBBLE = tl.constexpr(14)

# Scale kinds: how a group's scale (and offset) lie in the words of a row and step.
SCALE_NONE = tl.constexpr(0)
SCALE_HALF = tl.constexpr(1)
SCALE_HALF_PAIR = tl.constexpr(2)
SCALE_K = tl.constexpr(3)
SCALE_BYTE = tl.constexpr(4)
SCALE_K2 = tl.constexpr(5)
SCALE_FLOAT = tl.constexpr(6)
SCALE_POWER = tl.constexpr(7)
SCALE_ODD_NIBBLE = tl.constexpr(8)
SCALE_E4M3 = tl.constexpr(9)


@triton.jit
def along_rows(v, SWAP: tl.constexpr):
    """A vector over weight rows as a column (or, with SWAP, a row) of a tile."""
    if SWAP:
        shaped = v[None, :]
    else:
        shaped = v[:, None]
    return shaped


@triton.jit
def across_rows(v, SWAP: tl.constexpr):
    """A vector over K or over input rows, at right angles to `along_rows`."""
    if SWAP:
        shaped = v[:, None]
    else:
        shaped = v[None, :]
    return shaped


@triton.jit
def load_tile(ptr, step, tile, n, rows, TILES: tl.constexpr, WIDTH: tl.constexpr, SWAP: tl.constexpr):
    """Bytes or 16-bit words [BN, WIDTH] of one tile; planes are laid out [steps, TILES, rows, WIDTH]."""
    base = (tl.cast(step, tl.int64) * TILES + tile) * rows * WIDTH
    return tl.load(ptr + base + along_rows(n * WIDTH, SWAP) + across_rows(tl.arange(0, WIDTH), SWAP))


@triton.jit
def load_word(ptr, step, word, n, rows, WORDS: tl.constexpr):
    """One int32 per row [BN]; words are laid out [steps, WORDS, rows]."""
    return tl.load(ptr + (tl.cast(step, tl.int64) * WORDS + word) * rows + n)


@triton.jit
def _widen(code, BIAS: tl.constexpr):
    """Plain form: integer codes [BN, W] to bfloat16 of code - BIAS (exact)."""
    return (code.to(tl.float32) - BIAS).to(tl.bfloat16)


@triton.jit
def nibble(c, HIGH: tl.constexpr, BIAS: tl.constexpr, ASM: tl.constexpr):
    """Low or high nibbles of bytes, less BIAS."""
    if ASM:
        if BIAS == -128:
            return tl.inline_asm_elementwise(
                f"{{ .reg .b32 t; shr.b32 t, $2, {4 * HIGH}; and.b32 t, t, 252645135;"
                f" prmt.b32 $0, t, 1128481603, 16704; prmt.b32 $1, t, 1128481603, 17218; }}",
                "=r,=r,r", [c], dtype=tl.bfloat16, is_pure=True, pack=4,
            )  # fmt: skip
        return tl.inline_asm_elementwise(
            f"{{ .reg .b32 t, u, one, b; shr.b32 t, $2, {4 * HIGH}; and.b32 t, t, 252645135;"
            f" mov.b32 one, 1065369472; mov.b32 b, {3271607040 + BIAS * 65537};"
            f" prmt.b32 u, t, 1128481603, 16704; fma.rn.bf16x2 $0, u, one, b;"
            f" prmt.b32 u, t, 1128481603, 17218; fma.rn.bf16x2 $1, u, one, b; }}",
            "=r,=r,r", [c], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    return _widen((c.to(tl.int32) >> (4 * HIGH)) & 15, BIAS)


@triton.jit
def two_planes(
    c, h, SHIFT: tl.constexpr, MASK: tl.constexpr, SHIFT_H: tl.constexpr, MASK_H: tl.constexpr,
    LIFT: tl.constexpr, BIAS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Codes ((c >> SHIFT) & MASK) | (((h >> SHIFT_H) & MASK_H) << LIFT) of bytes, less BIAS."""
    if ASM:
        # One shift brings the high field to its final place, one logic operation masks and joins it.
        LEFT: tl.constexpr = LIFT - SHIFT_H if LIFT > SHIFT_H else 0
        RIGHT: tl.constexpr = SHIFT_H - LIFT if SHIFT_H > LIFT else 0
        return tl.inline_asm_elementwise(
            f"{{ .reg .b32 t, u, one, b; shr.b32 t, $2, {SHIFT}; and.b32 t, t, {MASK * 16843009};"
            f" shl.b32 u, $3, {LEFT}; shr.b32 u, u, {RIGHT};"
            f" lop3.b32 t, u, {(MASK_H << LIFT) * 16843009}, t, 234;"
            f" mov.b32 one, 1065369472; mov.b32 b, {3271607040 + BIAS * 65537};"
            f" prmt.b32 u, t, 1128481603, 16704; fma.rn.bf16x2 $0, u, one, b;"
            f" prmt.b32 u, t, 1128481603, 17218; fma.rn.bf16x2 $1, u, one, b; }}",
            "=r,=r,r,r", [c, h], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    low = (c.to(tl.int32) >> SHIFT) & MASK
    return _widen(low | (((h.to(tl.int32) >> SHIFT_H) & MASK_H) << LIFT), BIAS)


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
def word_nibble(c, shift, ASM: tl.constexpr):
    """Nibble at a run-time `shift` (one scalar) of 16-bit words."""
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t, one, b; shr.b32 t, $1, $2; lop3.b32 t, t, 983055, 1124090624, 234;"
            " mov.b32 one, 1065369472; mov.b32 b, 3271607040; fma.rn.bf16x2 $0, t, one, b; }",
            "=r,r,r,r", [c, tl.broadcast_to(shift, c.shape)], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    return _widen((c.to(tl.int32) >> shift) & 15, 0)


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
def word_e2m1(c, scale, FIELD: tl.constexpr, SWAP: tl.constexpr, ASM: tl.constexpr):
    """E2M1 code FIELD of 16-bit words times scale / 2^126, scale from `group_factor`.

    Moved to bits 6..8 and 15 of a bfloat16 number, exponent, mantissa and sign of a code read as its value / 2^126,
    subnormals included; the product with the scale is exact. `relayout` puts the bits of the first three codes where
    one shift and one mask move them (`E2M1_BITS` in formats).
    """
    wide = tl.broadcast_to(along_rows(scale, SWAP), c.shape)
    if ASM:
        # -0.0 as the addend makes the fused multiply-add a plain product on every architecture.
        if FIELD < 3:
            return tl.inline_asm_elementwise(
                f"{{ .reg .b32 t, z; shl.b32 t, $1, {3 * FIELD}; and.b32 t, t, 2176876992;"
                " mov.b32 z, 2147516416; fma.rn.bf16x2 $0, t, $2, z; }",
                "=r,r,r,r", [c, wide], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t, u, z; shr.b32 t, $1, 4; and.b32 t, t, 12583104;"
            " shr.b32 u, $1, 5; lop3.b32 t, u, 16777472, t, 234; shl.b32 u, $1, 1; lop3.b32 t, u, 2147516416, t, 234;"
            " mov.b32 z, 2147516416; fma.rn.bf16x2 $0, t, $2, z; }",
            "=r,r,r,r", [c, wide], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    word = c.to(tl.int32)
    if FIELD < 3:
        code = ((word >> (6 - 3 * FIELD)) & 7) | (((word >> (15 - 3 * FIELD)) & 1) << 3)
    else:
        code = ((word >> 10) & 3) | (((word >> 13) & 3) << 2)
    factor = (wide & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True).to(tl.float32)
    return (_e2m1_doubled(code) * (factor * 5.877471754111438e-39)).to(tl.bfloat16)


@triton.jit
def scaled_two_bits(c, scale, FIELD: tl.constexpr, SWAP: tl.constexpr, ASM: tl.constexpr):
    """Two-bit field of 16-bit words times a four-bit scale, over 2^14, exactly; scale from `nibble_factor`.

    Left at bits 2 (FIELD % 3) of a bfloat16 number, a code reads as code * 2^(2 (FIELD % 3) - 133), subnormal.
    """
    wide = tl.broadcast_to(along_rows(scale, SWAP), c.shape)
    if ASM:
        return tl.inline_asm_elementwise(
            f"{{ .reg .b32 t, z; shr.b32 t, $1, {6 * (FIELD // 3)}; and.b32 t, t, {196611 << (2 * (FIELD % 3))};"
            " mov.b32 z, 2147516416; fma.rn.bf16x2 $0, t, $2, z; }",
            "=r,r,r,r", [c, wide], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    factor = (wide & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True).to(tl.float32)
    code = ((c.to(tl.int32) >> (2 * FIELD)) & 3).to(tl.float32)
    # 2^(2 (FIELD % 3) - 133) in two factors, because one is not an ordinary float32 number on every host.
    return (code * ((factor * 1.1754943508222875e-38) * (0.0078125 * (4 ** (FIELD % 3))))).to(tl.bfloat16)


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
def levels(c, HIGH: tl.constexpr, ASM: tl.constexpr):
    """The sixteen levels of IQ4_NL. A permutation looks four of them up; a set index bit 3 reads as zero there, so
    the lower and the upper eight come from two look-ups whose difference is the level."""
    if ASM:
        return tl.inline_asm_elementwise(
            f"{{ .reg .b32 t, u, v, one; shr.b32 t, $2, {4 * HIGH}; and.b32 t, t, 252645135;"
            " shr.b32 u, t, 4; or.b32 t, t, u; prmt.b32 t, t, 0, 17440; mov.b32 one, 1065369472;"
            # Magnitudes 127 104 83 65 | 49 35 22 10 of the negative levels, then 1 13 25 38 | 53 69 89 113.
            " prmt.b32 u, 1095985279, 169222961, t; xor.b32 t, t, 34952; prmt.b32 v, 639175937, 1901675829, t;"
            # Bytes v - u without borrows: one of the two is zero in each byte; u > 0 becomes -u as 256 - u.
            " sub.u32 t, 2155905152, u; add.u32 t, t, v; xor.b32 t, t, 2155905152;"
            " prmt.b32 u, t, 0, 17218; prmt.b32 t, t, 0, 16704;"
            " lop3.b32 v, t, 8388736, 3271607040, 234; lop3.b32 t, t, 8323199, 1124090624, 234;"
            " fma.rn.bf16x2 $0, t, one, v;"
            " lop3.b32 v, u, 8388736, 3271607040, 234; lop3.b32 u, u, 8323199, 1124090624, 234;"
            " fma.rn.bf16x2 $1, u, one, v; }",
            "=r,=r,r", [c], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    return _level_of((c.to(tl.int32) >> (4 * HIGH)) & 15).to(tl.bfloat16)


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
def e2m1(c, HIGH: tl.constexpr, ASM: tl.constexpr):
    """Twice the E2M1 value of nibbles.

    Doubled magnitudes 0 1 2 3 4 6 8 12; index bit 3 is the sign and reads as zero in a permutation, so positive and
    negated codes come from two look-ups; 192 + value is built in the low byte and 192 taken away.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            f"{{ .reg .b32 t, u, v, one, b; shr.b32 t, $2, {4 * HIGH}; and.b32 t, t, 252645135;"
            " shr.b32 u, t, 4; or.b32 t, t, u; prmt.b32 t, t, 0, 17440;"
            " prmt.b32 u, 50462976, 201852420, t; xor.b32 t, t, 34952; prmt.b32 v, 50462976, 201852420, t;"
            " add.u32 u, u, 1077952576; sub.u32 t, u, v; mov.b32 one, 1065369472; mov.b32 b, 3275801408;"
            " prmt.b32 u, t, 1128481603, 16704; fma.rn.bf16x2 $0, u, one, b;"
            " prmt.b32 v, t, 1128481603, 17218; fma.rn.bf16x2 $1, v, one, b; }",
            "=r,=r,r", [c], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    return _e2m1_doubled((c.to(tl.int32) >> (4 * HIGH)) & 15).to(tl.bfloat16)


@triton.jit
def _byte_raised(word, INDEX: tl.constexpr, ASM: tl.constexpr):
    """2^23 + byte INDEX of words as float32: the byte in the lowest mantissa bits, no slow integer conversion."""
    if ASM:
        return tl.inline_asm_elementwise(
            f"prmt.b32 $0, $1, 1258291200, {29760 + INDEX};", "=r,r", [word], dtype=tl.float32, is_pure=True, pack=1
        )
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
def group_scale(
    ptr, step, j, n, rows, SCALE: tl.constexpr, WORDS: tl.constexpr, BIAS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Scale and offset [BN] of dot j: the dot's weights are scale * tile + offset (BIAS is what the tile has left)."""
    offset = tl.zeros_like(n).to(tl.float32)
    if SCALE == SCALE_HALF:
        scale = half_of(load_word(ptr, step, j // 2, n, rows, WORDS), j % 2)
    elif SCALE == SCALE_HALF_PAIR:
        word = load_word(ptr, step, j, n, rows, WORDS)
        scale = half_of(word, 0)
        offset = tl.fma(scale, tl.full(scale.shape, BIAS, tl.float32), half_of(word, 1))
    elif SCALE == SCALE_K:
        pair = load_word(ptr, step, 0, n, rows, WORDS)
        scale = _lowered(_byte_raised(load_word(ptr, step, 1 + j // 4, n, rows, WORDS), j % 4, ASM), half_of(pair, 0))
        minimum = _byte_raised(load_word(ptr, step, 3 + j // 4, n, rows, WORDS), j % 4, ASM)
        minimum = _lowered(minimum, -half_of(pair, 1))
        offset = tl.fma(scale, tl.full(scale.shape, BIAS, tl.float32), minimum)
    elif SCALE == SCALE_BYTE:
        # Stored with 128 added.
        unit = load_word(ptr, step, 0, n, rows, WORDS).to(tl.float32, bitcast=True)
        scale = _byte_raised(load_word(ptr, step, 1 + j // 4, n, rows, WORDS), j % 4, ASM)
        scale = (scale - 8388736.0) * unit
    elif SCALE == SCALE_ODD_NIBBLE:
        # unit * (2 * nibble + 1)
        unit = load_word(ptr, step, 0, n, rows, WORDS).to(tl.float32, bitcast=True)
        scale = _lowered(_odd_raised(load_word(ptr, step, 1 + j // 8, n, rows, WORDS), j % 8, ASM), unit)
    elif SCALE == SCALE_POWER:
        # 2^(e - 128), subnormal below e = 2.
        exponent = (load_word(ptr, step, j // 4, n, rows, WORDS) >> (8 * (j % 4))) & 255
        bits = tl.where(exponent < 2, 0x200000 << exponent, (exponent - 1) << 23)
        scale = bits.to(tl.float32, bitcast=True)
    else:
        scale = load_word(ptr, step, 0, n, rows, WORDS).to(tl.float32, bitcast=True)
    return scale, offset


@triton.jit
def minimum_tile(c1_ptr, step, n, rows, SWAP: tl.constexpr, ASM: tl.constexpr):
    """The sixteen minima of a step [BN, 16] as bfloat16: a nibble of 16-bit words that hold four steps."""
    return word_nibble(load_tile(c1_ptr, step // 4, 0, n, rows, 1, 16, SWAP), 4 * (step % 4), ASM)


@triton.jit
def minimum_unit(ptr, step, n, rows, WORDS: tl.constexpr):
    """What the minima of a step are multiplied with [BN], negated."""
    return -half_of(load_word(ptr, step, 0, n, rows, WORDS), 1)


@triton.jit
def group_factor(ptr, step, j, n, rows, WORDS: tl.constexpr, ASM: tl.constexpr):
    """Scale [BN] of dot j times 2^119 as a pair of equal bfloat16 numbers in an int32, from a byte of five exponent
    and three mantissa bits.

    `relayout` re-encodes E4M3 scales so: subnormal ones become ordinary numbers of the wider exponent (exact), and
    the codes of a group with scale zero become zero. Shifting the byte into place and raising its exponent is all
    that is left to do here.
    """
    word = load_word(ptr, step, j // 4, n, rows, WORDS)
    if ASM:
        return tl.inline_asm_elementwise(
            f"{{ .reg .b32 t; prmt.b32 t, $1, 0, {16448 + 257 * (j % 4)}; mad.lo.u32 $0, t, 16, 1979741696; }}",
            "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return (((word >> (8 * (j % 4))) & 255) << 4) + 30208


@triton.jit
def nibble_factor(ptr, step, j, n, rows, WORDS: tl.constexpr, ASM: tl.constexpr):
    """Four-bit scale [BN] of dot j times 2^(119 - 2 (j % 8 % 3)) as a pair of equal bfloat16 numbers in an int32."""
    word = load_word(ptr, step, 1 + j // 8, n, rows, WORDS)
    if ASM:
        # 128 + scale, then (128 + scale) * 2^k - 2^(k + 7).
        return tl.inline_asm_elementwise(
            f"{{ .reg .b32 t, u, v; prmt.b32 t, $1, 0, {16448 + 257 * (j % 8 // 2)}; shr.b32 t, t, {4 * (j % 2)};"
            f" lop3.b32 t, t, 983055, 1124090624, 234; mov.b32 u, {(246 - 2 * (j % 8 % 3)) * 8388736};"
            f" mov.b32 v, {(509 - 2 * (j % 8 % 3)) * 8388736}; fma.rn.bf16x2 $0, t, u, v; }}",
            "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    scale = ((word >> (4 * (j % 8))) & 15).to(tl.float32) * (6.646139978924579e35 * 0.25 ** (j % 8 % 3))
    return scale.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
