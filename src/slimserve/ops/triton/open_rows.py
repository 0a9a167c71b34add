"""Copies of a step's last tokens into the rings of open rows, and reads that do not care where a row lies."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slimserve.ops.triton.launch import cdiv, next_power

KEEP_ROWS = 16


@triton.jit
def row_of(token, row_offsets_ptr, num_rows, R: tl.constexpr = 64):
    """The row that owns a flat token: how many rows end at or before it; int64."""
    row = tl.zeros((), tl.int32)
    first = 0
    while first < num_rows:
        index = first + tl.arange(0, R)
        ends = tl.load(row_offsets_ptr + 1 + index, mask=index < num_rows, other=2147483647)
        row += tl.sum((ends <= token).to(tl.int32), axis=0)
        first += R
    return row.to(tl.int64)


@triton.jit
def kept_or_new(ring_ptr, new_ptr, ring_rows, flat, old, new, stride, cols, live_cols):
    """Rows [N, W] float32 whose elements lie at row * stride + cols: from the ring where old, from the step where new.

    A new row passes through the ring's dtype, so that it equals itself when it is read back later.
    """
    kept = tl.load(
        ring_ptr + ring_rows[:, None] * stride + cols[None, :], mask=old[:, None] & live_cols[None, :], other=0.0
    )
    fresh = tl.load(new_ptr + flat[:, None] * stride + cols[None, :], mask=new[:, None] & live_cols[None, :], other=0.0)
    return kept.to(tl.float32) + fresh.to(ring_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _keep_kernel(
    first_ptr, first_ring_ptr, second_ptr, second_ring_ptr, open_index_ptr, row_offsets_ptr, start_ptr,
    first_width, second_width, first_blocks, ring, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    begin = tl.load(row_offsets_ptr + row).to(tl.int64)
    end = tl.load(row_offsets_ptr + row + 1).to(tl.int64)
    start = tl.load(start_ptr + row).to(tl.int64)
    final = start + end - begin
    place = tl.maximum(start, final - ring) + tl.program_id(2) * ROWS
    if place >= final:
        return
    places = place + tl.arange(0, ROWS)
    live = (places < final)[:, None]
    open_row = tl.load(open_index_ptr + row).to(tl.int64)
    source = (begin + places - start)[:, None]
    target = (open_row * ring + places % ring)[:, None]
    block = tl.program_id(1)
    if block < first_blocks:
        cols = (block * BLOCK + tl.arange(0, BLOCK))[None, :]
        mask = live & (cols < first_width)
        value = tl.load(first_ptr + source * first_width + cols, mask=mask, other=0.0)
        tl.store(first_ring_ptr + target * first_width + cols, value, mask=mask)
    else:
        beside = ((block - first_blocks) * BLOCK + tl.arange(0, BLOCK))[None, :]
        wanted = live & (beside < second_width)
        other = tl.load(second_ptr + source * second_width + beside, mask=wanted, other=0.0)
        tl.store(second_ring_ptr + target * second_width + beside, other, mask=wanted)


def keep_rows(
    first: tuple[torch.Tensor, torch.Tensor],
    open_index: torch.Tensor,
    row_offsets: torch.Tensor,
    starts: torch.Tensor,
    second: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Copy each row's last tokens of one or two contiguous sources [T, ...] into their rings [num_open, ring, ...].

    Both rings have the same number of rows. A launch of its own: whoever reads older rows of a ring must be done.
    """
    source, ring = first
    if source.shape[0] == 0:
        return
    beside, beside_ring = first if second is None else second
    widths = source[0].numel(), 0 if second is None else beside[0].numel()
    rows = ring.shape[1]
    block = min(128, next_power(max(widths)))
    blocks = [cdiv(width, block) for width in widths]
    grid = (row_offsets.numel() - 1, sum(blocks), cdiv(rows, KEEP_ROWS))
    _keep_kernel[grid](
        source, ring, beside, beside_ring, open_index, row_offsets, starts, *widths, blocks[0], rows,
        ROWS=KEEP_ROWS, BLOCK=block, num_warps=4,
    )  # fmt: skip
