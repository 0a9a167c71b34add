"""One small matrix per attention head on a CUDA device: the grouped product of `linear_kernel`, heads as groups."""

from __future__ import annotations

import torch

from slimserve.ops.numerics import NumericsConfig
from slimserve.ops.triton.launch import cdiv
from slimserve.ops.triton.linear import (
    Grouping,
    Meeting,
    choose_tile,
    launch,
    prepare_rows,
    segments_of,
    warp_groups_agree,
)
from slimserve.ops.triton.relayout import relayout
from slimserve.quant.tensor import PackedTensor

_KEPT_ROWS = 256
"""Lists for up to so many tokens are made once and kept: recorded graphs read them. Longer ones are made each time."""

_LISTS: dict[tuple[int, int, int, torch.device], Grouping] = {}


def head_lists(num_tokens: int, heads: int, columns: int, device: torch.device) -> Grouping:
    """Rows (token, head) of a [T * heads] matrix, sorted by head and cut into tiles of `columns`."""
    key = (num_tokens, heads, columns, device)
    found = _LISTS.get(key)
    if found is not None:
        return found
    per_head = cdiv(num_tokens, columns)
    tile = torch.arange(heads * per_head, dtype=torch.int32, device=device)
    group, inside = tile // per_head, tile % per_head * columns
    row = torch.arange(num_tokens * heads, dtype=torch.int32, device=device)
    lists = Grouping(
        group,
        group * num_tokens + inside,
        (num_tokens - inside).clamp(max=columns),
        row % num_tokens * heads + row // num_tokens,
        1,
    )
    if num_tokens <= _KEPT_ROWS:
        _LISTS[key] = lists
    return lists


class TritonHeads:
    """All heads of a stack [heads, N, K] on the device; see PreparedHeads."""

    def __init__(self, stack: PackedTensor, device: torch.device, numerics: NumericsConfig) -> None:
        del numerics  # the activations' own dtype decides
        self.weight = relayout(stack, device)
        self.segments = segments_of(self.weight)
        self.wide = warp_groups_agree(device)
        self.meeting = Meeting.on(device)
        self.num_bytes = self.weight.num_bytes + self.meeting.num_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, heads, K] -> [T, heads, N]."""
        num_tokens, heads, width = x.shape
        out = torch.empty((num_tokens, heads, self.weight.rows), dtype=x.dtype, device=x.device)
        if num_tokens:
            tile = choose_tile(num_tokens, self.weight.format, self.wide)
            lists = head_lists(num_tokens, heads, tile.columns // self.weight.format.columns, x.device)
            rows = prepare_rows(x.reshape(num_tokens * heads, width), self.weight, tile.wide)
            flat = out.view(num_tokens * heads, self.weight.rows)
            launch(self.weight, self.segments, self.meeting, rows, num_tokens * heads, flat, tile, lists)
        return out
