"""Routed experts on a CUDA device: input rows sorted by expert, then the matrix product of `linear_kernel` per tile.

A tile holds rows of one expert. Which rows share a tile does not matter to any of them, and a token's slots are
summed in their own order, so a token's result depends on that token alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from slimserve.ops.numerics import NumericsConfig
from slimserve.ops.triton.launch import cdiv, next_power, overlap_options
from slimserve.ops.triton.linear import (
    NARROW,
    Grouping,
    Meeting,
    choose_tile,
    launch,
    prepare_rows,
    prepare_shared,
    segments_of,
    warp_groups_agree,
)
from slimserve.ops.triton.linear_rows import combine_kernel, group_kernel
from slimserve.ops.triton.relayout import relayout
from slimserve.ops.triton.rows import gated
from slimserve.quant.tensor import PackedTensor

GROUP_PAIRS = 256
"""Up to so many pairs, one small kernel sorts them; a dozen library calls would take longer than the experts."""


def rows_of_tile(num_rows: int, num_pairs: int, num_experts: int, fewest: int = 8) -> int:
    """Input rows of a tile for `num_pairs` (row, slot) pairs of num_rows rows: more only where experts are full enough.

    fewest: what the narrowest tile of every weight holds.
    """
    if num_rows <= fewest or num_pairs <= fewest * num_experts:
        return fewest
    if num_rows <= 8 or num_pairs <= 8 * num_experts:
        return 8
    return 16 if num_pairs <= 24 * num_experts else 32


def group_rows(expert_ids: torch.Tensor, num_experts: int, columns: int, divisor: int) -> Grouping:
    """Sort pairs by expert: per tile its expert, first place and count, and the pair ids in sorted order (int32).

    Runs without a host synchronisation: the tile lists have their largest possible length, spare tiles count 0.
    """
    flat = expert_ids.reshape(-1).long()
    pairs = flat.shape[0]
    if pairs <= GROUP_PAIRS:
        num_tiles = min(pairs, num_experts + pairs // columns)
        group, first, count = torch.empty((3, num_tiles), dtype=torch.int32, device=flat.device)
        order = torch.empty(pairs, dtype=torch.int32, device=flat.device)
        overlap, options = overlap_options(flat.device)
        size = max(16, next_power(pairs))
        # Few compares per thread (32 at 64 pairs, else at most 16): a kernel out of registers would need stack.
        group_kernel[(1,)](
            flat, group, first, count, order, pairs, num_tiles, num_experts,
            COLUMNS=columns, PAIRS=size, BLOCK=size if size <= 64 else 32, OVERLAP=overlap,
            num_warps=max(4, size // 16), **options,
        )  # fmt: skip
        return Grouping(group, first, count, order, divisor)
    order = torch.argsort(flat, stable=True)
    ones = torch.ones_like(flat)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, ones)
    tiles = (counts + columns - 1) // columns
    tile_end, row_end = tiles.cumsum(0), counts.cumsum(0)
    tile = torch.arange(min(pairs, num_experts + pairs // columns), device=flat.device)
    found = torch.searchsorted(tile_end, tile, right=True)
    expert = found.clamp(max=num_experts - 1)
    inside = (tile - (tile_end - tiles)[expert]) * columns
    count = (counts[expert] - inside).clamp(0, columns)
    count = torch.where(found < num_experts, count, 0)
    first = (row_end - counts)[expert] + inside
    return Grouping(expert.int(), first.int(), count.int(), order.int(), divisor)


class TritonExperts:
    """All experts of a layer on the device; see PreparedExperts."""

    def __init__(
        self,
        gate_up: tuple[PackedTensor, ...],
        down: PackedTensor,
        device: torch.device,
        numerics: NumericsConfig,
    ) -> None:
        del numerics
        self.gate_up = [relayout(part, device) for part in gate_up]
        self.down = relayout(down, device)
        self.segments = [segments_of(weight) for weight in (*self.gate_up, self.down)]
        self.wide = warp_groups_agree(device)
        self.meeting = Meeting.on(device)
        self.num_experts = down.shape[0]
        self.num_bytes = sum(weight.num_bytes for weight in (*self.gate_up, self.down)) + self.meeting.num_bytes

    def __call__(
        self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, limit: float | None
    ) -> torch.Tensor:
        """See PreparedExperts; between the two products values are float32, rounded once to x's dtype."""
        num_rows, slots = expert_ids.shape
        pairs = num_rows * slots
        out = torch.empty((num_rows, self.down.rows), dtype=x.dtype, device=x.device)
        if pairs == 0:
            return out.zero_()
        formats = [weight.format for weight in (*self.gate_up, self.down)]
        fewest = min(NARROW.columns // fmt.columns for fmt in formats)
        count = rows_of_tile(num_rows, pairs, self.num_experts, fewest)
        tiles = [choose_tile(count, fmt, self.wide) for fmt in formats]
        lists = group_rows(expert_ids, self.num_experts, count, slots)
        hidden = torch.empty((pairs, sum(w.rows for w in self.gate_up)), dtype=torch.float32, device=x.device)
        start = 0
        shared = prepare_shared(x, self.gate_up, tiles[:-1])
        for weight, segments, tile, rows in zip(self.gate_up, self.segments, tiles, shared, strict=False):
            part = hidden[:, start : start + weight.rows]
            launch(weight, segments, self.meeting, rows, num_rows, part, tile, lists)
            start += weight.rows
        del shared
        activated = gated(hidden, limit, gelu=False, dtype=x.dtype)
        results = torch.empty((pairs, self.down.rows), dtype=torch.float32, device=x.device)
        rows = prepare_rows(activated, self.down, tiles[-1].wide)
        launch(self.down, self.segments[-1], self.meeting, rows, pairs, results, tiles[-1], replace(lists, divisor=1))
        overlap, options = overlap_options(x.device)
        combine_kernel[(num_rows, cdiv(self.down.rows, 1024))](
            results, weights, out, self.down.rows, SLOTS=slots, BLOCK=1024, OVERLAP=overlap, num_warps=4, **options
        )
        return out
