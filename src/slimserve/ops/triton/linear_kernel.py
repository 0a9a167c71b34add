"""The matrix product with packed weights, one kernel for every format and number of rows.

A program owns BN weight rows and BM input rows and walks K in steps, in order. K is cut into segments whose length is
a function of (N, K, format) alone. Each segment has its own float32 accumulator; segments are added in order, either
by the program that walked them all, or, where segments run in parallel, by the last of them to finish, which reads
the others' stored sums. All products are tensor-core products of one fixed shape (m16n8k16 through mma.sync; tile
shapes that would take the warp-group form are not used), so a row's bits depend on neither the number of rows nor the
tile. Weights are the left operand where few rows multiply, and the right one (SWAP) where many do and large tiles pay:
a product's terms and their order are the same either way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slimserve.ops.triton.tiles import (
    FIVE_BITS,
    FLOAT8,
    GRID,
    GRID_PAIRS,
    NIBBLE,
    NIBBLE_E2M1,
    NIBBLE_LEVELS,
    SCALE_E4M3,
    SCALE_K2,
    SCALE_NONE,
    SCALED_TWO_BITS,
    SIGNED_BYTE,
    SIX_BITS,
    THREE_BITS,
    TWO_BITS,
    WORD_E2M1,
    WORD_NIBBLE,
    across_rows,
    along_rows,
    e2m1,
    group_factor,
    group_scale,
    half_of,
    levels,
    load_tile,
    load_word,
    minimum_tile,
    minimum_unit,
    nibble,
    nibble_factor,
    scaled_two_bits,
    signed_byte,
    two_planes,
    word_e2m1,
    word_field,
    word_fields,
)
from slimserve.ops.triton.tiles_grid import grid_tile, pairs_order, pairs_tile, plain_pairs


@triton.jit
def decode_tile(
    c0_ptr, c1_ptr, words_ptr, table_ptr, step, j, n, rows, width,
    CODE: tl.constexpr, KD: tl.constexpr, STEP: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr,
    WORDS: tl.constexpr, GRID_ROW: tl.constexpr, GRID_HIGH: tl.constexpr, GRID_DELTA: tl.constexpr,
    SWAP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Weights [BN, KD] (with SWAP: [KD, BN]) of dot j of a step as bfloat16 (plain formats: in their own dtype)."""
    DOTS: tl.constexpr = STEP // KD
    if CODE == NIBBLE:
        tile = nibble(load_tile(c0_ptr, step, j // 2, n, rows, DOTS // 2, KD, SWAP), j % 2, BIAS, ASM)
    elif CODE == NIBBLE_LEVELS:
        tile = levels(load_tile(c0_ptr, step, j // 2, n, rows, DOTS // 2, KD, SWAP), j % 2, ASM)
    elif CODE == NIBBLE_E2M1:
        tile = e2m1(load_tile(c0_ptr, step, j // 2, n, rows, DOTS // 2, KD, SWAP), j % 2, ASM)
    elif CODE == FIVE_BITS:
        codes = load_tile(c0_ptr, step, j // 2, n, rows, DOTS // 2, KD, SWAP)
        high = load_tile(c1_ptr, step, j // 8, n, rows, DOTS // 8, KD, SWAP)
        tile = two_planes(codes, high, 4 * (j % 2), 15, j % 8, 1, 4, BIAS, ASM)
    elif CODE == WORD_NIBBLE:
        tile = word_field(load_tile(c0_ptr, step, j // 4, n, rows, DOTS // 4, KD, SWAP), 4 * (j % 4), 15, BIAS, ASM)
    elif CODE == SIX_BITS:
        codes = load_tile(c0_ptr, step, j // 4, n, rows, DOTS // 4, KD, SWAP)
        high = load_tile(c1_ptr, step, j // 8, n, rows, DOTS // 8, KD, SWAP)
        tile = word_fields(codes, high, 4 * (j % 4), 15, 2 * (j % 8), 3, 4, BIAS, ASM)
    elif CODE == TWO_BITS:
        tile = word_field(load_tile(c0_ptr, step, j // 8, n, rows, DOTS // 8, KD, SWAP), 2 * (j % 8), 3, BIAS, ASM)
    elif CODE == THREE_BITS:
        codes = load_tile(c0_ptr, step, j // 8, n, rows, DOTS // 8, KD, SWAP)
        high = load_tile(c1_ptr, step, j // 16, n, rows, DOTS // 16, KD, SWAP)
        tile = word_fields(codes, high, 2 * (j % 8), 3, j % 16, 1, 2, BIAS, ASM)
    elif CODE == WORD_E2M1:
        codes = load_tile(c0_ptr, step, j // 4, n, rows, DOTS // 4, KD, SWAP)
        tile = word_e2m1(codes, group_factor(words_ptr, step, j, n, rows, WORDS, ASM), j % 4, SWAP, ASM)
    elif CODE == SCALED_TWO_BITS:
        codes = load_tile(c0_ptr, step, j // 8, n, rows, DOTS // 8, KD, SWAP)
        tile = scaled_two_bits(codes, nibble_factor(words_ptr, step, j, n, rows, WORDS, ASM), j % 8, SWAP, ASM)
    elif CODE == SIGNED_BYTE:
        tile = signed_byte(load_tile(c0_ptr, step, j // 2, n, rows, DOTS // 2, KD, SWAP), j % 2, ASM)
    elif CODE == FLOAT8:
        codes = load_tile(c0_ptr, step, j, n, rows, DOTS, KD, SWAP)
        tile = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(tl.bfloat16)
    elif CODE == GRID_PAIRS:
        if ASM and not SWAP:
            tile = pairs_tile(load_tile(c0_ptr, step, 0, n, rows, 1, KD, SWAP), j)
        else:
            tile = plain_pairs(c0_ptr, table_ptr, step, j, n, rows, KD, SWAP)
    elif CODE == GRID:
        tile = grid_tile(
            words_ptr, table_ptr, step, j, n, rows, KD, WORDS, DOTS, GRID_ROW, GRID_HIGH, GRID_DELTA, SWAP, ASM
        )  # fmt: skip
    else:
        k = step * STEP + j * KD + tl.arange(0, KD)
        place = along_rows(n.to(tl.int64) * width, SWAP) + across_rows(k, SWAP)
        tile = tl.load(c0_ptr + place, mask=across_rows(k < width, SWAP), other=0.0)
    return tile


@triton.jit
def _dot(w, x, acc, SWAP: tl.constexpr, UPCAST: tl.constexpr):
    if UPCAST:
        w = w.to(tl.float32)
        x = x.to(tl.float32)
    if SWAP:
        product = tl.dot(x, w, acc)
    else:
        product = tl.dot(w, x, acc)
    return product


@triton.jit
def _dot_parts(w, x, acc, PARTS: tl.constexpr, SWAP: tl.constexpr, UPCAST: tl.constexpr):
    """Multiply a tile of a wide plain dtype as up to three bfloat16 tiles that sum to it exactly, smallest first."""
    if PARTS == 1:
        return _dot(w.to(tl.bfloat16), x, acc, SWAP, UPCAST)
    wide = w.to(tl.float32)
    first = wide.to(tl.bfloat16)
    rest = wide - first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    if PARTS == 3:
        acc = _dot((rest - second.to(tl.float32)).to(tl.bfloat16), x, acc, SWAP, UPCAST)
    return _dot(first, x, _dot(second, x, acc, SWAP, UPCAST), SWAP, UPCAST)


@triton.jit
def _zeros(BN: tl.constexpr, BM: tl.constexpr, SWAP: tl.constexpr):
    if SWAP:
        empty = tl.zeros((BM, BN), tl.float32)
    else:
        empty = tl.zeros((BN, BM), tl.float32)
    return empty


@triton.jit
def _ones(w, ASM: tl.constexpr):
    """Ones in the shape of a tile. Made from it, so that the compiler gives both the same place in the product, and
    x's tile is read once for both."""
    if ASM:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, 1065369472;", "=r,r", [w], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return tl.full(w.shape, 1.0, tl.bfloat16)


@triton.jit
def _multiply(
    w, scale, offset, x_ptr, plane_size, mask, acc, part,
    W_PARTS: tl.constexpr, X_PARTS: tl.constexpr, CHAIN: tl.constexpr, STEP_SCALE: tl.constexpr, OFFSETS: tl.constexpr,
    SWAP: tl.constexpr, ASM: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One dot: (acc, part) with the product of a weight tile and the x tile at x_ptr added to one of them."""
    if STEP_SCALE:
        dot = part
    elif CHAIN:
        dot = acc
    else:
        dot = tl.zeros_like(acc)
    sums = tl.zeros_like(acc)
    for p in tl.static_range(X_PARTS):
        # Planes of x stand smallest part first.
        x = tl.load(x_ptr + p * plane_size, mask=mask, other=0.0)
        dot = _dot_parts(w, x, dot, W_PARTS, SWAP, UPCAST)
        if OFFSETS:
            # Sums of x over the group, the same in every weight row.
            sums = _dot(_ones(w, ASM), x, sums, SWAP, UPCAST)
    if STEP_SCALE:
        part = dot
    elif CHAIN:
        acc = dot
    else:
        acc = tl.fma(dot, tl.broadcast_to(along_rows(scale, SWAP), dot.shape), acc)
        if OFFSETS:
            acc = tl.fma(tl.broadcast_to(along_rows(offset, SWAP), dot.shape), sums, acc)
    return acc, part


@triton.jit
def _add_minima(
    acc, minima, unit, sums_ptr, m, mask, step, num_x, num_steps, SWAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Minima (integers) times group sums of x, which stand as three bfloat16 planes [3, M, groups], smallest first."""
    part = tl.zeros_like(acc)
    place = across_rows(m.to(tl.int64) * (num_steps * 16), SWAP) + along_rows(tl.arange(0, 16), SWAP)
    for p in tl.static_range(3):
        plane_ptr = sums_ptr + (tl.cast(p, tl.int64) * num_x * num_steps + step) * 16
        part = _dot(minima, tl.load(plane_ptr + place, mask=mask, other=0.0), part, SWAP, UPCAST)
    return tl.fma(part, tl.broadcast_to(along_rows(unit, SWAP), part.shape), acc)


@triton.jit
def _sum_segments(ptr, stride, num_segments, mask, total, UNROLL: tl.constexpr):
    """Stored sums of all segments added to `total` in order; UNROLL of them are under way at a time."""
    for first in range(0, num_segments, UNROLL):
        for i in tl.static_range(UNROLL):
            # Beyond the last segment zero is added, which changes no bit of a sum that began with zero.
            at = tl.minimum(first + i, num_segments - 1)
            value = tl.load(ptr + at * stride, mask=mask, other=0.0, cache_modifier=".cg")
            total += tl.where(first + i < num_segments, value, 0.0)
    return total


@triton.jit
def _store_rows(
    total, out_ptr, row_scale_ptr, out_row, n, stride_out, mask, ROW_SCALE: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    if ROW_SCALE:
        total = total * along_rows(tl.load(row_scale_ptr + n), SWAP)
    place = across_rows(out_row.to(tl.int64) * stride_out, SWAP) + along_rows(n, SWAP)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_x", "segment_steps", "num_steps", "num_segments", "row_divisor"])
def linear_kernel(
    x_ptr, sums_ptr, c0_ptr, c1_ptr, words_ptr, table_ptr, row_scale_ptr, block_scale_ptr, out_ptr, work_ptr, lock_ptr,
    tile_group_ptr, tile_first_ptr, tile_count_ptr, row_ids_ptr,
    num_x, rows, width, x_width, stride_out, segment_steps, num_steps, num_segments, row_divisor,
    c0_group, c1_group, words_group,
    CODE: tl.constexpr, SCALE: tl.constexpr, KD: tl.constexpr, STEP: tl.constexpr, BIAS: tl.constexpr,
    WORDS: tl.constexpr, GRID_ROW: tl.constexpr, GRID_HIGH: tl.constexpr, GRID_DELTA: tl.constexpr,
    W_PARTS: tl.constexpr, X_PARTS: tl.constexpr, OFFSETS: tl.constexpr, MINIMA: tl.constexpr,
    ROW_SCALE: tl.constexpr, BLOCK_SCALE: tl.constexpr, CHAIN: tl.constexpr, TAIL: tl.constexpr,
    SPLIT: tl.constexpr, GROUPED: tl.constexpr, SWAP: tl.constexpr, ASM: tl.constexpr, UPCAST: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, TWIN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """See the module. With TWIN, a program owns 2 BM input rows as two tiles, so that one decoding serves both."""
    DOTS: tl.constexpr = STEP // KD
    STEP_SCALE: tl.constexpr = BLOCK_SCALE or (SCALE == SCALE_K2)
    UNROLL: tl.constexpr = 8 if BM <= 8 else 4 if BM <= 16 else 2
    tile_m = tl.program_id(0)
    tile_n = tl.program_id(2)
    n = tile_n * BN + tl.arange(0, BN)
    live_n = n < rows
    n = tl.minimum(n, rows - 1)
    m = tl.arange(0, BM)
    if GROUPED:
        # Input rows of one group (expert): their ids stand together in row_ids.
        count = tl.load(tile_count_ptr + tile_m)
        if count == 0:
            return
        group = tl.load(tile_group_ptr + tile_m).to(tl.int64)
        live_m = m < count
        out_row = tl.load(row_ids_ptr + tl.load(tile_first_ptr + tile_m) + m, mask=live_m, other=0)
        m = out_row // row_divisor
        c0_ptr += group * c0_group
        c1_ptr += group * c1_group
        words_ptr += group * words_group
        row_scale_ptr += group * rows
    else:
        m = tile_m * (BM * 2 if TWIN else BM) + m
        live_m = m < num_x
        out_row = m
    k = tl.arange(0, KD)
    if (CODE == GRID_PAIRS) and (ASM and not SWAP):
        k = pairs_order(k)
    x_tile_ptr = x_ptr + across_rows(m.to(tl.int64) * x_width, SWAP) + along_rows(k, SWAP)
    live_tile = across_rows(live_m, SWAP)
    total = _zeros(BN, BM, SWAP)
    if TWIN:
        twin_m = m + BM
        twin_live = across_rows(twin_m < num_x, SWAP)
        twin_ptr = x_tile_ptr + tl.cast(x_width, tl.int64) * BM
        twin_total = _zeros(BN, BM, SWAP)
    plane_size = tl.cast(num_x, tl.int64) * x_width
    first_segment = 0
    last_segment = num_segments
    if SPLIT:
        first_segment = tl.program_id(1)
        last_segment = first_segment + 1
    for segment in range(first_segment, last_segment):
        acc = _zeros(BN, BM, SWAP)
        if TWIN:
            twin_acc = _zeros(BN, BM, SWAP)
        first_step = segment * segment_steps
        last_step = tl.minimum(first_step + segment_steps, num_steps)
        for step in tl.range(first_step, last_step, num_stages=STAGES):
            part = _zeros(BN, BM, SWAP)
            if TWIN:
                twin_part = _zeros(BN, BM, SWAP)
            for j in tl.static_range(DOTS):
                w = decode_tile(
                    c0_ptr, c1_ptr, words_ptr, table_ptr, step, j, n, rows, width,
                    CODE, KD, STEP, BIAS, SCALE, WORDS, GRID_ROW, GRID_HIGH, GRID_DELTA, SWAP, ASM,
                )  # fmt: skip
                scale, offset = n, n
                if not (CHAIN or STEP_SCALE):
                    scale, offset = group_scale(words_ptr, step, j, n, rows, SCALE, WORDS, BIAS, ASM)
                mask = live_tile
                if TAIL:
                    inside = along_rows(step * STEP + j * KD + k < width, SWAP)
                    mask = mask & inside
                acc, part = _multiply(
                    w, scale, offset, x_tile_ptr + step * STEP + j * KD, plane_size, mask, acc, part,
                    W_PARTS, X_PARTS, CHAIN, STEP_SCALE, OFFSETS, SWAP, ASM, UPCAST,
                )  # fmt: skip
                if TWIN:
                    mask = twin_live
                    if TAIL:
                        mask = mask & inside
                    twin_acc, twin_part = _multiply(
                        w, scale, offset, twin_ptr + step * STEP + j * KD, plane_size, mask, twin_acc, twin_part,
                        W_PARTS, X_PARTS, CHAIN, STEP_SCALE, OFFSETS, SWAP, ASM, UPCAST,
                    )  # fmt: skip
            if STEP_SCALE:
                if BLOCK_SCALE:
                    # One scale per 128 weight rows and step; rows beyond the last block were clamped above.
                    unit = tl.load(block_scale_ptr + (n // 128) * num_steps + step)
                else:
                    # Tiles held code * scale / 2^14.
                    unit = half_of(load_word(words_ptr, step, 0, n, rows, WORDS), 0) * 16384.0
                acc = tl.fma(part, tl.broadcast_to(along_rows(unit, SWAP), part.shape), acc)
                if TWIN:
                    twin_acc = tl.fma(twin_part, tl.broadcast_to(along_rows(unit, SWAP), part.shape), twin_acc)
            if MINIMA:
                minima = minimum_tile(c1_ptr, step, n, rows, SWAP, ASM)
                unit = minimum_unit(words_ptr, step, n, rows, WORDS)
                acc = _add_minima(acc, minima, unit, sums_ptr, m, live_tile, step, num_x, num_steps, SWAP, UPCAST)
                if TWIN:
                    twin_acc = _add_minima(
                        twin_acc, minima, unit, sums_ptr, twin_m, twin_live, step, num_x, num_steps, SWAP, UPCAST
                    )
        total += acc
        if TWIN:
            twin_total += twin_acc
    if SPLIT:
        tile = tl.cast(tile_n, tl.int64) * tl.num_programs(0) + tile_m
        SIZE: tl.constexpr = BN * BM * (2 if TWIN else 1)
        work_ptr += across_rows(tl.arange(0, BM) * BN, SWAP) + along_rows(tl.arange(0, BN), SWAP)
        work_ptr += tile * num_segments * SIZE
        tl.store(work_ptr + first_segment * SIZE, total, mask=live_tile)
        if TWIN:
            tl.store(work_ptr + first_segment * SIZE + BN * BM, twin_total, mask=twin_live)
        # Every thread's store is done before one thread announces it; the last to announce sees all of them.
        tl.debug_barrier()
        arrived = tl.atomic_add(lock_ptr + tile, 1, sem="acq_rel")
        if arrived != num_segments - 1:
            return
        tl.debug_barrier()
        total = _sum_segments(work_ptr, SIZE, num_segments, live_tile, _zeros(BN, BM, SWAP), UNROLL)
        if TWIN:
            twin_total = _sum_segments(work_ptr + BN * BM, SIZE, num_segments, twin_live, _zeros(BN, BM, SWAP), UNROLL)
        tl.store(lock_ptr + tile, 0)
    live_n = along_rows(live_n, SWAP)
    _store_rows(total, out_ptr, row_scale_ptr, out_row, n, stride_out, live_tile & live_n, ROW_SCALE, SWAP)
    if TWIN:
        _store_rows(twin_total, out_ptr, row_scale_ptr, twin_m, n, stride_out, twin_live & live_n, ROW_SCALE, SWAP)


@triton.jit(do_not_specialize=["num_ids", "num_steps"])
def embedding_kernel(
    ids_ptr, c0_ptr, c1_ptr, words_ptr, table_ptr, row_scale_ptr, block_scale_ptr, out_ptr,
    num_ids, rows, width, num_steps,
    CODE: tl.constexpr, SCALE: tl.constexpr, KD: tl.constexpr, STEP: tl.constexpr, BIAS: tl.constexpr,
    WORDS: tl.constexpr, GRID_ROW: tl.constexpr, GRID_HIGH: tl.constexpr, GRID_DELTA: tl.constexpr,
    OFFSETS: tl.constexpr, MINIMA: tl.constexpr, ROW_SCALE: tl.constexpr, BLOCK_SCALE: tl.constexpr,
    ASM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Decode rows ids [T] of a weight to out [T, K]: the tiles of `linear_kernel`, at rows that a list names."""
    at = tl.program_id(0) * BN + tl.arange(0, BN)
    live = at < num_ids
    n = tl.load(ids_ptr + at, mask=live, other=0).to(tl.int32)
    n = tl.minimum(tl.maximum(n, 0), rows - 1)
    step = tl.program_id(1)
    k = tl.arange(0, KD)
    for j in tl.static_range(STEP // KD):
        value = decode_tile(
            c0_ptr, c1_ptr, words_ptr, table_ptr, step, j, n, rows, width,
            CODE, KD, STEP, BIAS, SCALE, WORDS, GRID_ROW, GRID_HIGH, GRID_DELTA, False, ASM and CODE != GRID_PAIRS,
        ).to(tl.float32)  # fmt: skip
        if SCALE == SCALE_K2:
            value = value * (half_of(load_word(words_ptr, step, 0, n, rows, WORDS), 0) * 16384.0)[:, None]
        elif (SCALE != SCALE_NONE) and (SCALE != SCALE_E4M3):
            scale, offset = group_scale(words_ptr, step, j, n, rows, SCALE, WORDS, BIAS, ASM)
            value = value * scale[:, None]
            if OFFSETS:
                value = value + offset[:, None]
        if MINIMA:
            word = tl.load(c1_ptr + ((step // 4).to(tl.int64) * rows + n) * 16 + j).to(tl.int32)
            minimum = ((word >> (4 * (step % 4))) & 15).to(tl.float32)
            value = value + (minimum * minimum_unit(words_ptr, step, n, rows, WORDS))[:, None]
        if BLOCK_SCALE:
            value = value * tl.load(block_scale_ptr + (n // 128) * num_steps + step)[:, None]
        if ROW_SCALE:
            value = value * tl.load(row_scale_ptr + n)[:, None]
        column = step * STEP + j * KD + k
        place = at.to(tl.int64)[:, None] * width + column[None, :]
        mask = live[:, None] & (column < width)[None, :]
        tl.store(out_ptr + place, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["pairs", "num_tiles", "num_experts"])
def group_kernel(
    ids_ptr, tile_group_ptr, tile_first_ptr, tile_count_ptr, order_ptr, pairs, num_tiles, num_experts,
    COLUMNS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Sort up to PAIRS pairs by expert, one program: every pair counts those before it (see `experts.group_rows`)."""
    place = tl.arange(0, PAIRS)
    expert = tl.load(ids_ptr + place, mask=place < pairs, other=num_experts).to(tl.int32)
    # The same list along the other axis; spare places sort behind every expert.
    other = tl.load(ids_ptr + place, mask=place < pairs, other=num_experts).to(tl.int32)
    same = expert[:, None] == other[None, :]
    before = (expert[:, None] > other[None, :]).to(tl.int32)
    first = tl.sum(before, axis=1)
    rank = tl.sum((same & (place[None, :] < place[:, None])).to(tl.int32), axis=1)
    rank_of_other = tl.sum((same & (place[:, None] < place[None, :])).to(tl.int32), axis=0)
    size = tl.sum(same.to(tl.int32), axis=1)
    heads = (rank_of_other % COLUMNS == 0) & (other < num_experts)
    tile = tl.sum(before * heads.to(tl.int32)[None, :], axis=1) + rank // COLUMNS
    live = place < pairs
    tl.store(order_ptr + first + rank, place, mask=live)
    head = live & (rank % COLUMNS == 0)
    tl.store(tile_group_ptr + tile, expert, mask=head)
    tl.store(tile_first_ptr + tile, first + rank, mask=head)
    tl.store(tile_count_ptr + tile, tl.minimum(size - rank, COLUMNS), mask=head)
    used = tl.sum(heads.to(tl.int32), axis=0)
    spare = used + place
    tl.store(tile_count_ptr + spare, tl.zeros_like(place), mask=spare < num_tiles)


@triton.jit
def combine_kernel(
    parts_ptr, weights_ptr, out_ptr, width, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [T, H] = sum over slots, in order, of weights [T, SLOTS] * parts [T, SLOTS, H]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(SLOTS):
        weight = tl.load(weights_ptr + row * SLOTS + slot)
        part = tl.load(parts_ptr + (row * SLOTS + slot) * width + at, mask=mask, other=0.0)
        total = tl.fma(part, tl.full((BLOCK,), 1.0, tl.float32) * weight, total)
    tl.store(out_ptr + row * width + at, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_x"])
def split_rows_kernel(
    x_ptr, planes_ptr, sums_ptr, num_x, width, padded, stride_x,
    PARTS: tl.constexpr, SUMS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Cut x [M, K] into PARTS bfloat16 planes that sum to it (smallest first) and sum it over groups of GROUP.

    Sums are three bfloat16 planes that sum to them [3, M, groups], smallest first.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_x + at, mask=at < width, other=0.0).to(tl.float32)
    if SUMS:
        groups: tl.constexpr = BLOCK // GROUP
        sums = tl.sum(tl.reshape(x, (groups, GROUP)), axis=1)
        group = tl.program_id(1) * groups + tl.arange(0, groups)
        count = padded // GROUP
        for p in tl.static_range(3):
            piece = sums.to(tl.bfloat16)
            sums = sums - piece.to(tl.float32)
            place = ((2 - p) * tl.cast(num_x, tl.int64) + row) * count + group
            tl.store(sums_ptr + place, piece, mask=group < count)
    if PARTS > 1:
        size = tl.cast(num_x, tl.int64) * padded
        rest = x
        for p in tl.static_range(PARTS):
            piece = rest.to(tl.bfloat16)
            rest = rest - piece.to(tl.float32)
            tl.store(planes_ptr + (PARTS - 1 - p) * size + row * padded + at, piece, mask=at < padded)
