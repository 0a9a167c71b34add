"""Gated delta rule and short convolution in Triton, one token at a time over the open chunk.

A program owns one row, one value head and a slice of the value dimension; the opening state of the chunk stays in
registers while the row's tokens run. Every token reduces over the same tiles ([64, K] pairs, [K, BV] state) whatever
was computed in this launch and whatever was read back, so bits do not depend on how a prompt was cut.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 64


@triton.jit
def _delta_rule_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, out_ptr,
    state_ptr, open_k_ptr, open_g_ptr, open_d_ptr,
    state_in_ptr, state_out_ptr, open_index_ptr, row_offsets_ptr, start_ptr,
    num_crossings, ring,
    heads: tl.constexpr, repeat: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    PER_CHANNEL: tl.constexpr, TILED: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    key_heads: tl.constexpr = heads // repeat
    key_head = head % key_heads if TILED else head // repeat
    begin = tl.load(row_offsets_ptr + row).to(tl.int64)
    end = tl.load(row_offsets_ptr + row + 1).to(tl.int64)
    start = tl.load(start_ptr + row).to(tl.int64)
    slot = tl.load(state_in_ptr + row).to(tl.int64)
    open_row = tl.load(open_index_ptr + row).to(tl.int64)
    rows_c = tl.arange(0, C)
    cols_k = tl.arange(0, BK)
    cols_v = tl.program_id(2) * BV + tl.arange(0, BV)
    mask_k = cols_k < key_dim
    mask_v = cols_v < value_dim
    state_offsets = cols_k[:, None] * value_dim + cols_v[None, :]
    state_mask = mask_k[:, None] & mask_v[None, :]
    state_size: tl.constexpr = key_dim * value_dim
    scale = 1.0 / tl.sqrt(key_dim * 1.0)
    current = tl.load(
        state_ptr + (slot * heads + head) * state_size + state_offsets,
        mask=tl.where(slot > 0, state_mask, False),
        other=0.0,
    ).to(tl.float32)
    position = start
    final = start + end - begin
    crossing = 0
    while position < final:
        base = position - position % C
        stop = tl.minimum(base + C, final)
        # Rows of this chunk: read back where older than this launch, from the inputs where new.
        places = base + rows_c
        old = places < position
        new = (places >= position) & (places < stop)
        live = places < stop
        flat = begin + places - start
        ring_rows = open_row * ring + places % ring
        keys = tl.load(
            open_k_ptr + (ring_rows[:, None] * key_heads + key_head) * key_dim + cols_k[None, :],
            mask=old[:, None] & mask_k[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        new_keys = tl.load(
            k_ptr + (flat[:, None] * key_heads + key_head) * key_dim + cols_k[None, :],
            mask=new[:, None] & mask_k[None, :], other=0.0,
        )  # fmt: skip
        keys += new_keys.to(open_k_ptr.dtype.element_ty).to(tl.float32)
        keys = keys * (1.0 / tl.sqrt(tl.sum(keys * keys, axis=1) + 1e-6))[:, None]
        if PER_CHANNEL:
            decay = tl.load(
                open_g_ptr + (ring_rows[:, None] * heads + head) * key_dim + cols_k[None, :],
                mask=old[:, None] & mask_k[None, :], other=0.0,
            ) + tl.load(
                g_ptr + (flat[:, None] * heads + head) * key_dim + cols_k[None, :],
                mask=new[:, None] & mask_k[None, :], other=0.0,
            )  # fmt: skip
        else:
            decay = tl.load(open_g_ptr + ring_rows * heads + head, mask=old, other=0.0)
            decay += tl.load(g_ptr + flat * heads + head, mask=new, other=0.0)
        total = tl.cumsum(decay, axis=0)
        written = tl.load(
            open_d_ptr + (ring_rows[:, None] * heads + head) * value_dim + cols_v[None, :],
            mask=old[:, None] & mask_v[None, :], other=0.0,
        )  # fmt: skip
        token = position
        while token < stop:
            index = token - base
            here = rows_c == index
            source = begin + token - start
            key = tl.sum(tl.where(here[:, None], keys, 0.0), axis=0)
            query = tl.load(q_ptr + (source * key_heads + key_head) * key_dim + cols_k, mask=mask_k, other=0.0)
            query = query.to(tl.float32)
            query = query * (1.0 / tl.sqrt(tl.sum(query * query, axis=0) + 1e-6)) * scale
            value = tl.load(v_ptr + (source * heads + head) * value_dim + cols_v, mask=mask_v, other=0.0).to(tl.float32)
            beta = tl.load(beta_ptr + source * heads + head).to(tl.float32)
            if PER_CHANNEL:
                now = tl.sum(tl.where(here[:, None], total, 0.0), axis=0)
                factors = keys * tl.exp(tl.minimum(now[None, :] - total, 0.0))
                pairs_k = tl.sum(factors * key[None, :], axis=1)
                pairs_q = tl.sum(factors * query[None, :], axis=1)
                grow = tl.exp(now)
            else:
                now = tl.sum(tl.where(here, total, 0.0), axis=0)
                factor = tl.exp(tl.minimum(now - total, 0.0))
                pairs_k = tl.sum(keys * key[None, :], axis=1) * factor
                pairs_q = tl.sum(keys * query[None, :], axis=1) * factor
                grow = tl.exp(now)
            pairs_k = tl.where(rows_c < index, pairs_k, 0.0)
            pairs_q = tl.where(rows_c <= index, pairs_q, 0.0)
            target = value - tl.sum((key * grow)[:, None] * current, axis=0)
            target -= tl.sum(pairs_k[:, None] * written, axis=0)
            delta = beta * target
            written = tl.where(here[:, None], delta[None, :], written)
            result = tl.sum((query * grow)[:, None] * current, axis=0) + tl.sum(pairs_q[:, None] * written, axis=0)
            tl.store(out_ptr + (source * heads + head) * value_dim + cols_v, result, mask=mask_v)
            token += 1
        # Written values belong to this program alone; keys and decays are shared and kept by a second launch.
        tl.store(
            open_d_ptr + (ring_rows[:, None] * heads + head) * value_dim + cols_v[None, :],
            written, mask=new[:, None] & mask_v[None, :],
        )  # fmt: skip
        if stop == base + C:
            last = (
                tl.sum(tl.where((rows_c == C - 1)[:, None], total, 0.0), axis=0)
                if PER_CHANNEL
                else tl.sum(tl.where(rows_c == C - 1, total, 0.0), axis=0)
            )
            if PER_CHANNEL:
                kept = keys * tl.exp(last[None, :] - total)
                current = current * tl.exp(last)[:, None]
            else:
                kept = keys * tl.exp(last - total)[:, None]
                current = current * tl.exp(last)
            current += tl.dot(tl.trans(tl.where(live[:, None], kept, 0.0)), written, input_precision="ieee")
            target_slot = tl.load(state_out_ptr + row * num_crossings + crossing).to(tl.int64)
            rounded = current.to(state_ptr.dtype.element_ty)
            tl.store(
                state_ptr + (target_slot * heads + head) * state_size + state_offsets,
                rounded, mask=tl.where(target_slot > 0, state_mask, False),
            )  # fmt: skip
            current = rounded.to(tl.float32)
            crossing += 1
        position = stop


@triton.jit
def keep_rows_kernel(
    source_ptr, ring_ptr, open_index_ptr, row_offsets_ptr, start_ptr, width, ring, BLOCK: tl.constexpr
):
    """Copy a row's last `ring` tokens [width] into its open buffer.

    A launch of its own: programs of the main kernel that share a key head still read older rows of the ring.
    """
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    begin = tl.load(row_offsets_ptr + row).to(tl.int64)
    end = tl.load(row_offsets_ptr + row + 1).to(tl.int64)
    start = tl.load(start_ptr + row).to(tl.int64)
    open_row = tl.load(open_index_ptr + row).to(tl.int64)
    final = start + end - begin
    place = tl.maximum(start, final - ring)
    while place < final:
        value = tl.load(source_ptr + (begin + place - start) * width + cols, mask=mask, other=0.0)
        tl.store(ring_ptr + (open_row * ring + place % ring) * width + cols, value, mask=mask)
        place += 1


def keep_rows(
    source: torch.Tensor, ring: torch.Tensor, open_index: torch.Tensor, row_offsets: torch.Tensor, starts: torch.Tensor
) -> None:
    """Copy each row's last tokens of source [T, ...] into its ring [num_open, ring, ...]; source is contiguous."""
    width = source[0].numel()
    block = min(1024, triton.next_power_of_2(width))
    grid = (row_offsets.numel() - 1, triton.cdiv(width, block))
    keep_rows_kernel[grid](
        source, ring, open_index, row_offsets, starts, width, ring.shape[1], BLOCK=block, num_warps=4
    )


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    open_k: torch.Tensor,
    open_g: torch.Tensor,
    open_d: torch.Tensor,
    state_in: torch.Tensor,
    state_out: torch.Tensor,
    open_index: torch.Tensor,
    row_offsets: torch.Tensor,
    start_positions: torch.Tensor,
    *,
    tiled: bool = False,
) -> torch.Tensor:
    """Same contract as ops.reference.linear_attention.gated_delta_rule; all tensors contiguous on one CUDA device."""
    num_tokens, heads, value_dim = v.shape
    key_heads, key_dim = q.shape[1], q.shape[2]
    out = torch.empty(num_tokens, heads, value_dim, dtype=torch.float32, device=v.device)
    block_v = min(32, triton.next_power_of_2(value_dim))
    grid = (row_offsets.numel() - 1, heads, triton.cdiv(value_dim, block_v))
    k, g = k.contiguous(), g.contiguous()
    _delta_rule_kernel[grid](
        q.contiguous(), k, v.contiguous(), g, beta.contiguous(), out,
        state, open_k, open_g, open_d, state_in, state_out, open_index, row_offsets, start_positions,
        state_out.shape[1], open_k.shape[1],
        heads=heads, repeat=heads // key_heads, key_dim=key_dim, value_dim=value_dim,
        PER_CHANNEL=g.dim() == 3, TILED=tiled,
        BK=triton.next_power_of_2(key_dim), BV=max(block_v, 16), C=CHUNK, num_warps=8,
    )  # fmt: skip
    keep_rows(k, open_k, open_index, row_offsets, start_positions)
    keep_rows(g, open_g, open_index, row_offsets, start_positions)
    return out


