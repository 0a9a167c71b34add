"""Latent attention over a list of tokens: the members of chosen pools, then the open pool's.

A program owns a token and a group of heads; its loop bounds are functions of that token's absolute position, so bits
do not depend on the launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slimserve.ops.triton.attention import merge_parts
from slimserve.ops.triton.launch import INTERPRETED, NO_FUSION, cdiv, multiprocessors, next_power
from slimserve.ops.triton.open_rows import row_of

PAGE_TOKENS = 64
HEAD_ROWS = 32
LIST_BLOCK = 64
SEGMENT_TOKENS = 256
"""Entries of a list that are reduced together; few tokens with long lists spread their segments over the device."""
MERGE_HEADS = 4
WORK_BYTES = 32 << 20
"""Bytes of stored segments beyond which a token's segments run one after the other."""

_NOTHING = -3.0e38


@triton.jit
def _attend(
    q, token, wanted, latent_ptr, table_ptr, table_base, col, live_col, scale, best, total, sum_,
    DIM: tl.constexpr, PAGE: tl.constexpr, IEEE: tl.constexpr, NOTHING: tl.constexpr,
):  # fmt: skip
    """Fold the listed tokens [N] into the running softmax of q [M, C]: maximum and mass [M], values [C, M].

    Keys stand left in both products: their 64 rows fill the widest instruction, and few heads cost little.
    """
    page = tl.load(table_ptr + table_base + token // PAGE, mask=wanted, other=0).to(tl.int64)
    place = (page * PAGE + token % PAGE) * DIM
    keys = tl.load(latent_ptr + place[:, None] + col[None, :], mask=wanted[:, None] & live_col[None, :], other=0.0)
    keys = keys.to(q.dtype)
    if IEEE:
        score = tl.dot(keys, tl.trans(q), input_precision="ieee")
    else:
        score = tl.dot(keys, tl.trans(q))
    score = tl.where(wanted[:, None], score * (scale * 1.4426950408889634), NOTHING)
    new_best = tl.maximum(best, tl.max(score, axis=0))
    keep = tl.exp2(best - new_best)
    weight = tl.where(wanted[:, None], tl.exp2(score - new_best[None, :]), 0.0)
    total = tl.fma(total, keep, tl.sum(weight, axis=0))
    sum_ = sum_ * keep[None, :]
    if IEEE:
        sum_ = tl.dot(tl.trans(keys), weight.to(q.dtype), sum_, input_precision="ieee")
    else:
        sum_ = tl.dot(tl.trans(keys), weight.to(q.dtype), sum_)
    return new_best, total, sum_


@triton.jit
def _normalised(total, sum_):
    """Values over their mass; zero where no token was seen, NaN where a weight was NaN."""
    return tl.where((total > 0.0)[:, None], sum_ / total[:, None], tl.where((total == total)[:, None], 0.0, sum_))


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "split"])
def _latent_kernel(
    q_ptr, latent_ptr, table_ptr, pools_ptr, offsets_ptr, starts_ptr, out_ptr, work_ptr, work_stat_ptr,
    heads, table_stride, num_pools, num_rows, num_tokens, split, scale,
    POOL: tl.constexpr, LISTED: tl.constexpr, IEEE: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr, BLOCK_H: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, NOTHING: tl.constexpr,
):  # fmt: skip
    """A token and a group of heads over the tokens of its chosen pools and then the open pool's, in segments.

    Segments are reduced by themselves and merged in order, here, or by `_latent_merge_kernel` where they run side by
    side; one machine code serves both.
    """
    flat = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    row = row_of(flat, offsets_ptr, num_rows)
    # Positions, pools and entries count in 32 bits; what is multiplied by a width does not.
    position = tl.load(starts_ptr + row).to(tl.int32) + (flat - tl.load(offsets_ptr + row)).to(tl.int32)
    table_base = row * table_stride
    # Entry i is a member of a chosen pool below `count`, and behind it a token from `tail` on.
    visible = (position + 1) // POOL
    count = tl.zeros((), tl.int32)
    tail = tl.zeros((), tl.int32)
    if LISTED:
        tail = visible * POOL
        count = tl.minimum(visible, num_pools) * POOL
    entries = count + position + 1 - tail
    first = tl.zeros((), tl.int32)
    last = entries
    if split:
        first = tl.program_id(2) * SEGMENT
        last = tl.minimum(first + SEGMENT, entries)
        if first >= entries:
            return
    col = tl.arange(0, BLOCK_D)
    live_col = col < DIM
    mask = (head < heads)[:, None] & live_col[None, :]
    q = tl.load(q_ptr + (flat * heads + head)[:, None] * DIM + col[None, :], mask=mask, other=0.0)
    if IEEE:
        q = q.to(tl.float32)
    total_max = tl.full((BLOCK_H,), NOTHING, tl.float32)
    total_sum = tl.zeros((BLOCK_H,), tl.float32)
    total = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    while first < last:
        part_max = tl.full((BLOCK_H,), NOTHING, tl.float32)
        part_sum = tl.zeros((BLOCK_H,), tl.float32)
        part = tl.zeros((BLOCK_D, BLOCK_H), tl.float32)
        end = tl.minimum(first + SEGMENT, last)
        block = first
        while block < end:
            index = block + tl.arange(0, BLOCK)
            wanted = index < end
            token = tail + index - count
            if LISTED:
                chosen = pools_ptr + flat * num_pools + index // POOL
                pool = tl.load(chosen, mask=index < count, other=-1)
                member = (pool >= 0) & (pool < visible)
                wanted = wanted & (member | (index >= count))
                token = tl.where(index < count, pool * POOL + index % POOL, token)
            part_max, part_sum, part = _attend(
                q, tl.where(wanted, token, 0), wanted, latent_ptr, table_ptr, table_base, col, live_col, scale,
                part_max, part_sum, part, DIM, PAGE, IEEE, NOTHING,
            )  # fmt: skip
            block += BLOCK
        total_max, total_sum, total = merge_parts(total_max, total_sum, total, part_max, part_sum, tl.trans(part))
        first = end
    if split:
        part_place = (tl.program_id(2).to(tl.int64) * num_tokens + flat) * heads + head
        tl.store(work_stat_ptr + part_place * 2, total_max, mask=head < heads)
        tl.store(work_stat_ptr + part_place * 2 + 1, total_sum, mask=head < heads)
        tl.store(work_ptr + part_place[:, None] * DIM + col[None, :], total, mask=mask)
    else:
        out_place = (flat * heads + head)[:, None] * DIM + col[None, :]
        tl.store(out_ptr + out_place, _normalised(total_sum, total), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _latent_merge_kernel(
    work_ptr, work_stat_ptr, offsets_ptr, starts_ptr, out_ptr, heads, num_pools, num_rows, num_tokens,
    POOL: tl.constexpr, LISTED: tl.constexpr, SEGMENT: tl.constexpr, BLOCK_H: tl.constexpr, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, NOTHING: tl.constexpr,
):  # fmt: skip
    flat = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    live = head < heads
    row = row_of(flat, offsets_ptr, num_rows)
    entries = tl.load(starts_ptr + row).to(tl.int64) + flat - tl.load(offsets_ptr + row).to(tl.int64) + 1
    if LISTED:
        visible = entries // POOL
        entries += (tl.minimum(visible, num_pools) - visible) * POOL
    col = tl.arange(0, BLOCK_D)
    mask = live[:, None] & (col < DIM)[None, :]
    total_max = tl.full((BLOCK_H,), NOTHING, tl.float32)
    total_sum = tl.zeros((BLOCK_H,), tl.float32)
    total = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    segment = tl.zeros((), tl.int64)
    while segment * SEGMENT < entries:
        place = (segment * num_tokens + flat) * heads + head
        part_max = tl.load(work_stat_ptr + place * 2, mask=live, other=NOTHING)
        part_sum = tl.load(work_stat_ptr + place * 2 + 1, mask=live, other=0.0)
        part = tl.load(work_ptr + place[:, None] * DIM + col[None, :], mask=mask, other=0.0)
        total_max, total_sum, total = merge_parts(total_max, total_sum, total, part_max, part_sum, part)
        segment += 1
    place = (flat * heads + head)[:, None] * DIM + col[None, :]
    tl.store(out_ptr + place, _normalised(total_sum, total), mask=mask)


def latent_attention(
    q: torch.Tensor,
    latent: torch.Tensor,
    block_table: torch.Tensor,
    pools: torch.Tensor | None,
    row_offsets: torch.Tensor,
    start_positions: torch.Tensor,
    *,
    scale: float,
    pool: int,
    max_context: int,
) -> torch.Tensor:
    """See ops.hybrid.latent_attention."""
    num_tokens, heads, dim = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if num_tokens == 0:
        return out
    num_rows, num_pools = row_offsets.numel() - 1, 0 if pools is None else pools.shape[1]
    entries = max_context if pools is None else min(max_context, num_pools * pool + pool - 1)
    block_h = min(HEAD_ROWS, max(16, next_power(heads)))
    segments, groups = cdiv(entries, SEGMENT_TOKENS), cdiv(heads, block_h)
    places = segments * num_tokens * heads
    ieee = q.dtype == torch.float32 or INTERPRETED
    split = segments > 1 and num_tokens * groups < multiprocessors(q.device) and 4 * places * (dim + 2) <= WORK_BYTES
    work = torch.empty(places * (dim + 2) if split else 1, dtype=torch.float32, device=q.device)
    stat = work[places * dim :] if split else work
    shared = {
        "POOL": pool, "LISTED": pools is not None, "SEGMENT": SEGMENT_TOKENS, "DIM": dim,
        "BLOCK_D": max(16, next_power(dim)), "NOTHING": _NOTHING, **NO_FUSION,
    }  # fmt: skip
    _latent_kernel[(num_tokens, groups, segments if split else 1)](
        q.contiguous(), latent, block_table, block_table if pools is None else pools, row_offsets, start_positions,
        out, work, stat, heads, block_table.stride(0), num_pools, num_rows, num_tokens, int(split), scale,
        IEEE=ieee, PAGE=PAGE_TOKENS, BLOCK=LIST_BLOCK // 2 if ieee else LIST_BLOCK, BLOCK_H=block_h,
        num_warps=8 if dim > 128 else 4, **shared,
    )  # fmt: skip
    if split:
        _latent_merge_kernel[(num_tokens, cdiv(heads, MERGE_HEADS))](
            work, stat, row_offsets, start_positions, out, heads, num_pools, num_rows, num_tokens,
            BLOCK_H=MERGE_HEADS, num_warps=4, **shared,
        )  # fmt: skip
    return out
