# ruff: noqa: RUF005 (kernels know no starred expressions)
"""The matrix product in integers, for formats whose weights are a scale times a small integer (`integers`).

Programs, segments of K, the two forms and the stored sums are those of `linear_kernel`. An input row is two columns,
the upper and the lower eight bits of its integers (`integer_rows`); sums of their products with a step's codes are
exact int32 numbers, whatever instruction forms them, so that a row's bits depend on the order of steps alone. Once a
step 256 times the upper sum and the lower one become a float32 sum, which meets the scales of weights and inputs.

The narrow form multiplies the sums of groups by their integer scales. The wide form, whose sums are many, multiplies
the codes instead (`integers.folded`) and adds up a step in the tensor cores.
"""

# mypy: disable-error-code=assignment

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from slimserve.ops.triton.integers import (
    CHUNKS,
    GRID_BYTES,
    HALVES,
    NO_SCALES,
    ODD_NIBBLES,
    SCALED_BYTES,
    UNSIGNED_BYTES,
    by_input_row,
    by_weight_row,
    byte_field,
    byte_fields,
    column_place,
    eights,
    element_at,
    folded,
    from_bytes,
    grid_bytes,
    grid_values,
    half_of_chunk,
    integer_scale,
    load_columns,
    nibble_of,
    odd_bytes,
    row_places,
    scaled_field,
    scaled_sum,
    shared_table,
    small_sums,
    to_bytes,
    whole_sums,
)
from slimserve.ops.triton.linear_kernel import add_segments, step_of, store_segment
from slimserve.ops.triton.tiles import (
    by_thread,
    fragments_of_step,
    from_thread,
    half_of,
    held_rows,
    load_fragments,
    load_hidden_words,
    load_words,
    places_by_thread,
    side_by_side,
    to_sums,
    words_of_step,
)