@triton.jit
def _conv_kernel(
    x_ptr, weight_ptr, open_conv_ptr, conv_tail_ptr, out_ptr,
    state_in_ptr, open_index_ptr, token_row_ptr, row_offsets_ptr, start_ptr,
    channels, ring,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < channels
    row = tl.load(token_row_ptr + token).to(tl.int64)
    begin = tl.load(row_offsets_ptr + row).to(tl.int64)
    start = tl.load(start_ptr + row).to(tl.int64)
    slot = tl.load(state_in_ptr + row).to(tl.int64)
    open_row = tl.load(open_index_ptr + row).to(tl.int64)
    position = start + token - begin
    base = start - start % C
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for tap in tl.static_range(WIDTH):
        place = position - (WIDTH - 1) + tap
        fresh = place >= start
        kept = (place >= base) & (place < start)
        tailed = (place < base) & (slot > 0)
        value = tl.load(
            x_ptr + (begin + place - start) * channels + cols, mask=tl.where(fresh, mask, False), other=0.0
        ).to(tl.float32)
        value += tl.load(
            open_conv_ptr + (open_row * ring + place % ring) * channels + cols,
            mask=tl.where(kept, mask, False),
            other=0.0,
        ).to(tl.float32)
        value += tl.load(
            conv_tail_ptr + (slot * (WIDTH - 1) + place - base + WIDTH - 1) * channels + cols,
            mask=tl.where(tailed, mask, False), other=0.0,
        ).to(tl.float32)  # fmt: skip
        total += value * tl.load(weight_ptr + cols * WIDTH + tap, mask=mask, other=0.0)
    tl.store(out_ptr + token * channels + cols, total / (1.0 + tl.exp(-total)), mask=mask)


@triton.jit
def _conv_tail_kernel(
    x_ptr, open_conv_ptr, conv_tail_ptr, state_in_ptr, state_out_ptr, open_index_ptr, row_offsets_ptr, start_ptr,
    channels, ring, num_crossings,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Keep the convolution inputs before each boundary; runs before the ring is overwritten."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < channels
    begin = tl.load(row_offsets_ptr + row).to(tl.int64)
    end = tl.load(row_offsets_ptr + row + 1).to(tl.int64)
    start = tl.load(start_ptr + row).to(tl.int64)
    open_row = tl.load(open_index_ptr + row).to(tl.int64)
    final = start + end - begin
    boundary = start - start % C + C
    crossing = 0
    while boundary <= final:
        target = tl.load(state_out_ptr + row * num_crossings + crossing).to(tl.int64)
        for tap in tl.static_range(WIDTH - 1):
            place = boundary - (WIDTH - 1) + tap
            fresh = place >= start
            value = tl.load(
                x_ptr + (begin + place - start) * channels + cols, mask=tl.where(fresh, mask, False), other=0.0
            )
            value = tl.where(
                fresh, value, tl.load(
                    open_conv_ptr + (open_row * ring + place % ring) * channels + cols,
                    mask=tl.where(place < start, mask, False), other=0.0,
                ),
            )  # fmt: skip
            tl.store(
                conv_tail_ptr + (target * (WIDTH - 1) + tap) * channels + cols,
                value,
                mask=tl.where(target > 0, mask, False),
            )
        boundary += C
        crossing += 1


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    open_conv: torch.Tensor,
    conv_tail: torch.Tensor,
    state_in: torch.Tensor,
    state_out: torch.Tensor,
    open_index: torch.Tensor,
    row_offsets: torch.Tensor,
    start_positions: torch.Tensor,
) -> torch.Tensor:
    """Same contract as ops.reference.linear_attention.causal_conv; all tensors contiguous on one CUDA device."""
    num_tokens, channels = x.shape
    width = weight.shape[1]
    x = x.contiguous()
    out = torch.empty_like(x)
    flat = torch.arange(num_tokens, device=x.device, dtype=row_offsets.dtype)
    token_row = torch.searchsorted(row_offsets[1:].contiguous(), flat, right=True)
    block = min(256, triton.next_power_of_2(channels))
    blocks = triton.cdiv(channels, block)
    _conv_kernel[(num_tokens, blocks)](
        x, weight, open_conv, conv_tail, out, state_in, open_index, token_row, row_offsets, start_positions,
        channels, open_conv.shape[1], WIDTH=width, BLOCK=block, C=CHUNK, num_warps=4,
    )  # fmt: skip
    _conv_tail_kernel[(row_offsets.numel() - 1, blocks)](
        x, open_conv, conv_tail, state_in, state_out, open_index, row_offsets, start_positions,
        channels, open_conv.shape[1], state_out.shape[1], WIDTH=width, BLOCK=block, C=CHUNK, num_warps=4,
    )  # fmt: skip
    keep_rows(x, open_conv, open_index, row_offsets, start_positions)
    return out
