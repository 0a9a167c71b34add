"""Decoding packed codes to int8 in registers, for formats whose weights are a scale times a small integer.

Such weights multiply as integers: input rows become sixteen-bit integers with one scale for 256 elements
(`integer_rows`), cut into two planes of eight bits, and a tensor core's sums of products of bytes are exact. A group's
integer scale multiplies its int32 sum, so 256 products of a row need one conversion to float32.

Codes stand in bytes in the order in which a tensor core's left operand of bytes is held (`from_bytes`): of a [16, 32]
operand ("chunk") thread t of row g holds four bytes each of rows g and g + 8 at places 4 t and 16 + 4 t. A byte holds a
field of several chunks, so one shift and one mask decode four weights. Which element of a step stands at which place
is the format's order (`element_at`): groups of 32 are chunks, two groups of 16 are the halves of a chunk, or a thread
holds whole groups of 16, where their scales are multiplied into the codes.
"""

# mypy: disable-error-code=assignment

from __future__ import annotations

import triton
import triton.language as tl

# Orders.
CHUNKS = tl.constexpr(0)
HALVES = tl.constexpr(1)
THREADS = tl.constexpr(2)

# Code kinds and scale kinds, apart from those of `tiles`.
BYTES = tl.constexpr(20)
SCALED_BYTES = tl.constexpr(21)
GRID_BYTES = tl.constexpr(22)

NO_SCALES = tl.constexpr(20)
UNSIGNED_BYTES = tl.constexpr(21)
SIGNED_BYTES = tl.constexpr(22)
ODD_NIBBLES = tl.constexpr(23)