@triton.jit
def _chunk_bytes(
    low, high, words, c0_ptr, table, step, n, tiles, CHUNK: tl.constexpr,
    CODE: tl.constexpr, LOW_BITS: tl.constexpr, LOW_AT: tl.constexpr, HIGH_BITS: tl.constexpr, HIGH_AT: tl.constexpr,
    T: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The codes of a chunk as int8 [T, 512] in the order of registers (the interpreter's look-ups: [BN, 32])."""
    PER: tl.constexpr = 8 // LOW_BITS
    if CODE == GRID_BYTES:
        if ASM:
            held = grid_bytes(low[CHUNK // 4], table, CHUNK % 4)
        else:
            k = tl.arange(0, 32)[None, :]
            element = element_at(CHUNK, k % 16 // 4, k // 16, k % 4, CHUNKS)
            held = grid_values(c0_ptr, table, step, n[:, None], element, tiles).to(tl.int8)
    elif CODE == SCALED_BYTES:
        # Thread t's bytes belong to group 2 t + (chunk mod 4) / 2 of the eight of a word.
        t = tl.reshape(tl.arange(0, 4), (1, 1, 4, 1, 1, 1))
        word = to_bytes(words[1 + CHUNK // 4], T)[:, :, :, None, :, None]
        shift = tl.broadcast_to(8 * t + 4 * (CHUNK % 4 // 2), word.shape)
        factor = tl.broadcast_to(nibble_of(word, shift, ASM), (T, 8, 4, 2, 2, 4))
        held = scaled_field(low[CHUNK // PER], tl.reshape(factor, (T, 512)), CHUNK % PER, ASM)
    elif HIGH_BITS > 0:
        PER_HIGH: tl.constexpr = 8 // HIGH_BITS
        held = byte_fields(
            low[CHUNK // PER], high[CHUNK // PER_HIGH], CHUNK % PER, LOW_BITS, LOW_AT, CHUNK % PER_HIGH, HIGH_BITS,
            HIGH_AT, ASM,
        )  # fmt: skip
    else:
        held = byte_field(low[CHUNK // PER], CHUNK % PER, LOW_BITS, LOW_AT, ASM)
    return held


@triton.jit
def _dot_minima(
    minima, sums_ptr, step, m, num_x, num_steps,
    MINIMA: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, T: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Minima of a step times group sums of the input, which are stored with their signs turned: int32 [BN, BM]."""
    if MINIMA == 16:
        # Two steps share a byte.
        odd = (step >> 1) & 1
        if ASM:
            minima = tl.inline_asm_elementwise(
                "{ .reg .b32 t; shr.b32 t, $1, $2; and.b32 $0, t, 252645135; }", "=r,r,r,r,r,r",
                [minima, tl.broadcast_to(4 * odd, minima.shape)], dtype=tl.int8, is_pure=True, pack=4,
            )  # fmt: skip
        else:
            minima = (((minima.to(tl.int32) & 255) >> (4 * odd)) & 15).to(tl.int8)
    minima = from_bytes(minima, T)
    if WIDE:
        place = sums_ptr + step * 32 + (m.to(tl.int64) * (num_steps * 32))[None, :] + tl.arange(0, 32)[:, None]
        high = tl.load(place)
        low = tl.load(place + tl.cast(num_x, tl.int64) * num_steps * 32)
    else:
        high, low = load_columns(sums_ptr + tl.cast(step, tl.int64) * eights(num_x) * 512, m * 64, BM)
    found = tl.dot(minima, high, tl.zeros((16 * T, BM), tl.int32), out_dtype=tl.int32)
    found = tl.dot(minima, low, found * 128, out_dtype=tl.int32)
    return found


@triton.jit
def _narrow_sums(
    low, high, words, x_ptr, c0_ptr, table, step, n, m, tiles, num_x,
    CODE: tl.constexpr, SCALE: tl.constexpr, ORDER: tl.constexpr, LOW_BITS: tl.constexpr, LOW_AT: tl.constexpr,
    HIGH_BITS: tl.constexpr, HIGH_AT: tl.constexpr, BM: tl.constexpr, T: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Sums of a step [BN, BM]: groups' sums times their scales."""
    BN: tl.constexpr = 16 * T
    total = tl.zeros((BN, BM), tl.int32)
    base = tl.cast(step, tl.int64) * eights(num_x) * 2048
    for pair in tl.static_range(4):
        both = load_columns(x_ptr + (base + pair * 512), column_place(m), BM)
        for inside in tl.static_range(2):
            codes = _chunk_bytes(
                low, high, words, c0_ptr, table, step, n, tiles, 2 * pair + inside,
                CODE, LOW_BITS, LOW_AT, HIGH_BITS, HIGH_AT, T, ASM,
            )  # fmt: skip
            if ASM or (CODE != GRID_BYTES):
                codes = from_bytes(codes, T)
            if ORDER == HALVES:
                for half in tl.static_range(2):
                    x = half_of_chunk(both[inside], half)
                    dot = tl.dot(codes, x, tl.zeros((BN, BM), tl.int32), out_dtype=tl.int32)
                    scale = integer_scale(words, 2 * (2 * pair + inside) + half, SCALE, ASM)
                    total = scaled_sum(to_sums(scale, BN, BM), dot, total, ASM)
            elif SCALE == NO_SCALES:
                total = tl.dot(codes, both[inside], total, out_dtype=tl.int32)
            else:
                dot = tl.dot(codes, both[inside], tl.zeros((BN, BM), tl.int32), out_dtype=tl.int32)
                scale = integer_scale(words, 2 * pair + inside, SCALE, ASM)
                total = scaled_sum(to_sums(scale, BN, BM), dot, total, ASM)
    return total


@triton.jit
def _scales_of_chunk(words, CHUNK: tl.constexpr, SCALE: tl.constexpr, ORDER: tl.constexpr, T: tl.constexpr,
                     ASM: tl.constexpr):  # fmt: skip
    """The integer scales of a chunk beside its bytes [T, 512]."""
    if ORDER == HALVES:
        first = to_bytes(integer_scale(words, 2 * CHUNK, SCALE, ASM), T)
        second = to_bytes(integer_scale(words, 2 * CHUNK + 1, SCALE, ASM), T)
        held = tl.permute(tl.join(first, second), (0, 1, 2, 4, 3))  # [T, 8, 4, half, row half]
    else:
        held = to_bytes(integer_scale(words, CHUNK, SCALE, ASM), T)[:, :, :, None, :]
    return tl.reshape(tl.broadcast_to(held[:, :, :, :, :, None], (T, 8, 4, 2, 2, 4)), (T, 512))


@triton.jit
def _wide_sums(
    low, high, words, x_ptr, c0_ptr, table, step, n, m, tiles, width,
    CODE: tl.constexpr, SCALE: tl.constexpr, ORDER: tl.constexpr, LOW_BITS: tl.constexpr, LOW_AT: tl.constexpr,
    HIGH_BITS: tl.constexpr, HIGH_AT: tl.constexpr, BM: tl.constexpr, T: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Sums of a step [BN, BM]: codes times their scales, as two planes of bytes, the upper one first."""
    total = tl.zeros((16 * T, BM), tl.int32)
    lower = ()
    for part in tl.static_range(2):
        k = step * 256 + 128 * part + tl.arange(0, 128)
        x = tl.load(x_ptr + (m.to(tl.int64) * width)[None, :] + k[:, None])
        upper = ()
        rest = ()
        for inside in tl.static_range(4):
            codes = _chunk_bytes(
                low, high, words, c0_ptr, table, step, n, tiles, 4 * part + inside,
                CODE, LOW_BITS, LOW_AT, HIGH_BITS, HIGH_AT, T, ASM,
            )  # fmt: skip
            if SCALE != NO_SCALES:
                if ASM or (CODE != GRID_BYTES):
                    scale = _scales_of_chunk(words, 4 * part + inside, SCALE, ORDER, T, ASM)
                    codes, least = folded(codes, scale, SCALE != UNSIGNED_BYTES, ASM)
                    least = from_bytes(least, T)
                else:
                    scale = integer_scale(words, 4 * part + inside, SCALE, ASM)
                    codes, least = folded(codes, tl.sum(scale, axis=1)[:, None] // 4, True, ASM)
                rest = rest + (least,)
            if ASM or (CODE != GRID_BYTES):
                codes = from_bytes(codes, T)
            upper = upper + (codes,)
        total = tl.dot(side_by_side(upper, 4), x, total, out_dtype=tl.int32)
        if SCALE != NO_SCALES:
            lower = lower + ((side_by_side(rest, 4), x),)
    if SCALE != NO_SCALES:
        total = total * 256
        for part in tl.static_range(2):
            total = tl.dot(lower[part][0], lower[part][1], total, out_dtype=tl.int32)
    return total


@triton.jit
def _multiply_integers(
    low, high, words, x_ptr, scale_ptr, sums_ptr, c0_ptr, minima_ptr, table, step, n, m, input_rows,
    tile, tiles, num_x, num_steps, acc,
    CODE: tl.constexpr, SCALE: tl.constexpr, ORDER: tl.constexpr, LOW_BITS: tl.constexpr, LOW_AT: tl.constexpr,
    HIGH_BITS: tl.constexpr, HIGH_AT: tl.constexpr, MINIMA: tl.constexpr,
    WIDE: tl.constexpr, BM: tl.constexpr, T: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """acc [BN, BM / 2] plus the products of a step."""
    BN: tl.constexpr = 16 * T
    HALF: tl.constexpr = BM // 2
    if SCALE == ODD_NIBBLES:
        words = (words[0], odd_bytes(words[1], False, ASM), odd_bytes(words[1], True, ASM))
    if WIDE:
        total = _wide_sums(
            low, high, words, x_ptr, c0_ptr, table, step, n, m, tiles, num_steps * 256,
            CODE, SCALE, ORDER, LOW_BITS, LOW_AT, HIGH_BITS, HIGH_AT, BM, T, ASM,
        )  # fmt: skip
    else:
        total = _narrow_sums(
            low, high, words, x_ptr, c0_ptr, table, step, n, m, tiles, num_x,
            CODE, SCALE, ORDER, LOW_BITS, LOW_AT, HIGH_BITS, HIGH_AT, BM, T, ASM,
        )  # fmt: skip
    unit = half_of(words[0], 0) if MINIMA > 0 else words[0].to(tl.float32, bitcast=True)
    if CODE == SCALED_BYTES:
        value = small_sums(total, BN, HALF) * by_weight_row(unit, BN, HALF)
    else:
        value = whole_sums(total, BN, HALF) * by_weight_row(unit, BN, HALF)
    if MINIMA > 0:
        # Four steps read the same bytes.
        minima = load_fragments(minima_ptr + (step >> 2) * (tiles * 512), tile, 1, 512, "")
        least = _dot_minima(minima[0], sums_ptr, step, m, num_x, num_steps, MINIMA, WIDE, BM, T, ASM)
        value = tl.fma(small_sums(least, BN, HALF), by_weight_row(half_of(words[0], 1), BN, HALF), value)
    scales = tl.load(scale_ptr + tl.cast(step, tl.int64) * (num_x // 2) + input_rows)
    return tl.fma(value, by_input_row(scales, T, HALF), acc)


@triton.jit(do_not_specialize=["num_x", "num_steps", "num_segments", "row_divisor", "tiles"])
def integer_kernel(
    x_ptr, scale_ptr, sums_ptr, c0_ptr, c1_ptr, minima_ptr, words_ptr, table_ptr, out_ptr, work_ptr, lock_ptr,
    tile_group_ptr, tile_first_ptr, tile_count_ptr, row_ids_ptr,
    num_x, rows, tiles, stride_out, num_steps, num_segments, row_divisor,
    c0_group, c1_group, words_group, minima_group,
    CODE: tl.constexpr, SCALE: tl.constexpr, ORDER: tl.constexpr, LOW_BITS: tl.constexpr, LOW_AT: tl.constexpr,
    HIGH_BITS: tl.constexpr, HIGH_AT: tl.constexpr, WORDS: tl.constexpr, MINIMA: tl.constexpr,
    SPLIT: tl.constexpr, GROUPED: tl.constexpr, WIDE: tl.constexpr, OVERLAP: tl.constexpr, ASM: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr, BY_SEGMENT: tl.constexpr, TAKEN: tl.constexpr,
    EXACT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """See the module. num_x: columns of x, two to an input row; tiles: sixteens of weight rows; TAKEN, EXACT: see
    `add_segments` and `take_over`; ALIGNED: `load_hidden_words`."""
    T: tl.constexpr = BN // 16
    HALF: tl.constexpr = BM // 2
    # Weights are read once: what all programs read again should stay in the first-level cache. Where a warp's step has
    # few bytes, saying so costs more (it takes six instructions a step) than it brings.
    POLICY: tl.constexpr = "evict_first" if WIDE or LOW_BITS + HIGH_BITS > 2 else ""
    tile_m = tl.program_id(0)
    tile_n = tl.program_id(1 if BY_SEGMENT else 2)
    n = tile_n * BN + tl.arange(0, BN)
    live_n = n < rows
    n = tl.minimum(n, rows - 1)
    held = tl.minimum(held_rows(tile_n * BN, T), rows - 1)
    tile = tl.minimum(tile_n * T + tl.arange(0, T), tiles - 1)
    m = tl.arange(0, BM)
    input_rows = row_places(HALF)
    row = tl.arange(0, HALF)
    if OVERLAP:
        cuda.gdc_launch_dependents()
    if GROUPED:
        # Input rows of one group (expert): their ids stand together in row_ids.
        if OVERLAP:
            cuda.gdc_wait()
        count = tl.load(tile_count_ptr + tile_m)
        if count == 0:
            return
        group = tl.load(tile_group_ptr + tile_m).to(tl.int64)
        first = tl.load(tile_first_ptr + tile_m)
        live_m = row < count
        # Columns without an input row repeat the last one and are not stored: cheaper than a mask for every load.
        out_row = tl.load(row_ids_ptr + first + tl.minimum(row, count - 1))
        m = tl.load(row_ids_ptr + first + tl.minimum(m // 2, count - 1)) // row_divisor * 2 + m % 2
        input_rows = tl.load(row_ids_ptr + first + tl.minimum(input_rows, count - 1)) // row_divisor
        c0_ptr += group * c0_group
        c1_ptr += group * c1_group
        words_ptr += group * words_group
        minima_ptr += group * minima_group
    else:
        m = tl.minimum(tile_m * BM + m, num_x - 1)
        input_rows = tl.minimum(tile_m * HALF + input_rows, num_x // 2 - 1)
        out_row = tile_m * HALF + row
        live_m = out_row * 2 < num_x
    table = table_ptr
    if CODE == GRID_BYTES and ASM:
        table = shared_table(table_ptr)
    total = tl.zeros((BN, HALF), tl.float32)
    first_segment = 0
    last_segment = num_segments
    if SPLIT:
        first_segment = tl.program_id(2 if BY_SEGMENT else 1)
        last_segment = first_segment + 1
    if OVERLAP and not GROUPED and WIDE:
        cuda.gdc_wait()
    for segment in range(first_segment, last_segment):
        acc = tl.zeros((BN, HALF), tl.float32)
        first_step = step_of(segment, num_steps, num_segments)
        last_step = step_of(segment + 1, num_steps, num_segments)
        low_step = fragments_of_step(c0_ptr, first_step, tiles, LOW_BITS, 512)
        high_step = fragments_of_step(c1_ptr, first_step, tiles, HIGH_BITS, 512)
        words_step = words_of_step(words_ptr, first_step, rows, WORDS)
        # Where steps are copied ahead, words are asked for a step ahead as well, past shared memory. (Without copies
        # under way that was slower.)
        HIDDEN: tl.constexpr = WIDE and STAGES > 1
        following = ()
        if HIDDEN:
            following = load_hidden_words(words_step, held, rows, WORDS, ALIGNED, T, ASM)
        for step in tl.range(first_step, last_step, num_stages=STAGES):
            low = load_fragments(low_step, tile, LOW_BITS, 512, POLICY)
            high = low
            if HIGH_BITS > 0:
                high = load_fragments(high_step, tile, HIGH_BITS, 512, POLICY)
            if HIDDEN:
                words = following
                words_step += tl.where(step == last_step - 1, 0, rows * WORDS)
                following = load_hidden_words(words_step, held, rows, WORDS, ALIGNED, T, ASM)
            else:
                words = load_words(words_step, held, rows, WORDS, T)
                words_step += rows * WORDS
            low_step += tiles * (LOW_BITS * 512)
            high_step += tiles * (HIGH_BITS * 512)
            if OVERLAP and not GROUPED and not WIDE:
                # The first weights are under way by now.
                cuda.gdc_wait()
            acc = _multiply_integers(
                low, high, words, x_ptr, scale_ptr, sums_ptr, c0_ptr, minima_ptr, table, step, n, m,
                input_rows, tile, tiles, num_x, num_steps, acc,
                CODE, SCALE, ORDER, LOW_BITS, LOW_AT, HIGH_BITS, HIGH_AT, MINIMA, WIDE, BM, T, ASM,
            )  # fmt: skip
        total += acc
    if SPLIT:
        at = tl.cast(tile_n, tl.int64) * tl.num_programs(0) + tile_m
        SIZE: tl.constexpr = BN * HALF
        work_ptr += at * num_segments * SIZE + places_by_thread(T, HALF, 1)
        held_total = by_thread(total, T, HALF, 1)
        if store_segment(work_ptr, lock_ptr + at, SIZE, first_segment, num_segments, held_total, SPLIT):
            return
        held_total = add_segments(work_ptr, lock_ptr + at, SIZE, num_segments, held_total, SPLIT, TAKEN, EXACT)
        total = from_thread(held_total, T, HALF, 1)
    place = out_row.to(tl.int64)[None, :] * stride_out + n[:, None]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=live_m[None, :] & live_n[:, None])
