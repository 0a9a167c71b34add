"""Paged attention: one tile shape and one order for every query length.

A program owns a tile of 32 (token, head of the group) query rows of one KV head and walks the context in pages of 64
tokens at absolute multiples, segment by segment (512 tokens). Each segment is reduced by itself; segments are merged
in order. For short query lists the segments run in parallel and a second kernel merges their stored results with the
same arithmetic, so a query's bits do not depend on how the work was spread.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slimserve.ops.triton.launch import INTERPRETED, NO_FUSION, cdiv, multiprocessors, next_power

PAGE_TOKENS = 64
SEGMENT_PAGES = 8
TILE_ROWS = 32
WORKSPACE_BYTES = 512 << 20
"""Split results beyond this stay in registers: the segments of a tile then run one after the other."""

_NOTHING = -3.0e38


@triton.jit
def merge_parts(total_max, total_sum, total, part_max, part_sum, part):
    """Fold one segment's (maximum, sum, values) into the running ones; an unseen segment changes no bit."""
    new_max = tl.maximum(total_max, part_max)
    keep = tl.exp2(total_max - new_max)
    add = tl.exp2(part_max - new_max)
    seen = part_sum > 0.0
    merged_sum = tl.fma(total_sum, keep, part_sum * add)
    merged = tl.fma(total, tl.broadcast_to(keep[:, None], total.shape), part * add[:, None])
    # NaN sums are not "> 0": they must spread, not vanish.
    seen = seen | (part_sum != part_sum)
    return (
        tl.where(seen, new_max, total_max),
        tl.where(seen, merged_sum, total_sum),
        tl.where(seen[:, None], merged, total),
    )