@triton.jit
def element_at(chunk, t, half, byte, ORDER: tl.constexpr):
    """Which of the 256 elements of a step stands in byte `byte` of half `half` of what thread t holds of a chunk."""
    if ORDER == CHUNKS:
        element = 32 * chunk + 8 * t + 4 * half + byte
    elif ORDER == HALVES:
        element = 32 * chunk + 16 * half + 4 * t + byte
    else:
        element = 128 * (chunk // 4) + 32 * t + 8 * (chunk % 4) + 4 * half + byte
    return element


@triton.jit
def place_at(element, ORDER: tl.constexpr):
    """The chunk, t, half and byte of an element of a step: `element_at` backwards."""
    if ORDER == CHUNKS:
        chunk, t, half = element // 32, element % 32 // 8, element % 8 // 4
    elif ORDER == HALVES:
        chunk, t, half = element // 32, element % 16 // 4, element % 32 // 16
    else:
        chunk, t, half = element // 128 * 4 + element % 32 // 8, element % 128 // 32, element % 8 // 4
    return chunk, t, half, element % 4


@triton.jit
def from_bytes(held, T: tl.constexpr):
    """Bytes [T, 512] in the order of a thread's registers as a left operand [16 T, 32]. No value changes its thread."""
    tile = tl.permute(tl.reshape(held, (T, 8, 4, 2, 2, 4)), (0, 4, 1, 3, 2, 5))
    return tl.reshape(tile, (16 * T, 32))


@triton.jit
def to_bytes(v, T: tl.constexpr):
    """A value per weight row and t [16 T, 4] in the order of `from_bytes`: [T, 8, 4, 2] (the last: row g or g + 8)."""
    return tl.permute(tl.reshape(v, (T, 2, 8, 4)), (0, 2, 3, 1))


@triton.jit
def eights(num_x):
    """Eights of columns."""
    return (num_x + 7) // 8


@triton.jit
def column_place(m):
    """Where column m begins among the blocks of a step: blocks lie [steps, eights of columns, 4, 8 columns, 64]."""
    return m // 8 * 2048 + m % 8 * 64


@triton.jit
def load_columns(ptr, places, BM: tl.constexpr):
    """A block of 64 bytes of columns whose blocks stand at places [BM], sixteen to a thread: the right operands
    [32, BM] of two chunks."""
    inside = tl.arange(0, 4)[:, None, None] * 16 + tl.arange(0, 16)[None, None, :]
    x = tl.load(ptr + places[None, :, None] + inside)
    first_chunk, second_chunk = tl.split(tl.permute(tl.reshape(x, (4, BM, 2, 2, 4)), (0, 1, 3, 4, 2)))
    return right_operand(first_chunk, BM), right_operand(second_chunk, BM)


@triton.jit
def right_operand(held, BM: tl.constexpr):
    """Bytes [4, BM, 2, 4] (t, column, half, byte) as a right operand [32, BM]. (Joined tensors would make the compiler
    take another order of the operand's registers.)"""
    return tl.reshape(tl.permute(held, (2, 0, 3, 1)), (32, BM))


@triton.jit
def half_of_chunk(x, HALF: tl.constexpr):
    """A right operand [32, BM] with zeros in the other half's places."""
    return tl.where((tl.arange(0, 32) // 16 == HALF)[:, None], x, tl.zeros_like(x))


@triton.jit
def row_places(HALF: tl.constexpr):
    """Input rows [4, 8, HALF / 4] of a tile so ordered that a load of them gives every thread those whose sums it
    holds."""
    row = tl.reshape(tl.arange(0, 4), (4, 1, 1)) + tl.reshape(tl.arange(0, HALF // 4), (1, 1, HALF // 4)) * 4
    return tl.broadcast_to(row, (4, 8, HALF // 4))


@triton.jit
def by_input_row(v, T: tl.constexpr, HALF: tl.constexpr):
    """Values of `row_places` beside sums [16 T, HALF]."""
    held = tl.reshape(tl.permute(v, (1, 2, 0)), (1, 1, 8, HALF))
    return tl.reshape(tl.broadcast_to(held, (T, 2, 8, HALF)), (16 * T, HALF))


@triton.jit
def by_weight_row(v, BN: tl.constexpr, HALF: tl.constexpr):
    """A value per weight row and q [BN, 4] (the same for every q) beside sums [BN, HALF]."""
    return tl.reshape(tl.broadcast_to(v[:, None, :], (BN, HALF // 4, 4)), (BN, HALF))


@triton.jit
def whole_sums(total, BN: tl.constexpr, HALF: tl.constexpr):
    """Sums [BN, 2 HALF] of upper and lower bytes as float32 sums [BN, HALF] of the integers they are of."""
    upper, lower = tl.split(tl.reshape(total, (BN, HALF, 2)))
    return tl.fma(upper.to(tl.float32), tl.full((BN, HALF), 256.0, tl.float32), lower.to(tl.float32))


@triton.jit
def small_sums(total, BN: tl.constexpr, HALF: tl.constexpr):
    """`whole_sums` of sums whose whole is below 2^31 (minima; codes times scales up to 45): rounded once, as there, so
    the same numbers."""
    upper, lower = tl.split(tl.reshape(total, (BN, HALF, 2)))
    return (upper * 256 + lower).to(tl.float32)


@triton.jit
def byte_field(c, FIELD: tl.constexpr, BITS: tl.constexpr, AT: tl.constexpr, ASM: tl.constexpr):
    """Field FIELD (of BITS bits) of bytes, moved to bit AT, other bits zero."""
    MASK: tl.constexpr = ((1 << BITS) - 1) << AT
    LEFT: tl.constexpr = AT - FIELD * BITS if AT > FIELD * BITS else 0
    RIGHT: tl.constexpr = FIELD * BITS - AT if FIELD * BITS > AT else 0
    if ASM:
        return tl.inline_asm_elementwise(
            f"{{ .reg .b32 t; shl.b32 t, $1, {LEFT}; shr.b32 t, t, {RIGHT};"
            f" and.b32 $0, t, {MASK * 16843009}; }}",
            "=r,r", [c], dtype=tl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    wide = c.to(tl.int32) & 255
    return (((wide << LEFT) >> RIGHT) & MASK).to(tl.int8)


@triton.jit
def byte_fields(
    c, h, FIELD: tl.constexpr, BITS: tl.constexpr, AT: tl.constexpr, FIELD_H: tl.constexpr, BITS_H: tl.constexpr,
    AT_H: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Field FIELD of c and field FIELD_H of h, each moved to its bit, together."""
    if ASM:
        MASK: tl.constexpr = ((1 << BITS) - 1) << AT
        LEFT: tl.constexpr = AT - FIELD * BITS if AT > FIELD * BITS else 0
        RIGHT: tl.constexpr = FIELD * BITS - AT if FIELD * BITS > AT else 0
        MASK_H: tl.constexpr = ((1 << BITS_H) - 1) << AT_H
        LEFT_H: tl.constexpr = AT_H - FIELD_H * BITS_H if AT_H > FIELD_H * BITS_H else 0
        RIGHT_H: tl.constexpr = FIELD_H * BITS_H - AT_H if FIELD_H * BITS_H > AT_H else 0
        return tl.inline_asm_elementwise(
            f"{{ .reg .b32 t, u; shl.b32 t, $1, {LEFT}; shr.b32 t, t, {RIGHT};"
            f" and.b32 t, t, {MASK * 16843009};"
            f" shl.b32 u, $2, {LEFT_H}; shr.b32 u, u, {RIGHT_H}; lop3.b32 $0, u, {MASK_H * 16843009}, t, 234; }}",
            "=r,r,r", [c, h], dtype=tl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    return byte_field(c, FIELD, BITS, AT, ASM) | byte_field(h, FIELD_H, BITS_H, AT_H, ASM)


@triton.jit
def scaled_field(c, factor, FIELD: tl.constexpr, ASM: tl.constexpr):
    """Two-bit field FIELD of bytes times a factor below 16 (int32, in the shape of c): at most 45, so that four
    products fit the bytes of one."""
    if ASM:
        return tl.inline_asm_elementwise(
            f"{{ .reg .b32 t; shr.b32 t, $1, {2 * FIELD}; and.b32 t, t, 50529027; mul.lo.u32 $0, t, $2; }}",
            "=r,r,r,r,r,r", [c, factor], dtype=tl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    return (((c.to(tl.int32) >> (2 * FIELD)) & 3) * factor).to(tl.int8)


@triton.jit
def nibble_of(word, shift, ASM: tl.constexpr):
    """Four bits of words from a run-time bit on."""
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; shr.b32 t, $1, $2; and.b32 $0, t, 15; }", "=r,r,r", [word, shift], dtype=tl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip
    return (word >> shift) & 15


@triton.jit
def odd_bytes(word, HIGH: tl.constexpr, ASM: tl.constexpr):
    """2 n + 1 of the lower or the upper nibble n of each byte of words, as bytes."""
    if ASM:
        MOVE: tl.constexpr = "shr.b32 t, $1, 3;" if HIGH else "shl.b32 t, $1, 1;"
        odd = tl.inline_asm_elementwise(
            f"{{ .reg .b32 t; {MOVE} lop3.b32 $0, t, 505290270, 16843009, 234; }}", "=r,r", [word], dtype=tl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        odd = (((word >> 3) if HIGH else (word << 1)) & 0x1E1E1E1E) | 0x01010101
    return odd


@triton.jit
def integer_scale(words, group: tl.constexpr, SCALE: tl.constexpr, ASM: tl.constexpr):
    """The integer scale of group `group` of a step, in the shape of the words. (Nibbles n for 2 n + 1 come as
    `odd_bytes`, those of even groups in the first word.)"""
    word = words[1 + group % 2] if SCALE == ODD_NIBBLES else words[1 + group // 4]
    BYTE: tl.constexpr = group // 2 if SCALE == ODD_NIBBLES else group % 4
    if ASM:
        # The upper three bytes are zero, or repeat the sign.
        UPPER: tl.constexpr = 0x8880 + 0x1110 * BYTE if SCALE == SIGNED_BYTES else 0x4440
        scale = tl.inline_asm_elementwise(
            f"prmt.b32 $0, $1, 0, {UPPER + BYTE};", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        scale = (word >> (8 * BYTE)) & 255
        if SCALE == SIGNED_BYTES:
            scale = scale.to(tl.int8).to(tl.int32)
    return scale


@triton.jit
def scaled_sum(scale, dot, total, ASM: tl.constexpr):
    """scale * dot + total. In assembly, because the compiler would add up a step's products as a tree, whose leaves all
    need a register at once."""
    if ASM:
        return tl.inline_asm_elementwise(
            "mad.lo.s32 $0, $1, $2, $3;", "=r,r,r,r", [scale, dot, total], dtype=tl.int32, is_pure=True, pack=1
        )
    return scale * dot + total


@triton.constexpr_function
def _grid_row(row: int, chunk: int) -> str:
    """Assembly for eight weights of a row: a look-up of eight selectors of four bits, whose bit 2 becomes the sign, and
    two permutations that select among {8, 25, 43} and the negated three."""
    k = 2 * (chunk % 2) + row
    index, signs = f"${4 + chunk // 2 % 2 * 2}", f"${5 + chunk // 2 % 2 * 2}"
    shift = f"shl.b32 s, {signs}, {2 - k};" if k < 2 else f"shr.b32 s, {signs}, {k - 2};"
    return (
        f"prmt.b32 i, {index}, 0, {0x4440 + k}; mad.lo.u32 i, i, $40, $8; ld.shared.b32 sel, [i];"
        f" {shift} lop3.b32 sel, s, 1145324612, sel, 234;"
        f" prmt.b32 ${row}, $24, 14018552, sel; shr.b32 sel, sel, 16;"
        f" prmt.b32 ${2 + row}, $24, 14018552, sel;"
    )


@triton.constexpr_function
def _grid_program(chunk: int) -> str:
    return "{ .reg .b32 i, s, sel; " + _grid_row(0, chunk) + " " + _grid_row(1, chunk) + " }"


GRID_CONSTANTS = (0x2B1908, 4)
"""The grid's values, a byte each, and the bytes of a selector: read from memory, because constants that the assembler
knows take an instruction at every use, and another unit's."""

GRID_OPERANDS = tl.constexpr(",".join(["=&r"] * 4 + ["r"] * 52))


@triton.jit
def shared_table(table_ptr):
    """The address of a copy of a table of 256 words in shared memory, where threads look up different words at once,
    and the two words behind the table (`GRID_CONSTANTS`).

    Every warp writes all of it, so that none waits for another.
    """
    return tl.inline_asm_elementwise(
        "{ .shared .align 16 .b32 table[256]; .reg .b32 t, a, v0, v1, v2, v3; .reg .b64 p; mov.u32 $0, table;"
        " ld.global.nc.v2.b32 {$1, $2}, [$3+1024];"
        " mov.u32 t, %tid.x; and.b32 t, t, 31; shl.b32 t, t, 4; add.u32 a, t, $0; cvt.u64.u32 p, t; add.u64 p, p, $3;"
        " ld.global.nc.v4.b32 {v0, v1, v2, v3}, [p]; st.shared.v4.b32 [a], {v0, v1, v2, v3};"
        " ld.global.nc.v4.b32 {v0, v1, v2, v3}, [p+512]; st.shared.v4.b32 [a+512], {v0, v1, v2, v3};"
        " bar.warp.sync 0xffffffff; }",
        "=&r,=r,=r,l", [table_ptr.to(tl.int64)], dtype=(tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def grid_bytes(c, table, CHUNK: tl.constexpr):
    """Signed grid values of chunk CHUNK (of four) of a fragment c [T, 512]; table: its `shared_table`.

    A thread holds two pairs of 32-bit words for it: four grid indices (chunk, then row) and signs, where bit 4 n + k is
    the sign of weight n of grid row k. The table has a selector of four bits per weight.
    """
    place = tl.broadcast_to(table[0], c.shape)
    values = tl.broadcast_to(table[1], c.shape)
    four = tl.broadcast_to(table[2], c.shape)
    return tl.inline_asm_elementwise(
        _grid_program(CHUNK), GRID_OPERANDS, [c, place, values, four], dtype=tl.int8, is_pure=True, pack=16
    )


@triton.jit
def grid_values(codes_ptr, table_ptr, step, n, element, tiles):
    """The same values for elements of a step (in chunks' order) of rows n, each weight's fields loaded."""
    chunk, t, half, byte = place_at(element, CHUNKS)
    weight = 4 * half + byte
    k = 2 * (chunk % 2) + n % 16 // 8
    fragment = (tl.cast(step, tl.int64) * tiles + n // 16) * 2 + chunk // 4
    words = codes_ptr.to(tl.pointer_type(tl.int32)) + fragment * 128 + (n % 8 * 4 + t) * 4 + chunk // 2 % 2 * 2
    index = (tl.load(words) >> (8 * k)) & 255
    selector = (tl.load(table_ptr + index) >> (4 * weight)) & 3
    value = tl.where(selector == 0, 8, tl.where(selector == 1, 25, 43))
    return tl.where((tl.load(words + 1) >> (4 * weight + k)) & 1 > 0, -value, value)


@triton.jit
def folded(c, scale, SIGNED: tl.constexpr, ASM: tl.constexpr):
    """Codes times their scale (int32 in the shape of c), at most 32,639 in size, as two int8 tensors of which it is 256
    times the first plus the second.

    Two products of codes share a register: with 0x8080 added, neither is negative, and their bytes are the halves of
    the result with their upper bits flipped.
    """
    if ASM:
        U: tl.constexpr = "xor.b32 u, $2, 2155905152; mad.lo.u32 k, $3, 4286578560, 2155905152;"
        PLAIN_U: tl.constexpr = "mov.b32 u, $2; mov.b32 k, 2155905152;"
        START: tl.constexpr = U if SIGNED else PLAIN_U
        return tl.inline_asm_elementwise(
            "{ .reg .b32 u, k, e, o; " + START + " and.b32 e, u, 16711935; prmt.b32 o, u, 0, 17217;"
            " mad.lo.u32 e, e, $3, k; mad.lo.u32 o, o, $3, k; prmt.b32 u, e, o, 29521; xor.b32 $0, u, 2155905152;"
            " prmt.b32 u, e, o, 25152; xor.b32 $1, u, 2155905152; }",
            "=r,=r,r,r,r,r,r", [c, scale], dtype=(tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
    product = c.to(tl.int32) * scale
    low = ((product + 128) & 255) - 128
    return ((product - low) >> 8).to(tl.int8), low.to(tl.int8)
