"""The matrix product with packed weights in bfloat16, one kernel for many formats and every number of rows.

A program owns BN weight rows and BM input rows and walks K in steps, in order. K is cut into segments whose number is
a function of (N, K, format) alone and whose lengths differ by one step at most. Each segment has its own float32
accumulator; segments are added in order, either by the program that walked them all, or, where segments run in
parallel, by one of them, which reads the others' stored sums: the last to finish, or, in the narrow form, the last in
order, which waits for the others (`take_over`). With few input rows all programs of first segments begin before those
of second ones (BY_SEGMENT), so that those that add up begin last and mostly find all sums there. Products are
tensor-core products of sixteen elements at a time with the weights as left operand, held in registers from load to
product (`tiles.from_fragment`).

Two forms. Narrow (few rows): a program is one warp; nothing passes through shared memory, no barrier is met. Wide: a
program is one or more groups of four warps, x (laid out for it by `prepare_rows`) comes through shared memory, and
products are of the warp-group form; mostly steps are copied ahead (STAGES), or their dots are joined (`walk_joined`).
Both add the same products in the same order; `linear.warp_groups_agree` asks the device whether its two instructions
round alike before the wide form serves.
"""
# ruff: noqa: RUF005 (kernels know no starred expressions)
# mypy: disable-error-code=assignment

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from slimserve.ops.triton.tiles import (
    GRID,
    PLAIN,
    WORD_E2M1,
    by_row,
    by_thread,
    code_tiles,
    fragments_of_step,
    from_fragment,
    from_thread,
    group_factor,
    group_scale,
    held_rows,
    hidden_words,
    load_fragments,
    load_operands,
    load_words,
    place_of,
    places_by_thread,
    side_by_side,
    to_fragments,
    to_sums,
    words_of_step,
)
from slimserve.ops.triton.tiles_grid import grid_tile

ANNOUNCED, HANDED = tl.constexpr(1), tl.constexpr(2)
"""How segments that run in parallel meet: the last to announce itself adds up, or the last in order (`take_over`)."""

ABSENT = tl.constexpr(-1)
MOST_TRIES = tl.constexpr(1 << 20)
"""So often sums are asked for before a program gives up and ends with NaN."""
PATIENCE = tl.constexpr(64)
"""So often a total may be NaN before it is asked whether a part of it is absent."""


