"""Short convolution over open chunks in Triton, beside the delta rule that reads its output (delta_rule.py)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slimserve.ops.triton.delta_rule import CHUNK, gated_delta_rule
from slimserve.ops.triton.launch import NO_FUSION, cdiv, next_power
from slimserve.ops.triton.open_rows import keep_rows, rows_of

__all__ = ["causal_conv", "gated_delta_rule"]


TOKENS = 16


@triton.jit
def _conv_tokens(
    x_ptr, weight_ptr, open_conv_ptr, conv_tail_ptr, out_ptr, state_in_ptr, open_index_ptr, row_offsets_ptr, start_ptr,
    tokens, num_tokens, num_rows, channels, ring, cols, live_cols,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """N tokens, of whatever rows, in BLOCK channels: nothing is shared between two tokens but the weights."""
    live = tokens < num_tokens
    row = tl.where(live, rows_of(tokens, row_offsets_ptr, num_rows, N), 0)
    begin = tl.load(row_offsets_ptr + row).to(tl.int64)
    start = tl.load(start_ptr + row).to(tl.int64)
    slot = tl.load(state_in_ptr + row).to(tl.int64)
    open_row = tl.load(open_index_ptr + row).to(tl.int64)
    position = start + tokens - begin
    base = start - start % C
    mask = live[:, None] & live_cols[None, :]
    total = tl.zeros((N, BLOCK), dtype=tl.float32)
    for tap in tl.static_range(WIDTH):
        place = position - (WIDTH - 1) + tap
        fresh = place >= start
        kept = (place >= base) & (place < start)
        tailed = (place < base) & (slot > 0)
        new = x_ptr + (begin + place - start)[:, None] * channels + cols[None, :]
        value = tl.load(new, mask=mask & fresh[:, None], other=0.0).to(tl.float32)
        opened = open_conv_ptr + (open_row * ring + place % ring)[:, None] * channels + cols[None, :]
        value += tl.load(opened, mask=mask & kept[:, None], other=0.0).to(tl.float32)
        tail = conv_tail_ptr + (slot * (WIDTH - 1) + place - base + WIDTH - 1)[:, None] * channels + cols[None, :]
        value += tl.load(tail, mask=mask & tailed[:, None], other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + cols * WIDTH + tap, mask=live_cols, other=0.0)
        total += value * weight[None, :]
    tl.store(out_ptr + tokens[:, None] * channels + cols[None, :], total / (1.0 + tl.exp(-total)), mask=mask)


@triton.jit
def _conv_tails(
    x_ptr, open_conv_ptr, conv_tail_ptr, state_out_ptr, open_index_ptr, row_offsets_ptr, start_ptr,
    row, channels, ring, num_crossings, cols, live_cols, WIDTH: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A row's convolution inputs before each boundary that it reaches."""
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
        boundary += C
        crossing += 1


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "token_tiles", "num_crossings", "ring"])
def _conv_kernel(
    x_ptr, weight_ptr, open_conv_ptr, conv_tail_ptr, out_ptr,
    state_in_ptr, state_out_ptr, open_index_ptr, row_offsets_ptr, start_ptr,
    num_tokens, num_rows, token_tiles, channels, ring, num_crossings,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Tiles of tokens, then the tails of rows; both only read what a later launch overwrites."""
    tile = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live_cols = cols < channels
    if tile < token_tiles:
        tokens = tile.to(tl.int64) * N + tl.arange(0, N)
        _conv_tokens(
            x_ptr, weight_ptr, open_conv_ptr, conv_tail_ptr, out_ptr,
            state_in_ptr, open_index_ptr, row_offsets_ptr, start_ptr,
            tokens, num_tokens, num_rows, channels, ring, cols, live_cols, WIDTH, BLOCK, N, C,
        )  # fmt: skip
    else:
        _conv_tails(
            x_ptr, open_conv_ptr, conv_tail_ptr, state_out_ptr, open_index_ptr, row_offsets_ptr, start_ptr,
            (tile - token_tiles).to(tl.int64), channels, ring, num_crossings, cols, live_cols, WIDTH, C,
        )  # fmt: skip


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
    num_rows = row_offsets.numel() - 1
    block = min(64, next_power(channels))
    tiles = cdiv(num_tokens, TOKENS)
    _conv_kernel[(tiles + num_rows, cdiv(channels, block))](
        x, weight, open_conv, conv_tail, out, state_in, state_out, open_index, row_offsets, start_positions,
        num_tokens, num_rows, tiles, channels, open_conv.shape[1], state_out.shape[1],
        WIDTH=weight.shape[1], BLOCK=block, N=TOKENS, C=CHUNK, num_warps=4, **NO_FUSION,
    )  # fmt: skip
    keep_rows((x, open_conv), open_index, row_offsets, start_positions)
    return out