@triton.jit(do_not_specialize=["num_tokens", "q_heads", "kv_heads", "group", "window", "segments_per_program"])
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, offsets_ptr, starts_ptr, out_ptr, work_ptr, work_stat_ptr,
    num_tokens, q_heads, kv_heads, group, stride_q_token, stride_q_head, table_stride,
    scale, softcap, window, segments_per_program,
    SPLIT: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, IEEE: tl.constexpr, UPCAST: tl.constexpr,
    PAGE: tl.constexpr, SEGMENT: tl.constexpr, BLOCK_M: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    NOTHING: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(2) // kv_heads
    kv_head = tl.program_id(2) % kv_heads
    begin = tl.load(offsets_ptr + row).to(tl.int64)
    q_len = (tl.load(offsets_ptr + row + 1).to(tl.int64) - begin).to(tl.int32)
    start = tl.load(starts_ptr + row).to(tl.int32)
    first_index = tl.program_id(0) * BLOCK_M
    if first_index >= q_len * group:
        return
    index = first_index + tl.arange(0, BLOCK_M)
    token = index // group
    live = token < q_len
    token = tl.minimum(token, q_len - 1)
    position = start + token
    first_position = start + first_index // group
    last_position = start + tl.minimum(q_len - 1, (first_index + BLOCK_M - 1) // group)
    oldest = 0
    if WINDOW:
        oldest = tl.maximum(0, first_position - window + 1)
    first_segment = tl.program_id(1) * segments_per_program
    last_segment = tl.minimum(first_segment + segments_per_program, last_position // (PAGE * SEGMENT) + 1)
    if WINDOW:
        first_segment = tl.maximum(first_segment, oldest // (PAGE * SEGMENT))
    if first_segment >= last_segment:
        return
    head = kv_head * group + index % group
    col = tl.arange(0, BLOCK_D)
    live_col = col < DIM
    flat = begin + token
    q = tl.load(
        q_ptr + flat[:, None] * stride_q_token + head[:, None] * stride_q_head + col[None, :],
        mask=live[:, None] & live_col[None, :],
        other=0.0,
    )
    if IEEE:
        q = q.to(tl.float32)
    total_max = tl.full((BLOCK_M,), NOTHING, tl.float32)
    total_sum = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    offset = tl.arange(0, PAGE)
    for segment in range(first_segment, last_segment):
        part_max = tl.full((BLOCK_M,), NOTHING, tl.float32)
        part_sum = tl.zeros((BLOCK_M,), tl.float32)
        part = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        first_block = segment * SEGMENT
        last_block = tl.minimum(first_block + SEGMENT, last_position // PAGE + 1)
        if WINDOW:
            first_block = tl.maximum(first_block, oldest // PAGE)
        for block in range(first_block, last_block):
            page = tl.load(table_ptr + row.to(tl.int64) * table_stride + block).to(tl.int64)
            key_position = block * PAGE + offset
            # Slots that no query of this tile sees may hold anything, NaN included: they are never loaded.
            wanted = (key_position <= last_position) & (key_position >= oldest)
            # A scalar base and constant offsets inside the page: one address register for the whole tile.
            base = (page * kv_heads + kv_head) * (PAGE * DIM)
            place = offset[:, None] * DIM + col[None, :]
            mask = wanted[:, None] & live_col[None, :]
            keys = tl.load(k_ptr + base + place, mask=mask, other=0.0).to(q.dtype)
            if IEEE:
                score = tl.dot(q, tl.trans(keys), input_precision="ieee")
            elif UPCAST:
                score = tl.dot(q.to(tl.float32), tl.trans(keys.to(tl.float32)))
            else:
                score = tl.dot(q, tl.trans(keys))
            if SOFTCAP:
                # cap * tanh(s / cap), tanh(u) = 1 - 2 / (exp(2u) + 1); in units of log2.
                inner = score * (scale / softcap)
                score = (softcap * 1.4426950408889634) * (1.0 - 2.0 / (tl.exp2(inner * 2.8853900817779268) + 1.0))
            else:
                score = score * (scale * 1.4426950408889634)
            visible = key_position[None, :] <= position[:, None]
            if WINDOW:
                visible = visible & (key_position[None, :] > position[:, None] - window)
            score = tl.where(visible, score, NOTHING)
            new_max = tl.maximum(part_max, tl.max(score, axis=1))
            keep = tl.exp2(part_max - new_max)
            weight = tl.where(visible, tl.exp2(score - new_max[:, None]), 0.0)
            part_sum = tl.fma(part_sum, keep, tl.sum(weight, axis=1))
            values = tl.load(v_ptr + base + place, mask=mask, other=0.0).to(q.dtype)
            part = part * keep[:, None]
            if IEEE:
                part = tl.dot(weight.to(q.dtype), values, part, input_precision="ieee")
            elif UPCAST:
                part = tl.dot(weight.to(q.dtype).to(tl.float32), values.to(tl.float32), part)
            else:
                part = tl.dot(weight.to(q.dtype), values, part)
            part_max = new_max
        if SPLIT:
            place = (tl.cast(segment, tl.int64) * num_tokens + flat) * q_heads + head
            tl.store(work_stat_ptr + place * 2, part_max, mask=live)
            tl.store(work_stat_ptr + place * 2 + 1, part_sum, mask=live)
            tl.store(work_ptr + place[:, None] * BLOCK_D + col[None, :], part, mask=live[:, None])
        else:
            total_max, total_sum, total = merge_parts(total_max, total_sum, total, part_max, part_sum, part)
    if not SPLIT:
        result = total / total_sum[:, None]
        place = (flat * q_heads + head)[:, None] * DIM + col[None, :]
        tl.store(out_ptr + place, result.to(out_ptr.dtype.element_ty), mask=live[:, None] & live_col[None, :])


@triton.jit(do_not_specialize=["num_tokens", "q_heads", "window"])
def _merge_kernel(
    work_ptr, work_stat_ptr, offsets_ptr, starts_ptr, out_ptr, num_tokens, q_heads, dim, window,
    WINDOW: tl.constexpr, PAGE: tl.constexpr, SEGMENT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, NOTHING: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(2)
    token = tl.program_id(0)
    begin = tl.load(offsets_ptr + row).to(tl.int64)
    if token >= (tl.load(offsets_ptr + row + 1).to(tl.int64) - begin).to(tl.int32):
        return
    flat = begin + token
    position = tl.load(starts_ptr + row).to(tl.int32) + token
    head = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = head < q_heads
    col = tl.arange(0, BLOCK_D)
    total_max = tl.full((BLOCK_M,), NOTHING, tl.float32)
    total_sum = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    first_segment = 0
    if WINDOW:
        first_segment = tl.maximum(0, position - window + 1) // (PAGE * SEGMENT)
    for segment in range(first_segment, position // (PAGE * SEGMENT) + 1):
        place = (tl.cast(segment, tl.int64) * num_tokens + flat) * q_heads + head
        part_max = tl.load(work_stat_ptr + place * 2, mask=live, other=NOTHING)
        part_sum = tl.load(work_stat_ptr + place * 2 + 1, mask=live, other=0.0)
        part = tl.load(work_ptr + place[:, None] * BLOCK_D + col[None, :], mask=live[:, None], other=0.0)
        total_max, total_sum, total = merge_parts(total_max, total_sum, total, part_max, part_sum, part)
    result = total / total_sum[:, None]
    place = (flat * q_heads + head)[:, None] * dim + col[None, :]
    tl.store(out_ptr + place, result.to(out_ptr.dtype.element_ty), mask=live[:, None] & (col < dim)[None, :])


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor,
    row_offsets: torch.Tensor,
    start_positions: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    max_q_len: int,
    max_context: int,
) -> torch.Tensor:
    """See `slimserve.ops.paged_attention`."""
    tokens, q_heads, dim = q.shape
    kv_heads = k.shape[1]
    num_rows = row_offsets.shape[0] - 1
    if k.shape != v.shape or k.shape[2:] != (PAGE_TOKENS, dim) or q_heads % kv_heads or q.stride(2) != 1:
        raise ValueError(f"paged_attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit")
    out = torch.empty((tokens, q_heads, dim), dtype=q.dtype, device=q.device)
    if tokens == 0 or num_rows == 0:
        return out
    group = q_heads // kv_heads
    block_d = max(16, next_power(dim))
    num_segments = cdiv(max_context, PAGE_TOKENS * SEGMENT_PAGES)
    tiles = cdiv(max_q_len * group, TILE_ROWS)
    work_floats = num_segments * tokens * q_heads * (block_d + 2)
    crowded = tiles * kv_heads * num_rows >= 4 * multiprocessors(q.device)
    split = num_segments > 1 and not crowded and work_floats * 4 <= WORKSPACE_BYTES
    work = torch.empty(work_floats if split else 1, dtype=torch.float32, device=q.device)
    stat = work[num_segments * tokens * q_heads * block_d :] if split else work
    half_precision = q.dtype == torch.bfloat16 and k.dtype in (torch.bfloat16, torch.float8_e4m3fn)
    shared = {
        "WINDOW": window is not None, "PAGE": PAGE_TOKENS, "SEGMENT": SEGMENT_PAGES, "NOTHING": _NOTHING,
        "BLOCK_D": block_d, **NO_FUSION,
    }  # fmt: skip
    _attention_kernel[(tiles, num_segments if split else 1, num_rows * kv_heads)](
        q, k, v, block_table, row_offsets, start_positions, out, work, stat,
        tokens, q_heads, kv_heads, group, q.stride(0), q.stride(1), block_table.stride(0),
        scale, 1.0 if softcap is None else softcap, 0 if window is None else window,
        1 if split else num_segments,
        SPLIT=split, SOFTCAP=softcap is not None, IEEE=not half_precision, UPCAST=INTERPRETED,
        BLOCK_M=TILE_ROWS, DIM=dim, num_warps=8 if block_d >= 256 else 4, num_stages=2, **shared,
    )  # fmt: skip
    if split:
        merge_heads = min(16, next_power(q_heads))
        _merge_kernel[(max_q_len, cdiv(q_heads, merge_heads), num_rows)](
            work, stat, row_offsets, start_positions, out, tokens, q_heads, dim, 0 if window is None else window,
            BLOCK_M=merge_heads, num_warps=4, **shared,
        )  # fmt: skip
    return out
