"""Matrix products with packed weights on a CUDA device: preparation, tile shapes and launches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slimserve.ops.numerics import NumericsConfig
from slimserve.ops.triton.formats import TILE_FORMATS
from slimserve.ops.triton.launch import INTERPRETED, NO_FUSION, cdiv, multiprocessors
from slimserve.ops.triton.linear_kernel import embedding_kernel, linear_kernel, split_rows_kernel
from slimserve.ops.triton.relayout import TileWeight, relayout
from slimserve.ops.triton.tiles import GRID_PAIRS
from slimserve.quant.tensor import PackedTensor

SEGMENT_PROGRAMS = 1024
"""K is cut so that the programs of one narrow tile of input rows come near this number: about eight for each
multiprocessor of the devices at hand. It is a constant, not the device's count, so that bits do not move with it."""

SEGMENT_ELEMENTS = 512
"""The least part of K that a segment covers."""

LOCKS = 4096

SPLIT_TILES = 6
"""Segments run in parallel where a multiprocessor would get fewer tiles than this: a tile is two warps or so, and it
takes many more for enough loads to be under way at once."""


@dataclass(frozen=True, slots=True)
class Segments:
    """How K is cut: `count` segments of `steps` steps (the last may be shorter)."""

    steps: int
    count: int


def segments_of(weight: TileWeight) -> Segments:
    """The cut of K, a function of (N, K, format) alone."""
    return cut_segments(weight.rows, weight.steps, weight.format.step)


