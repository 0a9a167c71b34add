"""Short convolution over open chunks in Triton, beside the delta rule that reads its output (delta_rule.py)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slimserve.ops.triton.delta_rule import CHUNK, gated_delta_rule
from slimserve.ops.triton.launch import NO_FUSION, cdiv, next_power
from slimserve.ops.triton.open_rows import keep_rows

__all__ = ["causal_conv", "gated_delta_rule"]


TOKENS = 16
"""Tokens of a tile: with 64 channels and eight warps a thread owns four elements, whatever their width."""


@triton.jit(do_not_specialize=["num_crossings", "ring"])
def _conv_kernel(
    x_ptr, weight_ptr, open_conv_ptr, conv_tail_ptr, out_ptr,
    state_in_ptr, state_out_ptr, open_index_ptr, row_offsets_ptr, start_ptr,
    channels, ring, num_crossings,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A row's new tokens in one chunk, N at a time, and its inputs before the chunk's end if that is reached.

    Only reads what a later launch overwrites: the slots written here are no row's opening state.
    """
    row = tl.program_id(2).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live_cols = cols < channels
    begin = tl.load(row_offsets_ptr + row).to(tl.int64)
    end = tl.load(row_offsets_ptr + row + 1).to(tl.int64)
    start = tl.load(start_ptr + row).to(tl.int64)
    final = start + end - begin
    first = start - start % C
    base = first + tl.program_id(0).to(tl.int64) * C
    if base >= final:
        return
    slot = tl.load(state_in_ptr + row).to(tl.int64)
    open_row = tl.load(open_index_ptr + row).to(tl.int64)
    stop = tl.minimum(base + C, final)
    token = tl.maximum(base, start)
    token = token - token % N
    while token < stop:
        position = (token + tl.arange(0, N))[:, None]
        mask = (position >= start) & (position < stop) & live_cols[None, :]
        total = tl.zeros((N, BLOCK), dtype=tl.float32)
        for tap in tl.static_range(WIDTH):
            place = position - (WIDTH - 1 - tap)
            fresh = place >= start
            kept = (place >= first) & (place < start)
            tailed = tl.where(slot > 0, place < first, False)
            new = x_ptr + (begin + place - start) * channels + cols[None, :]
            value = tl.load(new, mask=mask & fresh, other=0.0).to(tl.float32)
            opened = open_conv_ptr + (open_row * ring + place % ring) * channels + cols[None, :]
            value += tl.load(opened, mask=mask & kept, other=0.0).to(tl.float32)
            tail = conv_tail_ptr + (slot * (WIDTH - 1) + place - first + WIDTH - 1) * channels + cols[None, :]
            value += tl.load(tail, mask=mask & tailed, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + cols * WIDTH + tap, mask=live_cols, other=0.0)
            total += value * weight[None, :]
        out = out_ptr + (begin + position - start) * channels + cols[None, :]
        tl.store(out, total / (1.0 + tl.exp(-total)), mask=mask)
        token += N
    if base + C <= final:
        crossing = (base - first) // C
        target = tl.load(state_out_ptr + row * num_crossings + crossing).to(tl.int64)
        for tap in tl.static_range(WIDTH - 1):
            place = base + C - (WIDTH - 1) + tap
            fresh = place >= start
            value = tl.load(
                x_ptr + (begin + place - start) * channels + cols, mask=tl.where(fresh, live_cols, False), other=0.0
            ).to(tl.float32)
            value += tl.load(
                open_conv_ptr + (open_row * ring + place % ring) * channels + cols,
                mask=tl.where(fresh, False, live_cols), other=0.0,
            ).to(tl.float32)  # fmt: skip
            tl.store(
                conv_tail_ptr + (target * (WIDTH - 1) + tap) * channels + cols,
                value,
                mask=tl.where(target > 0, live_cols, False),
            )


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
    x = x.contiguous()
    out = torch.empty_like(x)
    if num_tokens == 0:
        return out
    block, crossings = min(64, next_power(channels)), state_out.shape[1]
    # A row that crosses n boundaries has new tokens in at most n + 1 chunks.
    _conv_kernel[(crossings + 1, cdiv(channels, block), row_offsets.numel() - 1)](
        x, weight, open_conv, conv_tail, out, state_in, state_out, open_index, row_offsets, start_positions,
        channels, open_conv.shape[1], crossings,
        WIDTH=weight.shape[1], BLOCK=block, N=TOKENS, C=CHUNK, num_warps=8, **NO_FUSION,
    )  # fmt: skip
    keep_rows((x, open_conv), open_index, row_offsets, start_positions)
    return out