@triton.jit
def load_plain(ptr, held, first, width, KD: tl.constexpr, COUNT: tl.constexpr, WHOLE: tl.constexpr):
    """Elements [first, first + COUNT) of the rows `held`, of a thread what it multiplies: a tuple of COUNT / KD. WHOLE:
    rows end with a step."""
    found = ()
    q, inside = tl.arange(0, 4), tl.arange(0, KD // 4)
    k = first + (q * (KD // 4))[:, None, None, None, None] + inside[None, None, None, None, :]
    for j in tl.static_range(COUNT // KD):
        at = j * KD + k
        place = ptr + (held.to(tl.int64) * width)[:, :, :, :, None] + at
        if WHOLE:
            found = found + (tl.load(place),)
        else:
            found = found + (tl.load(place, mask=at < width, other=0.0),)
    return found


@triton.jit
def load_step(
    c0_ptr, low_step, high_step, words_step, step, tile, held, rows, width,
    CODE: tl.constexpr, KD: tl.constexpr, STEP: tl.constexpr, LOW_BITS: tl.constexpr, HIGH_BITS: tl.constexpr,
    WORDS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Everything a step needs of the weights, in registers: low codes, high codes and words, as tuples."""
    high = ()
    words = ()
    if CODE == PLAIN:
        low = load_plain(c0_ptr, held, step * STEP, width, KD, STEP, False)
    elif CODE == GRID:
        low = ()
    else:
        low = load_fragments(low_step, tile, STEP * LOW_BITS // 256, 256, "evict_first")
        if HIGH_BITS > 0:
            high = load_fragments(high_step, tile, STEP * HIGH_BITS // 256, 256, "evict_first")
    if CODE != GRID:
        words = load_words(words_step, held, rows, WORDS, T)
    return low, high, words


@triton.jit
def decode_tiles(
    low, high, words, c0_ptr, words_ptr, table_ptr, step, j: tl.constexpr, n, rows, tiles,
    CODE: tl.constexpr, KD: tl.constexpr, STEP: tl.constexpr, LOW_BITS: tl.constexpr, HIGH_BITS: tl.constexpr,
    BIAS: tl.constexpr, WORDS: tl.constexpr, GRID_ROW: tl.constexpr, GRID_HIGH: tl.constexpr,
    GRID_DELTA: tl.constexpr, T: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Weights of dot j of a step as KD / 16 left operands [BN, 16], bfloat16 (plain formats: in their own dtype)."""
    found = ()
    if CODE == PLAIN:
        held = tl.permute(tl.reshape(low[j], (4, 8, T, 2, 2, 2, 2)), (2, 3, 1, 5, 0, 6, 4))
        even, odd = tl.split(held)
        found = (tl.reshape(even, (16 * T, 16)), tl.reshape(odd, (16 * T, 16)))
    elif CODE == GRID:
        for i in tl.static_range(KD // 16):
            place = place_of(tl.arange(0, 16) + 16 * i, KD)
            tile = grid_tile(
                words_ptr, table_ptr, step, j, n, place, rows, KD, WORDS, STEP // KD, GRID_ROW, GRID_HIGH, GRID_DELTA,
                ASM,
            )  # fmt: skip
            found = found + (tile,)
    else:
        factor = low[0]
        if CODE == WORD_E2M1:
            # A thread's elements of a dot of 64 are those of one group of 16.
            q = tl.reshape(tl.arange(0, 4), (1, 1, 4, 1, 1, 1))
            word = to_fragments(words[j], T)
            factor = group_factor(word, tl.broadcast_to(q, word.shape), ASM)
            factor = tl.reshape(tl.broadcast_to(factor, (T, 8, 4, 2, 2, 2)), (T, 256))
        parts = code_tiles(low, high, factor, j * (KD // 16), CODE, KD // 16, LOW_BITS, HIGH_BITS, BIAS, ASM)
        for i in tl.static_range(KD // 16):
            found = found + (from_fragment(parts[i], T),)
    return found


@triton.jit
def multiply(w, x, acc, UPCAST: tl.constexpr):
    """acc + w x; the interpreter multiplies bfloat16 operands as raw bits, so it is given float32."""
    if UPCAST:
        w = w.to(tl.float32)
        x = x.to(tl.float32)
    return tl.dot(w, x, acc)


@triton.jit
def _dot_parts(w, x, acc, PARTS: tl.constexpr, UPCAST: tl.constexpr):
    """Multiply a tile of a wide plain dtype as up to three bfloat16 tiles that sum to it exactly, smallest first."""
    if PARTS == 1:
        return multiply(w.to(tl.bfloat16), x, acc, UPCAST)
    wide = w.to(tl.float32)
    first = wide.to(tl.bfloat16)
    rest = wide - first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    if PARTS == 3:
        acc = multiply((rest - second.to(tl.float32)).to(tl.bfloat16), x, acc, UPCAST)
    return multiply(first, x, multiply(second, x, acc, UPCAST), UPCAST)


@triton.jit
def _ones(w, ASM: tl.constexpr):
    """Ones in the shape of a tile. Made from it, so that the compiler gives both the same place in the product."""
    if ASM:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, 1065369472;", "=r,r", [w], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return tl.full(w.shape, 1.0, tl.bfloat16)


@triton.jit
def load_x(x_ptr, m, x_width, first, KD: tl.constexpr):
    """Elements [first, first + KD) of input rows m as a right operand [KD, BM]; rows lie in its order
    (`split_rows_kernel`), padded."""
    k = first + tl.arange(0, KD)
    return tl.load(x_ptr + m.to(tl.int64)[None, :] * x_width + k[:, None])


@triton.jit
def _multiply_step(
    low, high, words, x_ptr, c0_ptr, words_ptr, table_ptr, block_scale_ptr, step, n, held, m, rows,
    tiles, width, x_width, num_x, num_steps, acc,
    CODE: tl.constexpr, SCALE: tl.constexpr, KD: tl.constexpr, STEP: tl.constexpr, LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr, BIAS: tl.constexpr, WORDS: tl.constexpr, GRID_ROW: tl.constexpr, GRID_HIGH: tl.constexpr,
    GRID_DELTA: tl.constexpr, W_PARTS: tl.constexpr, X_PARTS: tl.constexpr, OFFSETS: tl.constexpr,
    BLOCK_SCALE: tl.constexpr, CHAIN: tl.constexpr, TAIL: tl.constexpr, WIDE: tl.constexpr,
    BM: tl.constexpr, T: tl.constexpr, ASM: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """acc [BN, BM] plus the products of a step."""
    plane = tl.cast(num_x, tl.int64) * x_width
    part = tl.zeros_like(acc)
    BN: tl.constexpr = 16 * T
    # Bits of 2^23, not known as a constant to the assembler (steps are not negative).
    raiser = 0x4B000000 | (num_steps >> 31)
    if CODE == GRID:
        # Scales; the fields of these formats are read where they are used, so words lie one by one.
        for i in tl.static_range(1 + STEP // KD // 8):
            word = words_ptr + (tl.cast(step, tl.int64) * WORDS + i) * rows + held
            words = words + (by_row(tl.load(word), T),)
    for j in tl.static_range(STEP // KD):
        w = decode_tiles(
            low, high, words, c0_ptr, words_ptr, table_ptr, step, j, n, rows, tiles,
            CODE, KD, STEP, LOW_BITS, HIGH_BITS, BIAS, WORDS, GRID_ROW, GRID_HIGH, GRID_DELTA, T, ASM,
        )  # fmt: skip
        if BLOCK_SCALE:
            dot = part
        elif CHAIN:
            dot = acc
        else:
            dot = tl.zeros_like(acc)
        sums = tl.zeros_like(acc)
        first = step * STEP + j * KD
        for p in tl.static_range(X_PARTS):
            # Planes of x stand smallest part first.
            if WIDE and W_PARTS > 1:
                # All parts of sixteen elements before the next, as in the narrow form.
                for i in tl.static_range(KD // 16):
                    x = load_x(x_ptr + p * plane, m, x_width, first + 16 * i, 16)
                    dot = _dot_parts(w[i], x, dot, W_PARTS, UPCAST)
            elif WIDE:
                x = load_x(x_ptr + p * plane, m, x_width, first, KD)
                one = side_by_side(w, KD // 16)
                dot = multiply(one.to(tl.bfloat16), x, dot, UPCAST)
                if OFFSETS:
                    sums = multiply(_ones(one, ASM), x, sums, UPCAST)
            else:
                xs = load_operands(x_ptr + p * plane, m, x_width, first, width, BM, KD, TAIL)
                for i in tl.static_range(KD // 16):
                    dot = _dot_parts(w[i], xs[i], dot, W_PARTS, UPCAST)
                if OFFSETS:
                    # Sums of x over the group, the same in every weight row.
                    for i in tl.static_range(KD // 16):
                        sums = multiply(_ones(w[i], ASM), xs[i], sums, UPCAST)
        if BLOCK_SCALE:
            part = dot
        elif CHAIN:
            acc = dot
        else:
            scale, offset = group_scale(words, j, raiser, SCALE, BIAS, ASM)
            acc = tl.fma(dot, to_sums(scale, BN, BM), acc)
            if OFFSETS:
                acc = tl.fma(to_sums(offset, BN, BM), sums, acc)
    if BLOCK_SCALE:
        # One scale per 128 weight rows and step; rows beyond the last block were clamped above.
        unit = by_row(tl.load(block_scale_ptr + (held // 128) * num_steps + step), T)
        acc = tl.fma(part, to_sums(unit, BN, BM), acc)
    return acc


@triton.jit
def walk_joined(
    acc, first_step, last_step, x_ptr, c0_ptr, words_ptr, table_ptr, n, held, tile, m, rows, tiles, width, x_width,
    CODE: tl.constexpr, KD: tl.constexpr, STEP: tl.constexpr, LOW_BITS: tl.constexpr, HIGH_BITS: tl.constexpr,
    BIAS: tl.constexpr, WORDS: tl.constexpr, GRID_ROW: tl.constexpr, GRID_HIGH: tl.constexpr, GRID_DELTA: tl.constexpr,
    WHOLE: tl.constexpr, T: tl.constexpr, ASM: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """acc [BN, BM] plus the products of steps [first_step, last_step) in the wide form, 128 elements at a time: one
    load of x and one wait for products where there would be one for each dot. The products and their order are those
    of `_multiply_step`.

    Not pipelined: products that are still under way when the next weights are decoded lost their operands to them
    (Triton 3.6 keeps no register of an operand until its product is done).
    """
    PARTS: tl.constexpr = STEP // 128
    FRAGMENTS: tl.constexpr = LOW_BITS // 2
    COUNT: tl.constexpr = WORDS // PARTS
    low_at = fragments_of_step(c0_ptr, first_step, tiles, STEP * LOW_BITS // 256, 256)
    words_at = words_of_step(words_ptr, first_step, rows, WORDS)
    tile *= PARTS
    last = last_step * PARTS - 1
    following = ()
    if COUNT > 0:
        following = hidden_words(words_at + held * WORDS, COUNT, True, T, ASM)
    for at in tl.range(first_step * PARTS, last + 1, num_stages=1):
        closing = at % PARTS == PARTS - 1
        words = following
        if CODE == PLAIN:
            low = load_plain(c0_ptr, held, at * 128, width, KD, 128, WHOLE)
        else:
            low = load_fragments(low_at, tile, FRAGMENTS, 256, "evict_first")
            low_at += tl.where(closing, tiles * (STEP * LOW_BITS) - (PARTS - 1) * FRAGMENTS * 256, FRAGMENTS * 256)
        if COUNT > 0:
            # Those of the next part are under way meanwhile.
            words_at += tl.where(at == last, 0, tl.where(closing, rows * WORDS - (PARTS - 1) * COUNT, COUNT))
            following = hidden_words(words_at + held * WORDS, COUNT, True, T, ASM)
        w = ()
        for j in tl.static_range(128 // KD):
            w = w + decode_tiles(
                low, (), words, c0_ptr, words_ptr, table_ptr, at, j, n, rows, tiles,
                CODE, KD, STEP, LOW_BITS, HIGH_BITS, BIAS, WORDS, GRID_ROW, GRID_HIGH, GRID_DELTA, T, ASM,
            )  # fmt: skip
        x = load_x(x_ptr, m, x_width, at * 128, 128)
        acc = multiply(side_by_side(w, 8).to(tl.bfloat16), x, acc, UPCAST)
    return acc


@triton.jit
def sum_segments(ptr, stride, num_segments, total, TAKEN: tl.constexpr):
    """Stored sums of all segments added to `total` in order; TAKEN of them are under way at a time."""
    for first in range(0, num_segments, TAKEN):
        for i in tl.static_range(TAKEN):
            # Beyond the last segment zero is added, which changes no bit of a sum that began with zero.
            value = tl.load(ptr + tl.minimum(first + i, num_segments - 1) * stride, cache_modifier=".cg")
            total += tl.where(first + i < num_segments, value, 0.0)
    return total


@triton.jit
def hand_over(ptr, total):
    """Store sums where `take_over` waits for them. They announce themselves: no sum is ABSENT, a NaN."""
    bits = total.to(tl.int32, bitcast=True)
    tl.store(ptr, tl.where(bits == ABSENT, 0x7FFFFFFF, bits), cache_modifier=".cg")


@triton.jit
def _asked(ptr, stride, first, count, total, TAKEN: tl.constexpr, EXACT: tl.constexpr):
    """total plus TAKEN stored sums from `first` on, asked for together and added in order (EXACT: there are just so
    many)."""
    for i in tl.static_range(TAKEN):
        if EXACT:
            total += tl.load(ptr + i * stride, volatile=True).to(tl.float32, bitcast=True)
        else:
            # Beyond the last segment zero is added, which changes no bit of a sum that began with zero.
            bits = tl.load(ptr + tl.minimum(first + i, count - 1) * stride, volatile=True)
            total += tl.where(first + i < count, bits.to(tl.float32, bitcast=True), 0.0)
    return total


@triton.jit
def take_over(ptr, stride, count, last, TAKEN: tl.constexpr, EXACT: tl.constexpr):
    """The sums of `count` segments in order and `last` after them, as soon as all are stored; places are ABSENT again.
    TAKEN are asked for at a time; EXACT: all.

    An absent sum is a NaN and makes one of what it is added to, so a total that is none has all its parts; only if it
    stays one for a while is it asked whether a part is absent, and if none is, the next total is taken whatever it is.
    Programs start in the order of their numbers, and the one that waits is the last of its tile's, so those it waits
    for are at work. Should one not come, sums are NaN after a while: a kernel must end.
    """
    total = tl.zeros_like(last)
    for first in range(0, count, TAKEN):
        found = total
        tries = 0
        present = 0
        while tries < MOST_TRIES:
            found = _asked(ptr, stride, first, count, total, TAKEN, EXACT)
            whole = (tl.max(tl.ravel((found != found).to(tl.int32)), axis=0) == 0) | (present > 0)
            tries += 1
            if tries % PATIENCE == 0:
                absent = tl.zeros(last.shape, tl.int32)
                for other in range(first, tl.minimum(first + TAKEN, count)):
                    absent = absent | (tl.load(ptr + other * stride, volatile=True) == ABSENT).to(tl.int32)
                # Not of this total: a sum may have come after it was made.
                present = tl.where(tl.max(tl.ravel(absent), axis=0) > 0, 0, 1)
            tries = tl.where(whole, MOST_TRIES, tries)
        total = found
        for i in tl.static_range(TAKEN):
            place = ptr + i * stride if EXACT else ptr + tl.minimum(first + i, count - 1) * stride
            tl.store(place, tl.full(last.shape, ABSENT, tl.int32))
    return total + last


@triton.jit
def step_of(segment, num_steps, num_segments):
    """The first step of a segment. No segment is longer than the first and none shorter than the last: programs that
    begin first get most of a multiprocessor."""
    return (segment * num_steps + num_segments - 1) // num_segments


@triton.jit
def store_segment(ptr, lock_ptr, stride, segment, num_segments, total, SPLIT: tl.constexpr):
    """Store a segment's sums where its tile's others look; whether another program adds them up."""
    if SPLIT == HANDED:
        other = segment < num_segments - 1
        if other:
            hand_over(ptr + segment * stride, total)
    else:
        tl.store(ptr + segment * stride, total)
        # Every thread's store is done before one thread announces it; the last to announce sees all of them.
        tl.debug_barrier()
        other = tl.atomic_add(lock_ptr, 1, sem="acq_rel") != num_segments - 1
    return other


@triton.jit
def add_segments(
    ptr, lock_ptr, stride, num_segments, last, SPLIT: tl.constexpr, TAKEN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The sums of all segments of a tile, of which `last` is this program's. TAKEN are asked for at a time, and each
    time costs the way to the second-level cache and back."""
    if SPLIT == HANDED:
        total = take_over(ptr, stride, num_segments - 1, last, TAKEN, EXACT)
    else:
        tl.debug_barrier()
        total = sum_segments(ptr, stride, num_segments, tl.zeros_like(last), TAKEN)
        tl.store(lock_ptr, 0)
    return total


@triton.jit(do_not_specialize=["num_x", "num_steps", "num_segments", "row_divisor", "tiles"])
def linear_kernel(
    x_ptr, c0_ptr, c1_ptr, words_ptr, table_ptr, row_scale_ptr, block_scale_ptr, out_ptr,
    work_ptr, lock_ptr,
    tile_group_ptr, tile_first_ptr, tile_count_ptr, row_ids_ptr,
    num_x, rows, tiles, width, x_width, stride_out, num_steps, num_segments, row_divisor,
    c0_group, c1_group, words_group,
    CODE: tl.constexpr, SCALE: tl.constexpr, KD: tl.constexpr, STEP: tl.constexpr, LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr, BIAS: tl.constexpr, WORDS: tl.constexpr, GRID_ROW: tl.constexpr, GRID_HIGH: tl.constexpr,
    GRID_DELTA: tl.constexpr, W_PARTS: tl.constexpr, X_PARTS: tl.constexpr, OFFSETS: tl.constexpr,
    ROW_SCALE: tl.constexpr, BLOCK_SCALE: tl.constexpr, CHAIN: tl.constexpr, TAIL: tl.constexpr,
    JOINED: tl.constexpr, WHOLE: tl.constexpr,
    SPLIT: tl.constexpr, GROUPED: tl.constexpr, WIDE: tl.constexpr, OVERLAP: tl.constexpr, ASM: tl.constexpr,
    UPCAST: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr, BY_SEGMENT: tl.constexpr,
    TAKEN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """See the module. tiles: sixteens of weight rows; x_width: of a row of x; JOINED: steps are walked by
    `walk_joined`, WHOLE: and rows of the weight end with one.

    OVERLAP: the launch may begin before the kernels ahead of it end; weights do not depend on those, all else waits.
    """
    T: tl.constexpr = BN // 16
    tile_m = tl.program_id(0)
    tile_n = tl.program_id(1 if BY_SEGMENT else 2)
    n = tile_n * BN + tl.arange(0, BN)
    live_n = n < rows
    n = tl.minimum(n, rows - 1)
    held = tl.minimum(held_rows(tile_n * BN, T), rows - 1)
    tile = tl.minimum(tile_n * T + tl.arange(0, T), tiles - 1)
    m = tl.arange(0, BM)
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
        live_m = m < count
        # Columns without an input row repeat the last one and are not stored: cheaper than a mask for every load.
        m = tl.minimum(m, count - 1)
        out_row = tl.load(row_ids_ptr + tl.load(tile_first_ptr + tile_m) + m)
        m = out_row // row_divisor
        c0_ptr += group * c0_group
        c1_ptr += group * c1_group
        words_ptr += group * words_group
        row_scale_ptr += group * rows
    else:
        m = tile_m * BM + m
        live_m = m < num_x
        m = tl.minimum(m, num_x - 1)
        out_row = m
    total = tl.zeros((BN, BM), tl.float32)
    first_segment = 0
    last_segment = num_segments
    if SPLIT:
        first_segment = tl.program_id(2 if BY_SEGMENT else 1)
        last_segment = first_segment + 1
    if OVERLAP and not GROUPED and (BM > 8 or JOINED):
        cuda.gdc_wait()
    for segment in range(first_segment, last_segment):
        acc = tl.zeros((BN, BM), tl.float32)
        first_step = step_of(segment, num_steps, num_segments)
        last_step = step_of(segment + 1, num_steps, num_segments)
        if JOINED:
            acc = walk_joined(
                acc, first_step, last_step, x_ptr, c0_ptr, words_ptr, table_ptr, n, held, tile, m, rows, tiles, width,
                x_width, CODE, KD, STEP, LOW_BITS, HIGH_BITS, BIAS, WORDS, GRID_ROW, GRID_HIGH, GRID_DELTA, WHOLE, T,
                ASM, UPCAST,
            )  # fmt: skip
        else:
            low_step = fragments_of_step(c0_ptr, first_step, tiles, STEP * LOW_BITS // 256, 256)
            high_step = fragments_of_step(c1_ptr, first_step, tiles, STEP * HIGH_BITS // 256, 256)
            words_step = words_of_step(words_ptr, first_step, rows, WORDS)
            for step in tl.range(first_step, last_step, num_stages=STAGES):
                low, high, words = load_step(
                    c0_ptr, low_step, high_step, words_step, step, tile, held, rows, width,
                    CODE, KD, STEP, LOW_BITS, HIGH_BITS, WORDS, T,
                )  # fmt: skip
                low_step += tiles * (STEP * LOW_BITS)
                high_step += tiles * (STEP * HIGH_BITS)
                words_step += rows * WORDS
                if OVERLAP and not GROUPED and BM <= 8:
                    # The first weights are under way by now.
                    cuda.gdc_wait()
                acc = _multiply_step(
                    low, high, words, x_ptr, c0_ptr, words_ptr, table_ptr, block_scale_ptr, step, n,
                    held, m, rows, tiles, width, x_width, num_x, num_steps, acc,
                    CODE, SCALE, KD, STEP, LOW_BITS, HIGH_BITS, BIAS, WORDS, GRID_ROW, GRID_HIGH, GRID_DELTA, W_PARTS,
                    X_PARTS, OFFSETS, BLOCK_SCALE, CHAIN, TAIL, WIDE, BM, T, ASM, UPCAST,
                )  # fmt: skip
        total += acc
    if SPLIT:
        at = tl.cast(tile_n, tl.int64) * tl.num_programs(0) + tile_m
        SIZE: tl.constexpr = BN * BM
        work_ptr += at * num_segments * SIZE + places_by_thread(T, BM, 2)
        held_total = by_thread(total, T, BM, 2)
        if store_segment(work_ptr, lock_ptr + at, SIZE, first_segment, num_segments, held_total, SPLIT):
            return
        held_total = add_segments(work_ptr, lock_ptr + at, SIZE, num_segments, held_total, SPLIT, TAKEN, EXACT)
        total = from_thread(held_total, T, BM, 2)
    if ROW_SCALE:
        total = total * tl.load(row_scale_ptr + n)[:, None]
    place = out_row.to(tl.int64)[None, :] * stride_out + n[:, None]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=live_m[None, :] & live_n[:, None])
