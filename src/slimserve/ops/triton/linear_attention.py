"""Short convolution over open chunks in Triton, beside the delta rule that reads its output (delta_rule.py)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slimserve.ops.triton.delta_rule import CHUNK, gated_delta_rule
from slimserve.ops.triton.open_rows import keep_rows

__all__ = ["causal_conv", "gated_delta_rule"]


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
    keep_rows((x, open_conv), open_index, row_offsets, start_positions)
    return out
