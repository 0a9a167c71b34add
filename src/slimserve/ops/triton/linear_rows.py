"""Kernels around the matrix product: decoded rows, rows sorted by expert, sums of slots, x laid out for the product."""
# ruff: noqa: RUF005 (kernels know no starred expressions)
# mypy: disable-error-code=assignment

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from slimserve.ops.triton.tiles import (
    GRID,
    PLAIN,
    SCALE_E4M3,
    SCALE_NONE,
    WORD_E2M1,
    code_tiles,
    group_factor,
    group_scale,
    place_of,
    row_words,
)
from slimserve.ops.triton.tiles_grid import grid_tile


@triton.jit
def load_rows(ptr, step, n, tiles, COUNT: tl.constexpr):
    """COUNT fragments of a step as a tuple of words [BN, 16] of rows n: places 0..15 of an operand."""
    k = tl.arange(0, 16)
    lane = (n % 8)[:, None] * 4 + (k // 2 % 4)[None, :]
    inside = lane * 8 + (k // 8 * 4 + k % 2)[None, :] + (n % 16 // 8 * 2)[:, None]
    tile = (tl.cast(step, tl.int64) * tiles + n // 16) * COUNT
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (tl.load(ptr + (tile + i)[:, None] * 256 + inside),)
    return found


@triton.jit(do_not_specialize=["num_ids", "num_steps", "tiles"])
def embedding_kernel(
    ids_ptr, c0_ptr, c1_ptr, words_ptr, table_ptr, row_scale_ptr, block_scale_ptr, out_ptr,
    num_ids, rows, tiles, width, num_steps,
    CODE: tl.constexpr, SCALE: tl.constexpr, KD: tl.constexpr, STEP: tl.constexpr, LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr, BIAS: tl.constexpr, WORDS: tl.constexpr, GRID_ROW: tl.constexpr, GRID_HIGH: tl.constexpr,
    GRID_DELTA: tl.constexpr, OFFSETS: tl.constexpr, ROW_SCALE: tl.constexpr,
    BLOCK_SCALE: tl.constexpr, ASM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Decode rows ids [T] of a weight to out [T, K]: the decoders of `linear_kernel`, at rows that a list names."""
    OPERANDS: tl.constexpr = KD // 16
    FIELDS_HELD: tl.constexpr = CODE != PLAIN and CODE != GRID
    raiser = 0x4B000000 | (num_steps >> 31)
    at = tl.program_id(0) * BN + tl.arange(0, BN)
    live = at < num_ids
    n = tl.load(ids_ptr + at, mask=live, other=0).to(tl.int32)
    n = tl.minimum(tl.maximum(n, 0), rows - 1)
    step = tl.program_id(1)
    k16 = tl.arange(0, 16)
    q = (k16 // 2 % 4)[None, :]
    low = ()
    high = ()
    words = ()
    if CODE == GRID:
        for i in tl.static_range(1 + STEP // KD // 8):
            words = words + (tl.load(words_ptr + (step.to(tl.int64) * WORDS + i) * rows + n),)
    else:
        words = row_words(words_ptr, step, n, rows, WORDS)
    if FIELDS_HELD:
        low = load_rows(c0_ptr, step, n, tiles, STEP * LOW_BITS // 256)
        if HIGH_BITS > 0:
            high = load_rows(c1_ptr, step, n, tiles, STEP * HIGH_BITS // 256)
    for j in tl.static_range(STEP // KD):
        if not FIELDS_HELD:
            column = step * STEP + j * KD + place_of(tl.arange(0, KD), KD)
            if CODE == PLAIN:
                inside = (column < width)[None, :]
                value = tl.load(c0_ptr + n.to(tl.int64)[:, None] * width + column[None, :], mask=inside, other=0.0)
            else:
                value = grid_tile(
                    words_ptr, table_ptr, step, j, n, column % KD, rows, KD, WORDS, STEP // KD, GRID_ROW, GRID_HIGH,
                    GRID_DELTA, ASM,
                )  # fmt: skip
            values = (value,)
        else:
            factor = q
            if CODE == WORD_E2M1:
                word = tl.broadcast_to(words[j][:, None], (BN, 16))
                factor = group_factor(word, tl.broadcast_to(q, (BN, 16)), ASM)
            values = code_tiles(low, high, factor, j * OPERANDS, CODE, OPERANDS, LOW_BITS, HIGH_BITS, BIAS, ASM)
        for i in tl.static_range(OPERANDS if FIELDS_HELD else 1):
            value = values[i].to(tl.float32)
            if not FIELDS_HELD:
                column = step * STEP + j * KD + place_of(tl.arange(0, KD), KD)
            else:
                column = step * STEP + j * KD + place_of(16 * i + k16, KD)
            if (SCALE != SCALE_NONE) and (SCALE != SCALE_E4M3):
                scale, offset = group_scale(words, j, raiser, SCALE, BIAS, ASM)
                value = value * scale[:, None]
                if OFFSETS:
                    value = value + offset[:, None]
            if BLOCK_SCALE:
                value = value * tl.load(block_scale_ptr + (n // 128) * num_steps + step)[:, None]
            if ROW_SCALE:
                value = value * tl.load(row_scale_ptr + n)[:, None]
            place = at.to(tl.int64)[:, None] * width + column[None, :]
            mask = live[:, None] & (column < width)[None, :]
            tl.store(out_ptr + place, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["pairs", "num_tiles", "num_experts"])
def group_kernel(
    ids_ptr, tile_group_ptr, tile_first_ptr, tile_count_ptr, order_ptr, pairs, num_tiles, num_experts,
    COLUMNS: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Sort up to PAIRS pairs by expert, one program: every pair counts those before it, BLOCK of them at a time (see
    `experts.group_rows`)."""
    if OVERLAP:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    place = tl.arange(0, PAIRS)
    # Spare places sort behind every expert.
    expert = tl.load(ids_ptr + place, mask=place < pairs, other=num_experts).to(tl.int32)
    first = tl.zeros((PAIRS,), tl.int32)
    rank = tl.zeros((PAIRS,), tl.int32)
    size = tl.zeros((PAIRS,), tl.int32)
    tile = tl.zeros((PAIRS,), tl.int32)
    used = tl.zeros((BLOCK,), tl.int32)
    # A single block is no loop to the compiler; of several, those of spare places alone count for nobody.
    for start in range(0, PAIRS if BLOCK == PAIRS else pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        other = tl.load(ids_ptr + at, mask=at < pairs, other=num_experts).to(tl.int32)
        same = expert[:, None] == other[None, :]
        before = (expert[:, None] > other[None, :]).to(tl.int32)
        first += tl.sum(before, axis=1)
        rank += tl.sum((same & (at[None, :] < place[:, None])).to(tl.int32), axis=1)
        # All pairs stand along axis 0, so a block's own ranks are complete here.
        rank_of_other = tl.sum((same & (place[:, None] < at[None, :])).to(tl.int32), axis=0)
        size += tl.sum(same.to(tl.int32), axis=1)
        heads = ((rank_of_other % COLUMNS == 0) & (other < num_experts)).to(tl.int32)
        tile += tl.sum(before * heads[None, :], axis=1)
        used += heads
    tile += rank // COLUMNS
    live = place < pairs
    tl.store(order_ptr + first + rank, place, mask=live)
    head = live & (rank % COLUMNS == 0)
    tl.store(tile_group_ptr + tile, expert, mask=head)
    tl.store(tile_first_ptr + tile, first + rank, mask=head)
    tl.store(tile_count_ptr + tile, tl.minimum(size - rank, COLUMNS), mask=head)
    spare = tl.sum(used, axis=0) + place
    tl.store(tile_count_ptr + spare, tl.zeros_like(place), mask=spare < num_tiles)


@triton.jit
def combine_kernel(
    parts_ptr, weights_ptr, out_ptr, width, SLOTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out [T, H] = sum over slots, in order, of weights [T, SLOTS] * parts [T, SLOTS, H]."""
    if OVERLAP:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
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
    x_ptr, planes_ptr, num_x, width, padded, stride_x,
    PARTS: tl.constexpr, ORDER: tl.constexpr, OVERLAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Cut x [M, K] into PARTS bfloat16 planes that sum to it (smallest first); with ORDER > 0, elements stand in the
    order of a right operand of so many."""
    if OVERLAP:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = at
    if ORDER > 0:
        source = at // ORDER * ORDER + place_of(at % ORDER, ORDER)
    size = tl.cast(num_x, tl.int64) * padded
    rest = tl.load(x_ptr + row * stride_x + source, mask=source < width, other=0.0).to(tl.float32)
    for p in tl.static_range(PARTS):
        piece = rest.to(tl.bfloat16)
        rest = rest - piece.to(tl.float32)
        tl.store(planes_ptr + (PARTS - 1 - p) * size + row * padded + at, piece, mask=at < padded)
