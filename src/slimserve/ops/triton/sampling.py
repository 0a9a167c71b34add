"""Sampling kernels: row statistics, greedy choice and Gumbel draws, block by block over the vocabulary.

A program reduces one block of one row; a second kernel merges a row's blocks in order. Block size and order are
constants, so a row's result does not depend on the other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slimserve.ops.reference.random import SERIES_BELOW
from slimserve.ops.triton.launch import NO_FUSION, cdiv, next_power

BLOCK = 2048


@triton.jit
def philox_word(token, position_low, position_high, purpose, seed_low, seed_high):
    """First output word of Philox4x32-10 for counter (token, position, purpose); uint32 in and out."""
    c0 = token
    c1 = position_low
    c2 = position_high
    c3 = purpose
    k0 = seed_low
    k1 = seed_high
    for _ in tl.static_range(10):
        product_0 = c0.to(tl.uint64) * 0xD2511F53
        product_1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product_1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = product_1.to(tl.uint32)
        c2 = (product_0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = product_0.to(tl.uint32)
        k0 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    return c0


@triton.jit
def gumbel_noise(word, SERIES: tl.constexpr):
    """-log(-log(1 - v)) for v = (word + 0.5) / 2^32, as the numpy reference computes it."""
    v = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    v = tl.minimum(v, 0.99999994)
    series = v * (1.0 + v * (0.5 + v * (0.3333333333333333 + v * 0.25)))
    exponential = tl.where(v < SERIES, series, -tl.log(1.0 - v))
    return -tl.log(exponential)


@triton.jit
def _clean(x):
    """NaN and -inf become -1e30, +inf 1e30: every comparison below is then total."""
    x = tl.where(x != x, -1e30, x)
    return tl.minimum(tl.maximum(x, -1e30), 1e30)


@triton.jit
def _lowest_of_best(value, index, NO_INDEX: tl.constexpr):
    best = tl.max(value, axis=0)
    return best, tl.min(tl.where(value == best, index, NO_INDEX), axis=0)


@triton.jit
def _row_noise(token, row, seed_ptr, position_ptr, purpose, SERIES: tl.constexpr):
    seed = tl.load(seed_ptr + row)
    position = tl.load(position_ptr + row)
    zero = token.to(tl.uint32) * 0
    word = philox_word(
        token.to(tl.uint32),
        zero + position.to(tl.uint32),
        zero + (position >> 32).to(tl.uint32),
        zero + purpose.to(tl.uint32),
        zero + seed.to(tl.uint32),
        zero + (seed >> 32).to(tl.uint32),
    )
    return gumbel_noise(word, SERIES)


@triton.jit
def _blocks_kernel(
    x_ptr, inverse_ptr, seed_ptr, position_ptr, max_ptr, argmax_ptr, mass_ptr, key_ptr, draw_ptr,
    vocab, num_blocks, purpose, DRAW: tl.constexpr, SERIES: tl.constexpr, NO_INDEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    live = token < vocab
    x = _clean(tl.load(x_ptr + row * vocab + token, mask=live, other=0.0))
    x = tl.where(live, x, -2e30)
    inverse = tl.load(inverse_ptr + row)
    best, where = _lowest_of_best(x, token, NO_INDEX)
    place = row * num_blocks + block
    tl.store(max_ptr + place, best)
    tl.store(argmax_ptr + place, where)
    scaled = (x - best) * inverse
    tl.store(mass_ptr + place, tl.sum(tl.where(live, tl.exp(scaled), 0.0), axis=0))
    if DRAW:
        noise = _row_noise(token, row, seed_ptr, position_ptr, purpose, SERIES)
        shifted = tl.where(live, scaled + noise, -2e30)
        key, drawn = _lowest_of_best(shifted, token, NO_INDEX)
        tl.store(key_ptr + place, key)
        tl.store(draw_ptr + place, drawn)


@triton.jit
def _merge_kernel(
    inverse_ptr, max_ptr, argmax_ptr, mass_ptr, key_ptr, draw_ptr, best_ptr, greedy_ptr, total_ptr, token_ptr,
    num_blocks, DRAW: tl.constexpr, NO_INDEX: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK_B)
    live = block < num_blocks
    place = row * num_blocks + block
    inverse = tl.load(inverse_ptr + row)
    maxima = tl.load(max_ptr + place, mask=live, other=-2e30)
    best, greedy = _lowest_of_best(maxima, tl.load(argmax_ptr + place, mask=live, other=NO_INDEX), NO_INDEX)
    rise = (maxima - best) * inverse
    mass = tl.load(mass_ptr + place, mask=live, other=0.0)
    tl.store(best_ptr + row, best)
    tl.store(greedy_ptr + row, greedy)
    tl.store(total_ptr + row, tl.sum(tl.where(live, mass * tl.exp(rise), 0.0), axis=0))
    if DRAW:
        key = tl.load(key_ptr + place, mask=live, other=-2e30)
        key = tl.where(live, key + rise, -3e30)
        _, token = _lowest_of_best(key, tl.load(draw_ptr + place, mask=live, other=NO_INDEX), NO_INDEX)
        tl.store(token_ptr + row, token)


def row_statistics(
    x: torch.Tensor,
    inverse: torch.Tensor,
    draw: tuple[torch.Tensor, torch.Tensor, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """For x [L, V] float32 and inverse temperatures [L]: best logit, its lowest id, sum of exp((x - best) * inverse).

    With draw = (seeds [L] int64, positions [L] int64, purpose) also the id of the largest Gumbel-shifted logit.
    """
    rows, vocab = x.shape
    blocks = cdiv(vocab, BLOCK)
    floats = torch.empty((3, rows, blocks), dtype=torch.float32, device=x.device)
    integers = torch.empty((2, rows, blocks), dtype=torch.int32, device=x.device)
    best, total = torch.empty((2, rows), dtype=torch.float32, device=x.device)
    greedy, token = torch.empty((2, rows), dtype=torch.int32, device=x.device)
    seeds, positions, purpose = draw if draw is not None else (greedy, greedy, 0)
    options = {"DRAW": draw is not None, "NO_INDEX": 2**31 - 1, "num_warps": 4, **NO_FUSION}
    _blocks_kernel[(rows, blocks)](
        x, inverse, seeds, positions, floats[0], integers[0], floats[1], floats[2], integers[1],
        vocab, blocks, purpose, SERIES=SERIES_BELOW, BLOCK=BLOCK, **options,
    )  # fmt: skip
    _merge_kernel[(rows,)](
        inverse, floats[0], integers[0], floats[1], floats[2], integers[1], best, greedy, total, token,
        blocks, BLOCK_B=next_power(blocks), **options,
    )  # fmt: skip
    return best, greedy, total, token if draw is not None else None


@triton.jit
def _candidates_kernel(
    value_ptr, id_ptr, inverse_ptr, best_ptr, total_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr, seed_ptr, position_ptr,
    token_ptr, incomplete_ptr, count, vocab, purpose,
    SERIES: tl.constexpr, NO_INDEX: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, BLOCK_C)
    live = rank < count
    value = tl.load(value_ptr + row * count + rank, mask=live, other=-2e30)
    token = tl.load(id_ptr + row * count + rank, mask=live, other=0).to(tl.int32)
    inverse = tl.load(inverse_ptr + row)
    best = tl.load(best_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    log_min_p = tl.load(log_min_p_ptr + row)
    scaled = (value - best) * inverse
    kept = live & (rank < tl.where(top_k > 0, top_k, BLOCK_C))
    mass = tl.where(kept, tl.exp(scaled), 0.0)
    cumulative = tl.cumsum(mass, axis=0)
    covered = tl.sum(mass, axis=0)
    goal = top_p * tl.where(top_k > 0, covered, tl.load(total_ptr + row))
    before = tl.where(rank == 0, -1.0, cumulative - mass)
    kept = kept & (before < tl.where(top_p < 1.0, goal, float("inf")))
    kept = kept & (tl.where(rank == 0, 0.0, scaled) >= log_min_p)
    # The candidates do not reach far enough: the row asks for more of them than were selected.
    last = tl.sum(tl.where(rank == count - 1, scaled, 0.0), axis=0)
    wide = tl.where(top_p < 1.0, covered < goal, last >= log_min_p)
    missing = tl.where(top_k > 0, top_k > count, wide)
    tl.store(incomplete_ptr + row, tl.where(count < vocab, missing.to(tl.int32), 0))
    noise = _row_noise(token, row, seed_ptr, position_ptr, purpose, SERIES)
    shifted = tl.where(kept, scaled + noise, -3e30)
    _, drawn = _lowest_of_best(shifted, token, NO_INDEX)
    tl.store(token_ptr + row, drawn)


def draw_candidates(
    values: torch.Tensor,
    ids: torch.Tensor,
    vocab: int,
    statistics: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    filters: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    draw: tuple[torch.Tensor, torch.Tensor, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Filter and draw among each row's C best logits, values and ids [L, C], best first, equals by lowest id.

    statistics = (inverse temperature, best, total) [L] of the whole row; filters = (top_k int32, top_p,
    log(min_p)) [L]; draw as in `row_statistics`. Returns the ids drawn and a flag [L] per row: 1 where the filters
    reach past the C candidates, so that the row must be drawn from its whole distribution instead.
    """
    rows, count = values.shape
    token, incomplete = torch.empty((2, rows), dtype=torch.int32, device=values.device)
    seeds, positions, purpose = draw
    _candidates_kernel[(rows,)](
        values, ids, *statistics, *filters, seeds, positions, token, incomplete, count, vocab, purpose,
        SERIES=SERIES_BELOW, NO_INDEX=2**31 - 1, BLOCK_C=next_power(count), num_warps=4, **NO_FUSION,
    )  # fmt: skip
    return token, incomplete
