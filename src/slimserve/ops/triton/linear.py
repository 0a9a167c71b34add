"""Matrix products with packed weights on a CUDA device: preparation, tile shapes and launches."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from slimserve.ops.numerics import NumericsConfig
from slimserve.ops.triton.formats import TileFormat
from slimserve.ops.triton.launch import INTERPRETED, NO_FUSION, cdiv, multiprocessors, overlap_options
from slimserve.ops.triton.linear_kernel import linear_kernel
from slimserve.ops.triton.linear_rows import embedding_kernel, group_sums_kernel, split_rows_kernel
from slimserve.ops.triton.relayout import TILE_ROWS, TileWeight, relayout
from slimserve.ops.triton.tiles import PLAIN, WORD_E2M1
from slimserve.quant.formats import BF16
from slimserve.quant.tensor import PackedTensor

SEGMENT_PROGRAMS = 3300
"""K is cut so that the programs of one narrow tile of input rows stay below this number: 25 warps for each
multiprocessor of the devices at hand, all of them at work at once. It is a constant, not the device's count, so that
bits do not move with it."""

SEGMENT_ELEMENTS = 512
"""The least part of K that a segment covers."""

ACTIVE_GROUPS = 8
"""So many matrices of a stack (experts, heads) are taken to be multiplied at a time."""

LOCKS = 8192

SPLIT_WARPS, SPLIT_WARPS_WIDE = 24, 12
"""Segments run in parallel where a multiprocessor would get fewer warps than this, in the narrow and the wide form."""


@dataclass(frozen=True, slots=True)
class Segments:
    """How K is cut: `count` segments of `steps` steps (the last may be shorter)."""

    steps: int
    count: int


def segments_of(weight: TileWeight) -> Segments:
    """The cut of K, a function of the stack's shape and format alone."""
    return cut_segments(weight.rows, weight.steps, weight.format.step, weight.groups)