def cut_segments(rows: int, steps: int, step: int) -> Segments:
    """The cut of a weight of `rows` rows and `steps` steps of `step` elements."""
    tiles = cdiv(rows, NARROW.rows)
    wanted = min(cdiv(SEGMENT_PROGRAMS, tiles), max(1, steps * step // SEGMENT_ELEMENTS))
    taken = cdiv(steps, wanted)
    return Segments(taken, cdiv(steps, taken))


def split_limit(processors: int) -> int:
    """Segments run in parallel, and their sums are stored, where a product has fewer tiles than this."""
    return min(SPLIT_TILES * processors, LOCKS)


@dataclass(frozen=True, slots=True)
class Tile:
    """Weight rows and input rows of a program, which operand the weights are, warps and pipeline stages.

    twin: the input rows are two tiles, so that none is as large as the warp-group form of a product needs.
    """

    rows: int
    columns: int
    swap: bool
    warps: int
    stages: int = 2
    twin: bool = False


NARROW = Tile(64, 8, False, 2)
TILES = (NARROW, Tile(64, 16, False, 2), Tile(64, 32, False, 2), Tile(64, 64, False, 2))
"""Tiles that keep to one tensor-core instruction with the weights as its left operand."""

SWEEP = (
    Tile(64, 8, False, 2, 3),
    Tile(64, 8, False, 2, 4),
    Tile(32, 8, False, 1),
    Tile(128, 8, False, 2),
    Tile(64, 16, True, 2),
    Tile(128, 16, True, 4),
    Tile(128, 32, False, 2),
    Tile(128, 32, True, 4),
    Tile(128, 32, True, 8),
    Tile(256, 32, True, 8),
    Tile(64, 64, False, 2, 3),
    Tile(128, 64, True, 4, 2, True),
    Tile(128, 64, True, 8, 2, True),
    Tile(256, 64, True, 8, 2, True),
)
"""Other tiles that a measurement may try; a tile never changes a row's bits (tests hold it on a device)."""


def serves(name: str, tile: Tile) -> bool:
    """Whether a tile serves a format: pairs of a grid are laid out for the left operand only."""
    return not (tile.swap and TILE_FORMATS[name].code == GRID_PAIRS.value)


def choose_tile(num_rows: int) -> Tile:
    """The tile for a number of input rows."""
    return TILES[0 if num_rows <= 8 else 1 if num_rows <= 16 else 2 if num_rows <= 32 else 3]


@dataclass(slots=True)
class Prepared:
    """Input rows as the kernel reads them: bfloat16 planes [parts, M, width]; group sums [3, M, groups] for minima."""

    planes: torch.Tensor
    sums: torch.Tensor
    parts: int
    width: int


def prepare_rows(x: torch.Tensor, weight: TileWeight) -> Prepared:
    """Cut x [M, K] into bfloat16 planes that sum to it exactly, and sum it over the groups of minima."""
    fmt = weight.format
    num_rows, width = x.shape
    parts = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}[x.dtype]
    padded = weight.steps * fmt.step
    if parts == 1 and not fmt.minima:
        return Prepared(x, x, 1, width)
    sums = x
    if fmt.minima:
        sums = torch.empty((3, num_rows, padded // fmt.dot), dtype=torch.bfloat16, device=x.device)
    planes = x if parts == 1 else torch.empty((parts, num_rows, padded), dtype=torch.bfloat16, device=x.device)
    block = 1024
    split_rows_kernel[(num_rows, cdiv(padded, block))](
        x, planes, sums, num_rows, width, padded, x.stride(0),
        PARTS=parts, SUMS=fmt.minima, GROUP=fmt.dot, BLOCK=block, num_warps=4, **NO_FUSION,
    )  # fmt: skip
    return Prepared(planes, sums, parts, width if parts == 1 else padded)


@dataclass(slots=True)
class Grouping:
    """Input rows sorted by expert: per tile its expert, first place and count; `row_ids` lists output rows.

    Input row of output row r is r // divisor.
    """

    tile_group: torch.Tensor
    tile_first: torch.Tensor
    tile_count: torch.Tensor
    row_ids: torch.Tensor
    divisor: int


def launch(
    weight: TileWeight,
    segments: Segments,
    locks: torch.Tensor,
    rows: Prepared,
    num_rows: int,
    out: torch.Tensor,
    tile: Tile,
    grouping: Grouping | None = None,
) -> None:
    """Write the product into out [M, N] (rows may be strided)."""
    fmt = weight.format
    tiles_m = cdiv(num_rows, tile.columns) if grouping is None else grouping.tile_group.shape[0]
    tiles_n = cdiv(weight.rows, tile.rows)
    tiles = tiles_m * tiles_n
    split = segments.count > 1 and tiles < split_limit(multiprocessors(out.device))
    work = torch.empty(
        tiles * segments.count * tile.rows * tile.columns if split else 1, dtype=torch.float32, device=out.device
    )
    none = locks
    low = weight.low if weight.low is not None else none
    lists = (none,) * 4 if grouping is None else (
        grouping.tile_group, grouping.tile_first, grouping.tile_count, grouping.row_ids
    )  # fmt: skip
    linear_kernel[(tiles_m, segments.count if split else 1, tiles_n)](
        rows.planes, rows.sums, low, or_else(weight.high, none), or_else(weight.words, none),
        or_else(weight.table, none), or_else(weight.row_scale, none), or_else(weight.block_scale, none),
        out, work, locks, *lists,
        num_rows, weight.rows, weight.width, rows.width, out.stride(0), segments.steps, weight.steps, segments.count,
        1 if grouping is None else grouping.divisor,
        _group_size(weight.low), _group_size(weight.high), _group_size(weight.words),
        CODE=fmt.code, SCALE=fmt.scale, KD=fmt.dot, STEP=fmt.step, BIAS=fmt.bias, WORDS=fmt.words,
        GRID_ROW=fmt.grid_row, GRID_HIGH=fmt.grid_high, GRID_DELTA=fmt.grid_delta,
        W_PARTS=fmt.weight_parts, X_PARTS=rows.parts, OFFSETS=fmt.offsets, MINIMA=fmt.minima,
        ROW_SCALE=weight.row_scale is not None, BLOCK_SCALE=weight.block_scale is not None, CHAIN=fmt.chained,
        TAIL=rows.width < weight.steps * fmt.step,
        SPLIT=split, GROUPED=grouping is not None, SWAP=tile.swap, ASM=not INTERPRETED, UPCAST=INTERPRETED,
        BN=tile.rows, BM=tile.columns // 2 if tile.twin else tile.columns, TWIN=tile.twin, STAGES=tile.stages,
        num_warps=tile.warps, **NO_FUSION,
    )  # fmt: skip


def or_else(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if tensor is None else tensor


def _group_size(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0)


class TritonLinear:
    """One part on the device; see PreparedLinear."""

    def __init__(self, part: PackedTensor, device: torch.device, numerics: NumericsConfig) -> None:
        del numerics  # the activations' own dtype decides
        self.weight = relayout(part, device)
        self.segments = segments_of(self.weight)
        self.locks = torch.zeros(LOCKS, dtype=torch.int32, device=device)
        self.num_bytes = self.weight.num_bytes + self.locks.numel() * 4

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write x [T, K] times the part into out [T, N]."""
        if x.shape[0]:
            self.run(x, out, choose_tile(x.shape[0]))

    def run(self, x: torch.Tensor, out: torch.Tensor, tile: Tile) -> None:
        """The product on a given tile shape; every tile gives the same bits."""
        launch(self.weight, self.segments, self.locks, prepare_rows(x, self.weight), x.shape[0], out, tile)

    def rows(self, token_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Decode weight rows token_ids [T] (clamped to valid ids): [T, K] of `dtype`."""
        weight, fmt = self.weight, self.weight.format
        out = torch.empty((token_ids.shape[0], weight.width), dtype=dtype, device=token_ids.device)
        if token_ids.shape[0] == 0:
            return out
        block, none = 16, self.locks
        embedding_kernel[(cdiv(token_ids.shape[0], block), weight.steps)](
            token_ids, or_else(weight.low, none), or_else(weight.high, none), or_else(weight.words, none),
            or_else(weight.table, none), or_else(weight.row_scale, none), or_else(weight.block_scale, none), out,
            token_ids.shape[0], weight.rows, weight.width, weight.steps,
            CODE=fmt.code, SCALE=fmt.scale, KD=fmt.dot, STEP=fmt.step, BIAS=fmt.bias, WORDS=fmt.words,
            GRID_ROW=fmt.grid_row, GRID_HIGH=fmt.grid_high, GRID_DELTA=fmt.grid_delta, OFFSETS=fmt.offsets,
            MINIMA=fmt.minima, ROW_SCALE=weight.row_scale is not None, BLOCK_SCALE=weight.block_scale is not None,
            ASM=not INTERPRETED, BN=block, num_warps=2, **NO_FUSION,
        )  # fmt: skip
        return out
