"""Kernels around the integer product: input rows as integers, and decoded rows of a weight."""
# mypy: disable-error-code=assignment

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from slimserve.ops.triton.integers import (
    BYTES,
    GRID_BYTES,
    HALVES,
    ODD_NIBBLES,
    SIGNED_BYTES,
    UNSIGNED_BYTES,
    column_place,
    eights,
    element_at,
    grid_values,
    place_at,
)
from slimserve.ops.triton.tiles import half_of, row_words


@triton.jit
def _round(value):
    """The nearest integer, halves to even, of numbers below 2^22: added to 1.5 * 2^23 it stands in the lowest bits."""
    return (value + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def shared_like_products(step):
    """Zero, and as much shared memory for the program as one of a product with a table has (`integers.shared_table`).

    A multiprocessor divides its memory between first-level cache and shared memory as the kernels on it ask, and one
    that asks for another division waits until it is idle. Input rows are made while products before and after occupy
    it: asking for none kept all programs of the next product from those multiprocessors.
    """
    return tl.inline_asm_elementwise(
        "{ .shared .align 16 .b32 taken[256]; mov.u32 $0, taken; shr.u32 $0, $0, 31; }", "=r,r", [step], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _store_sums(sums_ptr, total, row, virtual, num_x, num_steps, step, groups, GROUPS: tl.constexpr,
                WIDE: tl.constexpr):  # fmt: skip
    """Group sums of a plane, their signs turned (minima are taken away), as two digits, 128 high + low, at the places
    of the step's minima: two planes [2 M, steps, 32] for the wide form; for the narrow one blocks of `load_columns`,
    whose chunks are the digits, [steps, 2 M, 64]."""
    PARTS: tl.constexpr = 32 // GROUPS
    part = tl.reshape(tl.arange(0, PARTS), (PARTS, 1, 1, 1))
    slot = part * GROUPS + groups
    own = part == step % PARTS
    column = (row * 2 + virtual).to(tl.int64)
    if WIDE:
        at = (column * num_steps + step) * 32 + slot
        size = tl.cast(num_x, tl.int64) * num_steps * 32
    else:
        at = tl.cast(step, tl.int64) * eights(num_x) * 512 + column * 64
        at += slot % 16 // 4 * 16 + slot // 16 * 4 + slot % 4
        size = 8
    tl.store(sums_ptr + at, tl.where(own, (-total) >> 7, 0).to(tl.int8))
    tl.store(sums_ptr + size + at, tl.where(own, (-total) & 127, 0).to(tl.int8))


@triton.jit(do_not_specialize=["num_x", "num_steps"])
def integer_rows_kernel(
    x_ptr, planes_ptr, scale_ptr, sums_ptr, num_x, width, num_steps, stride_x,
    ORDER: tl.constexpr, MINIMA: tl.constexpr, WIDE: tl.constexpr, OVERLAP: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Input rows x [M, K] as integers of sixteen bits with a scale for each 256 elements, a program for each.

    planes: columns 2 m and 2 m + 1 are the upper and lower eight bits (both signed) of row m, for the wide form int8
    [2 M, K] in the order of the weights, for the narrow one blocks at `column_place`; scale float32 [K / 256, M];
    sums: `_store_sums`. num_x: 2 M, which the narrow form rounds up to eights. A block with a NaN or an infinity has
    the scale NaN. TABLE: a product that reads them has a table in shared memory.
    """
    if OVERLAP:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    step = tl.program_id(1)
    if TABLE:
        row += shared_like_products(step)
    # A thread's eight elements stand together wherever they are stored, and mostly where they come from.
    t, chunk, inside = tl.arange(0, 4)[:, None, None], tl.arange(0, 8)[None, :, None], tl.arange(0, 8)[None, None, :]
    if ORDER == HALVES:
        element = element_at(chunk, t, inside // 4, inside % 4, ORDER)
    else:
        element = element_at(chunk, t, 0, 0, ORDER) + inside
    x = tl.load(x_ptr + row * stride_x + step * 256 + element).to(tl.float32)
    # Sizes as bits: those of a NaN or an infinity are above all others, so one search finds both.
    top = tl.max(tl.reshape(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, (256,)), axis=0)
    broken = top >= 0x7F800000
    largest = tl.where(broken, 0, top).to(tl.float32, bitcast=True)
    # Below 2^-100 a block's inverse scale would leave the range; its products are far below any other's rounding.
    inverse = tl.where(largest > 7.9e-31, 32639.0 / tl.maximum(largest, 7.9e-31), 0.0)
    scale = tl.where(broken, float("nan"), largest / 32639.0)
    value = _round(tl.where(broken, 0.0, x) * inverse)
    low = ((value + 128) & 255) - 128
    high = (value - low) >> 8
    if WIDE:
        target = planes_ptr + row * 2 * (num_steps * 256) + step * 256
        target += chunk * 32 + inside // 4 * 16 + t * 4 + inside % 4
        apart = num_steps * 256
    else:
        target = planes_ptr + tl.cast(step, tl.int64) * eights(num_x) * 2048 + column_place(row * 2)
        target += chunk // 2 * 512 + t * 16 + chunk % 2 * 8 + inside
        apart = 64
    tl.store(target, high.to(tl.int8))
    tl.store(target + apart, low.to(tl.int8))
    tl.store(scale_ptr + tl.cast(step, tl.int64) * (num_x // 2) + row, scale)
    if MINIMA == 8:
        groups = tl.reshape(tl.arange(0, 8), (1, 1, 8, 1))
        for virtual in tl.static_range(2):
            total = tl.sum(tl.sum(high if virtual == 0 else low, axis=2), axis=0)
            _store_sums(
                sums_ptr, tl.reshape(total, (1, 1, 8, 1)), row, virtual, num_x, num_steps, step, groups, 8, WIDE
            )
    elif MINIMA == 16:
        # A thread's chunks 2 f and 2 f + 1 are a group.
        block = tl.reshape(tl.arange(0, 4), (1, 1, 4, 1))
        groups = block // 2 * 8 + tl.reshape(tl.arange(0, 4), (1, 4, 1, 1)) * 2 + block % 2
        for virtual in tl.static_range(2):
            # In two steps: Triton 3.6 adds up wrong lanes where those of one axis lie apart.
            total = tl.sum(high if virtual == 0 else low, axis=2)
            total = tl.sum(tl.reshape(total, (4, 4, 2)), axis=2)
            _store_sums(
                sums_ptr, tl.reshape(total, (1, 4, 4, 1)), row, virtual, num_x, num_steps, step, groups, 16, WIDE
            )


@triton.jit(do_not_specialize=["num_ids", "num_steps", "tiles"])
def integer_embedding_kernel(
    ids_ptr, c0_ptr, c1_ptr, minima_ptr, words_ptr, table_ptr, out_ptr, num_ids, rows, tiles, width, num_steps,
    CODE: tl.constexpr, SCALE: tl.constexpr, ORDER: tl.constexpr, LOW_BITS: tl.constexpr, LOW_AT: tl.constexpr,
    HIGH_BITS: tl.constexpr, HIGH_AT: tl.constexpr, WORDS: tl.constexpr, MINIMA: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Decode rows ids [T] of a weight to out [T, K], each weight's fields loaded."""
    at = tl.program_id(0) * BN + tl.arange(0, BN)
    step = tl.program_id(1)
    live = at < num_ids
    n = tl.load(ids_ptr + at, mask=live, other=0).to(tl.int32)
    n = tl.minimum(tl.maximum(n, 0), rows - 1)[:, None]
    element = tl.arange(0, 256)[None, :]
    words = row_words(words_ptr, step, n, rows, WORDS)
    fragment = tl.cast(step, tl.int64) * tiles + n // 16
    chunk, t, half, byte = place_at(element, ORDER)
    inside = (n % 8 * 4 + t) * 16 + half * 8 + n % 16 // 8 * 4 + byte
    if CODE == GRID_BYTES:
        value = grid_values(c0_ptr, table_ptr, step, n, element, tiles)
    else:
        PER: tl.constexpr = 8 // LOW_BITS
        low = tl.load(c0_ptr + (fragment * LOW_BITS + chunk // PER) * 512 + inside).to(tl.int32) & 255
        value = ((low >> (chunk % PER * LOW_BITS)) & ((1 << LOW_BITS) - 1)) << LOW_AT
        if HIGH_BITS > 0:
            PER_HIGH: tl.constexpr = 8 // (HIGH_BITS if HIGH_BITS > 0 else 8)
            high = tl.load(c1_ptr + (fragment * HIGH_BITS + chunk // PER_HIGH) * 512 + inside).to(tl.int32) & 255
            value = value | (((high >> (chunk % PER_HIGH * HIGH_BITS)) & ((1 << HIGH_BITS) - 1)) << HIGH_AT)
        if CODE == BYTES:
            value = value.to(tl.int8).to(tl.int32)
    # The words of a step past the first hold scales: bytes or nibbles, each group's at its own place.
    NIBBLES: tl.constexpr = (SCALE != UNSIGNED_BYTES) and (SCALE != SIGNED_BYTES)
    GROUP: tl.constexpr = 16 if (ORDER == HALVES) or (CODE != BYTES and CODE != GRID_BYTES) else 32
    group = element // GROUP
    scale = tl.zeros_like(value)
    PER_WORD: tl.constexpr = 8 if NIBBLES else 4
    for w in tl.static_range(WORDS - 1):
        field = (words[1 + w] >> (group % PER_WORD * (32 // PER_WORD))) & ((1 << (32 // PER_WORD)) - 1)
        scale = tl.where(group // PER_WORD == w, field, scale)
    if SCALE == SIGNED_BYTES:
        scale = scale.to(tl.int8).to(tl.int32)
    elif SCALE == ODD_NIBBLES:
        scale = 2 * scale + 1
    unit = half_of(words[0], 0) if MINIMA > 0 else words[0].to(tl.float32, bitcast=True)
    result = (value * scale).to(tl.float32) * unit
    if MINIMA > 0:
        part = step % (32 // MINIMA)
        slot = part * MINIMA + element // (256 // MINIMA)
        held = (n % 8 * 4 + slot % 16 // 4) * 16 + slot // 16 * 8 + n % 16 // 8 * 4 + slot % 4
        minimum = tl.load(minima_ptr + ((step // 4).to(tl.int64) * tiles + n // 16) * 512 + held).to(tl.int32) & 255
        if MINIMA == 16:
            minimum = (minimum >> (4 * (step // 2 % 2))) & 15
        result = result - minimum.to(tl.float32) * half_of(words[0], 1)
    place = at.to(tl.int64)[:, None] * width + step * 256 + element
    tl.store(out_ptr + place, result.to(out_ptr.dtype.element_ty), mask=live[:, None])