def cut_segments(rows: int, steps: int, step: int, groups: int = 1) -> Segments:
    """The cut of a stack of `groups` weights of `rows` rows and `steps` steps of `step` elements."""
    tiles = cdiv(rows, TILE_ROWS) * min(groups, ACTIVE_GROUPS)
    wanted = max(1, min(SEGMENT_PROGRAMS // tiles, steps * step // SEGMENT_ELEMENTS))
    taken = cdiv(steps, wanted)
    return Segments(taken, cdiv(steps, taken))


@dataclass(frozen=True, slots=True)
class Tile:
    """Weight rows and input rows of a program, warps, and whether it is of the wide form.

    A narrow program is one warp with 16 weight rows; a wide one has four warps for every 64 weight rows, or for twice
    as many. stages: steps of weights and x under way through shared memory; 1: none, a warp waits for its loads while
    others work.
    """

    rows: int
    columns: int
    warps: int = 1
    wide: bool = False
    stages: int = 1


NARROW = Tile(16, 8)
NARROW_TILES = (NARROW, Tile(16, 16), Tile(16, 32), Tile(16, 64))
"""Tiles for up to 8, 16, 32 and more input rows where the wide form may not serve."""

WIDE_32, WIDE_64 = Tile(64, 32, 4, True, 2), Tile(64, 64, 4, True, 2)
SHORT_64, SHORT_128 = Tile(64, 64, 4, True, 3), Tile(64, 128, 4, True, 2)
"""For up to 64 and more rows where a step is of 128 elements, whose x takes half of the shared memory."""
SCALED_128 = Tile(128, 128, 8, True, 2)
"""For many rows of formats without sums to keep beside the products' own."""
TILES = (*NARROW_TILES[:2], WIDE_32, WIDE_64, SHORT_64, SHORT_128, SCALED_128)
"""All tiles that are served where the wide form may; a tile never changes a row's bits (tests hold it on a device)."""

SWEEP = (
    Tile(64, 16, 4, True, 2),
    *NARROW_TILES[2:],
    Tile(128, 64, 4, True, 2),
    Tile(128, 32, 8, True, 2),
    Tile(128, 64, 8, True, 3),
    Tile(256, 64, 16, True, 2),
)
"""Other tiles that a measurement may try."""


def choose_tile(num_rows: int, fmt: TileFormat, wide: bool = True) -> Tile:
    """The tile for a number of input rows (figures: the notebook); wide: whether the wide form may serve."""
    if not wide or num_rows <= NARROW_TILES[1].columns:
        return NARROW_TILES[0 if num_rows <= 8 else 1 if num_rows <= 16 else 2 if num_rows <= 32 else 3]
    if num_rows <= WIDE_32.columns:
        return WIDE_32
    if fmt.code == PLAIN.value:
        return WIDE_64
    if fmt.step <= 128:
        return SHORT_64 if num_rows <= SHORT_64.columns else SHORT_128
    if fmt.code == WORD_E2M1.value and num_rows > WIDE_64.columns:
        return SCALED_128
    return WIDE_64


def split_limit(processors: int, tile: Tile) -> int:
    """Segments run in parallel, and their sums are stored, where a product has fewer tiles."""
    return min((SPLIT_WARPS_WIDE if tile.wide else SPLIT_WARPS) * processors // tile.warps, LOCKS)


@dataclass(slots=True)
class Prepared:
    """Input rows as a form of the kernel reads them: bfloat16 planes [parts, M, width] and, where a format has minima,
    group sums as three planes [3, M, steps * 16]."""

    planes: torch.Tensor
    sums: torch.Tensor
    parts: int
    width: int


def prepare_rows(x: torch.Tensor, weight: TileWeight, wide: bool) -> Prepared:
    """Cut x [M, K] into bfloat16 planes that sum to it exactly, in the order of the form, and sum it over groups."""
    fmt = weight.format
    num_rows, width = x.shape
    parts = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}[x.dtype]
    # The sums of minima are a kernel of their own, whose end the product need not stand still for.
    overlap, options = overlap_options(x.device, fmt.minima > 0)
    planes = x
    if parts > 1 or wide:
        padded = weight.steps * fmt.step
        planes = torch.empty((parts, num_rows, padded), dtype=torch.bfloat16, device=x.device)
        block = 1024
        split_rows_kernel[(num_rows, cdiv(padded, block))](
            x, planes, num_rows, width, padded, x.stride(0),
            PARTS=parts, ORDER=fmt.dot if wide else 0, OVERLAP=overlap, BLOCK=block, num_warps=4, **options,
        )  # fmt: skip
    elif x.stride(0) != width:
        planes = x.contiguous()
    sums = planes
    if fmt.minima:
        sums = torch.empty((3, num_rows, weight.steps * 16), dtype=torch.bfloat16, device=x.device)
        group_sums_kernel[(cdiv(num_rows, 8), weight.steps)](
            planes, sums, num_rows, planes.shape[-1], planes.shape[-1], weight.steps,
            PARTS=parts, KD=fmt.dot, STEP=fmt.step, MINIMA=fmt.minima, WIDE=wide, OVERLAP=overlap, UPCAST=INTERPRETED,
            BM=8, num_warps=1, **options,
        )  # fmt: skip
    return Prepared(planes, sums, parts, planes.shape[-1])


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
    split = segments.count > 1 and tiles < split_limit(multiprocessors(out.device), tile)
    work = torch.empty(
        tiles * segments.count * tile.rows * tile.columns if split else 1, dtype=torch.float32, device=out.device
    )
    none = locks
    low = weight.low if weight.low is not None else none
    lists = (none,) * 4 if grouping is None else (
        grouping.tile_group, grouping.tile_first, grouping.tile_count, grouping.row_ids
    )  # fmt: skip
    overlap, options = overlap_options(out.device, fmt.minima > 0)
    linear_kernel[(tiles_m, segments.count if split else 1, tiles_n)](
        rows.planes, rows.sums, low, or_else(weight.high, none), or_else(weight.minima, none),
        or_else(weight.words, none), or_else(weight.table, none), or_else(weight.row_scale, none),
        or_else(weight.block_scale, none),
        out, work, locks, *lists,
        rows.planes.shape[-2], weight.rows, weight.tiles, weight.width, rows.width, out.stride(0), segments.steps,
        weight.steps, segments.count, 1 if grouping is None else grouping.divisor,
        _group_size(weight.low), _group_size(weight.high), _group_size(weight.words), _group_size(weight.minima),
        **_constants(weight), W_PARTS=fmt.weight_parts, X_PARTS=rows.parts, CHAIN=fmt.chained,
        TAIL=rows.width < weight.steps * fmt.step,
        SPLIT=split, GROUPED=grouping is not None, WIDE=tile.wide, OVERLAP=overlap, UPCAST=INTERPRETED,
        BN=tile.rows, BM=tile.columns, STAGES=tile.stages, num_warps=tile.warps, **options,
    )  # fmt: skip


def _constants(weight: TileWeight) -> dict[str, int | bool]:
    """What the kernels know of a weight when they are compiled."""
    fmt = weight.format
    return {
        "CODE": fmt.code, "SCALE": fmt.scale, "KD": fmt.dot, "STEP": fmt.step, "LOW_BITS": fmt.low_bits,
        "HIGH_BITS": fmt.high_bits, "BIAS": fmt.bias, "WORDS": fmt.words, "GRID_ROW": fmt.grid_row,
        "GRID_HIGH": fmt.grid_high, "GRID_DELTA": fmt.grid_delta, "OFFSETS": fmt.offsets, "MINIMA": fmt.minima,
        "ROW_SCALE": weight.row_scale is not None, "BLOCK_SCALE": weight.block_scale is not None,
        "ASM": not INTERPRETED,
    }  # fmt: skip


def or_else(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if tensor is None else tensor


def _group_size(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0)


@functools.cache
def warp_groups_agree(device: torch.device) -> bool:
    """Whether the wide form gives the narrow form's bits here: two instructions, whose rounding nobody documents.

    Asked of the device itself, on operands whose sums round at every step. Where it says no, narrow tiles serve.
    """
    if device.type != "cuda":
        return INTERPRETED
    if torch.cuda.get_device_properties(device).major != 9:
        return False
    random = torch.Generator(device).manual_seed(7)
    shape, rows = (128, 4096), 64
    values = (
        torch.randn(shape, generator=random, device=device)
        * torch.randn(shape, generator=random, device=device).mul(4).exp2()
    )
    weight = relayout(PackedTensor(BF16, shape, values.bfloat16(), "probe"), device)
    x = torch.randn((rows, shape[1]), generator=random, device=device).mul(2).bfloat16()
    locks = torch.zeros(LOCKS, dtype=torch.int32, device=device)
    results: list[torch.Tensor] = []
    for tile in (NARROW, WIDE_32, WIDE_64, SHORT_128):
        out = torch.empty((rows, shape[0]), device=device)
        launch(weight, Segments(weight.steps, 1), locks, prepare_rows(x, weight, tile.wide), rows, out, tile)
        results.append(out)
    return all(torch.equal(results[0], other) for other in results[1:])


class TritonLinear:
    """One part on the device; see PreparedLinear."""

    def __init__(self, part: PackedTensor, device: torch.device, numerics: NumericsConfig) -> None:
        del numerics  # the activations' own dtype decides
        self.weight = relayout(part, device)
        self.segments = segments_of(self.weight)
        self.wide = warp_groups_agree(device)
        self.locks = torch.zeros(LOCKS, dtype=torch.int32, device=device)
        self.num_bytes = self.weight.num_bytes + self.locks.numel() * 4

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write x [T, K] times the part into out [T, N]."""
        if x.shape[0]:
            self.run(x, out, choose_tile(x.shape[0], self.weight.format, self.wide))

    def run(self, x: torch.Tensor, out: torch.Tensor, tile: Tile) -> None:
        """The product on a given tile shape; every tile gives the same bits."""
        rows = prepare_rows(x, self.weight, tile.wide)
        launch(self.weight, self.segments, self.locks, rows, x.shape[0], out, tile)

    def rows(self, token_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Decode weight rows token_ids [T] (clamped to valid ids): [T, K] of `dtype`."""
        weight = self.weight
        out = torch.empty((token_ids.shape[0], weight.width), dtype=dtype, device=token_ids.device)
        if token_ids.shape[0] == 0:
            return out
        block, none = 16, self.locks
        embedding_kernel[(cdiv(token_ids.shape[0], block), weight.steps)](
            token_ids, or_else(weight.low, none), or_else(weight.high, none), or_else(weight.minima, none),
        or_else(weight.words, none),
            or_else(weight.table, none), or_else(weight.row_scale, none), or_else(weight.block_scale, none), out,
            token_ids.shape[0], weight.rows, weight.tiles, weight.width, weight.steps,
            **_constants(weight), BN=block, num_warps=2, **NO_FUSION,
        )  # fmt: skip
        return out
