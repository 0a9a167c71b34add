"""Matrix products with packed weights on a CUDA device: preparation, tile shapes and launches."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from slimserve.ops.numerics import NumericsConfig
from slimserve.ops.triton.formats import TileFormat
from slimserve.ops.triton.integer_kernel import integer_kernel
from slimserve.ops.triton.integer_rows import integer_embedding_kernel, integer_rows_kernel
from slimserve.ops.triton.integers import BYTES, CHUNKS
from slimserve.ops.triton.launch import INTERPRETED, NO_FUSION, cdiv, multiprocessors, overlap_options
from slimserve.ops.triton.linear_kernel import ABSENT, ANNOUNCED, HANDED, linear_kernel
from slimserve.ops.triton.linear_rows import embedding_kernel, split_rows_kernel
from slimserve.ops.triton.relayout import TILE_ROWS, TileWeight, relayout
from slimserve.ops.triton.tiles import FLOAT8, PLAIN, SIGNED_BYTE, WORD_E2M1
from slimserve.quant.formats import BF16
from slimserve.quant.tensor import PackedTensor

SEGMENT_PROGRAMS = 3300
"""K is cut so that the programs of one narrow tile of input rows stay below this number: 25 warps for each
multiprocessor of the devices at hand, all of them at work at once. It is a constant, not the device's count, so that
bits do not move with it."""

EVEN_PROGRAMS, LONGER = 3168, 1.15
"""Six warps for each of the 528 schedulers of the devices at hand. Where a few programs more would give some of them a
seventh, there are fewer segments, if none becomes longer by more than this."""

SEGMENT_ELEMENTS = 512
"""The least part of K that a segment covers."""

ACTIVE_GROUPS = 8
"""So many matrices of a stack (experts, heads) are taken to be multiplied at a time."""

LOCKS = 8192

SLOTS = 1 << 19
"""Sums of segments that a narrow product may have under way (`linear_kernel.hand_over`); one set serves a device, whose
products run one after another."""

SPLIT_WARPS, SPLIT_WARPS_WIDE = 24, 12
"""Segments run in parallel where a multiprocessor would get fewer warps than this, in the narrow and the wide form."""


def segments_of(weight: TileWeight) -> int:
    """Into how many segments K is cut, a function of the stack's shape and format alone."""
    return cut_segments(weight.rows, weight.steps, weight.format.step, weight.groups)


def cut_segments(rows: int, steps: int, step: int, groups: int = 1) -> int:
    """The same for a stack of `groups` weights of `rows` rows and `steps` steps of `step` elements."""
    tiles = cdiv(rows, TILE_ROWS) * min(groups, ACTIVE_GROUPS)

    def fewest(programs: int) -> tuple[int, int]:
        """The longest segment where programs stay below a number, and as few segments as have that length."""
        longest = cdiv(steps, max(1, min(programs // tiles, steps * step // SEGMENT_ELEMENTS)))
        return longest, cdiv(steps, longest)

    (longest, count), (longer, fewer) = fewest(SEGMENT_PROGRAMS), fewest(min(SEGMENT_PROGRAMS, EVEN_PROGRAMS))
    return fewer if groups == 1 and longer <= LONGER * longest else count


@dataclass(frozen=True, slots=True)
class Tile:
    """Weight rows and input rows of a program, warps, and whether it is of the wide form.

    A narrow program is one warp with 16 weight rows, or 32; a wide one has four warps for every 64 weight rows, or for
    twice as many. stages: steps of weights and x under way through shared memory; 1: none, a warp waits for its loads
    while others work. registers: the most a thread may take, 0 for what the assembler likes.
    """

    rows: int
    columns: int
    warps: int = 1
    wide: bool = False
    stages: int = 1
    registers: int = 0

    def __post_init__(self) -> None:
        if self.rows < 16 * self.warps:
            raise ValueError(f"{self}: a warp needs sixteen weight rows, whose bytes its threads hold whole")


NARROW = Tile(16, 8)
CAPPED = Tile(16, 8, registers=72)
"""All programs of a product are at work at once where a thread takes so few registers: up to 28 a multiprocessor."""
EVEN_REGISTERS, EVEN_WARPS = 80, 24
"""With so many registers instead no more than 24 warps fit a multiprocessor, six to a scheduler: taken where a product
has no more, since else one may hold 28 and another 20."""
NARROW_TILES = (NARROW, Tile(16, 16), Tile(16, 32), Tile(16, 64))
"""Tiles for up to 8, 16, 32 and more input rows where the wide form may not serve."""

WIDE_32, WIDE_64 = Tile(64, 32, 4, True, 2), Tile(64, 64, 4, True, 2)
STAGED_32, SHORT_64 = Tile(64, 32, 4, True, 3, 128), Tile(64, 64, 4, True, 3, 168)
"""For up to 32 rows of FP8 and Q8_0, and for more where a step is of 128 elements, whose x takes half of the shared
memory: three programs fit a multiprocessor."""
LEAN_32, LEAN_64 = Tile(64, 32, 4, True, 1, 128), Tile(64, 64, 4, True, 1, 128)
TALL_64 = Tile(128, 64, 8, True, 1, 128)
"""For weights whose dots join (`linear_kernel.walk_joined`): without copies under way more programs fit a
multiprocessor, and those that lie on one find x in its first-level cache. Tall ones share x: faster where rows are
many."""
TALL_ROWS = 256
INTEGER_16 = Tile(32, 16, registers=128)
"""For 5 to 8 input rows of formats with minima: what they add to a step is paid for twice as many weight rows."""
INTEGER_32 = Tile(64, 32, 4, True, 1, 128)
INTEGER_64, INTEGER_STAGED_64, INTEGER_128 = Tile(64, 64, 4, True), Tile(64, 64, 4, True, 2), Tile(64, 128, 4, True, 2)
FLOAT_TILES = (*NARROW_TILES[:2], CAPPED, WIDE_32, STAGED_32, LEAN_32, WIDE_64, SHORT_64, LEAN_64, TALL_64)
INTEGER_TILES = (CAPPED, NARROW_TILES[1], INTEGER_16, INTEGER_32, INTEGER_64, INTEGER_STAGED_64, INTEGER_128)
TILES = tuple(dict.fromkeys((*FLOAT_TILES, *INTEGER_TILES)))
"""All tiles that are served where the wide form may; a tile never changes a row's bits (tests hold it on a device)."""

EARLY = (WORD_E2M1.value, FLOAT8.value, SIGNED_BYTE.value)
"""Codes multiplied in bfloat16 whose narrow products were measured to gain from fewer registers and early launches."""

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
    """The tile for a number of input rows (figures: the notebook); wide: whether the wide form of `linear_kernel` may
    serve (integer sums are exact in either form)."""
    columns = num_rows * fmt.columns
    if fmt.integer:
        if columns <= NARROW_TILES[1].columns:
            return CAPPED if columns <= CAPPED.columns else INTEGER_16 if fmt.minima else NARROW_TILES[1]
        if columns <= INTEGER_32.columns:
            return INTEGER_32
        if columns > INTEGER_64.columns:
            return INTEGER_128
        return INTEGER_STAGED_64 if fmt.code == BYTES.value and fmt.order == CHUNKS.value else INTEGER_64
    if columns <= CAPPED.columns and fmt.code in EARLY:
        return CAPPED
    if not wide or columns <= NARROW_TILES[1].columns:
        return NARROW_TILES[0 if columns <= 8 else 1 if columns <= 16 else 2 if columns <= 32 else 3]
    few = columns <= WIDE_32.columns
    if fmt.joined:
        return LEAN_32 if few else LEAN_64 if columns < TALL_ROWS else TALL_64
    if few:
        return STAGED_32 if fmt.code in (FLOAT8.value, SIGNED_BYTE.value) else WIDE_32
    return SHORT_64 if fmt.step <= 128 and fmt.code != PLAIN.value else WIDE_64


def split_limit(processors: int, tile: Tile) -> int:
    """Segments run in parallel, and their sums are stored, where a product has fewer tiles."""
    return min((SPLIT_WARPS_WIDE if tile.wide else SPLIT_WARPS) * processors // tile.warps, LOCKS)


def most_registers(tile: Tile, programs: int, processors: int) -> int:
    """The most registers that a thread of a product of `programs` programs may take, 0 for what the assembler likes."""
    return EVEN_REGISTERS if tile == CAPPED and programs <= EVEN_WARPS * processors else tile.registers


def by_segment(tile: Tile) -> bool:
    """Whether programs are numbered by their segment first: measured to be faster where input rows are few, but slower
    in tiles of three stages."""
    return tile.columns <= INTEGER_32.columns and tile.stages < 3


def taken_at_once(others: int, fmt: TileFormat, tile: Tile) -> tuple[int, bool]:
    """Handed-over sums of `others` segments that are asked for at a time, and whether that is all of them: mostly, but
    few where sums would raise the registers of the whole kernel. Each number is a kernel of its own."""
    most = 17 if tile == CAPPED else 9 if tile.registers or fmt.integer else 4 if tile.columns <= 8 else 2
    return (others, True) if others <= most else (min(most, 9), False)


def stored_at_once(tile: Tile, columns: int) -> int:
    """Stored sums of segments that are asked for at a time."""
    return 8 if columns <= 8 else 4 if columns <= 16 else 3 if tile.registers >= 160 else 2


@dataclass(slots=True)
class Prepared:
    """Input rows as a form of a kernel reads them: bfloat16 planes [parts, M, width], or int8 [2 M, width] with scales
    [steps, M] and, where a format has minima, two digits of group sums [2, 2 M, steps, 32]; for the narrow form as many
    bytes for 2 M rounded up to eights, in the order that `integer_rows_kernel` says."""

    planes: torch.Tensor
    parts: int
    width: int
    scale: torch.Tensor | None = None
    sums: torch.Tensor | None = None


def _prepare_integers(x: torch.Tensor, weight: TileWeight, wide: bool, minima: int, table: bool) -> Prepared:
    fmt = weight.format
    num_rows, width = x.shape
    columns = 2 * num_rows if wide else cdiv(2 * num_rows, 8) * 8
    planes = torch.empty((columns, width), dtype=torch.int8, device=x.device)
    scale = torch.empty((weight.steps, num_rows), dtype=torch.float32, device=x.device)
    sums = None
    if minima:
        sums = torch.empty((2, columns, weight.steps, 32), dtype=torch.int8, device=x.device)
    overlap, options = overlap_options(x.device, _overlap_pays(fmt, wide))
    integer_rows_kernel[(num_rows, weight.steps)](
        x, planes, scale, or_else(sums, planes), 2 * num_rows, width, weight.steps, x.stride(0),
        ORDER=fmt.order, MINIMA=minima, WIDE=wide, OVERLAP=overlap,
        TABLE=table and not (wide or INTERPRETED), num_warps=1, **options,
    )  # fmt: skip
    return Prepared(planes, 2, width, scale, sums)


def prepare_rows(x: torch.Tensor, weight: TileWeight, wide: bool, readers: Sequence[TileWeight] = ()) -> Prepared:
    """x [M, K] as the kernel of the weight and of `readers` reads it: in bfloat16 planes that sum to it exactly, or as
    integers, with sums for groups where one of them has minima."""
    fmt = weight.format
    if fmt.integer:
        formats = [reader.format for reader in (weight, *readers)]
        minima, table = max(each.minima for each in formats), any(each.grid for each in formats)
        return _prepare_integers(x, weight, wide, minima, table)
    num_rows, width = x.shape
    parts = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}[x.dtype]
    overlap, options = overlap_options(x.device, wide)
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
    return Prepared(planes, parts, planes.shape[-1])


def prepare_shared(x: torch.Tensor, weights: Sequence[TileWeight], tiles: Sequence[Tile]) -> list[Prepared]:
    """x [M, K] as each of several weights of the same input reads it, made once for those that read it alike."""
    keys = [
        (w.format.integer, w.format.order, w.format.dot, w.steps * w.format.step, tile.wide)
        for w, tile in zip(weights, tiles, strict=True)
    ]
    found: dict[tuple[bool, int, int, int, bool], Prepared] = {}
    for key, weight, tile in zip(keys, weights, tiles, strict=True):
        if key not in found:
            readers = [w for k, w in zip(keys, weights, strict=True) if k == key]
            found[key] = prepare_rows(x, weight, tile.wide, readers)
    return [found[key] for key in keys]


def _overlap_pays(fmt: TileFormat, wide: bool, grouped: bool = False) -> bool:
    """Whether launches that begin before the kernels ahead of them end are faster: measured of formats with figures in
    the notebook; of wide products, the others are taken to be like those."""
    if grouped:
        return fmt.code == WORD_E2M1.value or (fmt.integer and not fmt.grid)
    if wide:
        return not fmt.grid
    return fmt.integer or fmt.code in EARLY


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where segments of a product meet that run in parallel: counters, and places for sums that are handed over."""

    locks: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def on(cls, device: torch.device) -> Meeting:
        """Counters of their own, places that all products of a device share."""
        locks = torch.zeros(LOCKS, dtype=torch.int32, device=device)
        slots = _SLOTS.get(locks.device)
        if slots is None:
            slots = torch.full((SLOTS,), ABSENT.value, dtype=torch.int32, device=device)
            _SLOTS[locks.device] = slots
        return cls(locks, slots)

    @property
    def num_bytes(self) -> int:
        """Bytes of the counters."""
        return self.locks.numel() * 4


_SLOTS: weakref.WeakValueDictionary[torch.device, torch.Tensor] = weakref.WeakValueDictionary()


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
    segments: int,
    meeting: Meeting,
    rows: Prepared,
    num_rows: int,
    out: torch.Tensor,
    tile: Tile,
    grouping: Grouping | None = None,
) -> None:
    """Write the product, K cut into `segments`, into out [M, N] (rows may be strided)."""
    fmt = weight.format
    # A program without a step would not wait for the kernels ahead of it.
    assert segments <= weight.steps
    columns = tile.columns // fmt.columns
    tiles_m = cdiv(num_rows, columns) if grouping is None else grouping.tile_group.shape[0]
    tiles_n = cdiv(weight.rows, tile.rows)
    tiles = tiles_m * tiles_n
    split = segments > 1 and tiles < split_limit(multiprocessors(out.device), tile)
    size = tiles * segments * tile.rows * columns if split else 1
    handed = split and not tile.wide and size <= SLOTS
    work = meeting.slots if handed else torch.empty(size, dtype=torch.float32, device=out.device)
    none = locks = meeting.locks
    low = weight.low if weight.low is not None else none
    lists = (none,) * 4 if grouping is None else (
        grouping.tile_group, grouping.tile_first, grouping.tile_count, grouping.row_ids
    )  # fmt: skip
    divisor = 1 if grouping is None else grouping.divisor
    groups = tuple(_group_size(plane) for plane in (weight.low, weight.high, weight.words, weight.minima))
    parts, first = segments if split else 1, by_segment(tile)
    grid = (tiles_m, tiles_n, parts) if first else (tiles_m, parts, tiles_n)
    taken, exact = taken_at_once(segments - 1, fmt, tile) if handed else (stored_at_once(tile, columns), False)
    meeting_kind = (HANDED if handed else ANNOUNCED).value if split else 0
    form = {
        "SPLIT": meeting_kind, "GROUPED": grouping is not None, "WIDE": tile.wide, "BN": tile.rows, "BM": tile.columns,
        "STAGES": tile.stages, "BY_SEGMENT": first, "TAKEN": taken, "EXACT": exact, "num_warps": tile.warps,
    }  # fmt: skip
    pays = _overlap_pays(fmt, tile.wide, grouping is not None)
    registers = most_registers(tile, prod(grid), multiprocessors(out.device))
    if registers:
        form["maxnreg"] = registers
    if fmt.integer:
        assert rows.scale is not None
        overlap, options = overlap_options(out.device, pays)
        integer_kernel[grid](
            rows.planes, rows.scale, or_else(rows.sums, none), low, or_else(weight.high, none),
            or_else(weight.minima, none), weight.words, or_else(weight.table, none), out, work, locks, *lists,
            2 * rows.scale.shape[-1], weight.rows, weight.tiles, out.stride(0), weight.steps,
            segments, divisor, *groups, **_integer_constants(fmt), OVERLAP=overlap, ASM=not INTERPRETED,
            ALIGNED=not tile.wide or weight.rows % 4 == 0, **form, **options,
        )  # fmt: skip
        return
    overlap, options = overlap_options(out.device, pays)
    joined = tile.wide and tile.stages == 1 and rows.parts == 1 and fmt.joined
    linear_kernel[grid](
        rows.planes, low, or_else(weight.high, none),
        or_else(weight.words, none), or_else(weight.table, none), or_else(weight.row_scale, none),
        or_else(weight.block_scale, none),
        out, work, locks, *lists,
        rows.planes.shape[-2], weight.rows, weight.tiles, weight.width, rows.width, out.stride(0),
        weight.steps, segments, divisor, *groups[:3],
        **_constants(weight), W_PARTS=fmt.weight_parts, X_PARTS=rows.parts, CHAIN=fmt.chained,
        TAIL=rows.width < weight.steps * fmt.step, OVERLAP=overlap, UPCAST=INTERPRETED,
        JOINED=joined, WHOLE=joined and weight.width % fmt.step == 0, **form, **options,
    )  # fmt: skip


def _integer_constants(fmt: TileFormat) -> dict[str, int]:
    """What the integer kernels know of a format when they are compiled."""
    return {
        "CODE": fmt.code, "SCALE": fmt.scale, "ORDER": fmt.order, "LOW_BITS": fmt.low_bits, "LOW_AT": fmt.low_at,
        "HIGH_BITS": fmt.high_bits, "HIGH_AT": fmt.high_at, "WORDS": fmt.words, "MINIMA": fmt.minima,
    }  # fmt: skip


def _constants(weight: TileWeight) -> dict[str, int | bool]:
    """What the kernels know of a weight when they are compiled."""
    fmt = weight.format
    return {
        "CODE": fmt.code, "SCALE": fmt.scale, "KD": fmt.dot, "STEP": fmt.step, "LOW_BITS": fmt.low_bits,
        "HIGH_BITS": fmt.high_bits, "BIAS": fmt.bias, "WORDS": fmt.words, "GRID_ROW": fmt.grid_row,
        "GRID_HIGH": fmt.grid_high, "GRID_DELTA": fmt.grid_delta, "OFFSETS": fmt.offsets,
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
    meeting = Meeting.on(device)
    results: list[torch.Tensor] = []
    for tile in (NARROW, WIDE_32, WIDE_64, TALL_64):
        out = torch.empty((rows, shape[0]), device=device)
        launch(weight, 1, meeting, prepare_rows(x, weight, tile.wide), rows, out, tile)
        results.append(out)
    return all(torch.equal(results[0], other) for other in results[1:])


class TritonLinear:
    """One part on the device; see PreparedLinear."""

    def __init__(self, part: PackedTensor, device: torch.device, numerics: NumericsConfig) -> None:
        del numerics  # the activations' own dtype decides
        self.weight = relayout(part, device)
        self.segments = segments_of(self.weight)
        self.wide = warp_groups_agree(device)
        self.meeting = Meeting.on(device)
        self.num_bytes = self.weight.num_bytes + self.meeting.num_bytes

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write x [T, K] times the part into out [T, N]."""
        if x.shape[0]:
            self.run(x, out, choose_tile(x.shape[0], self.weight.format, self.wide))

    @classmethod
    def fuse(cls, parts: Sequence[TritonLinear], bias: torch.Tensor | None) -> TritonProducts | None:
        """All parts of one weight in one call, where there is more than one: input rows are prepared once."""
        return TritonProducts(parts, bias) if len(parts) > 1 else None

    def run(self, x: torch.Tensor, out: torch.Tensor, tile: Tile) -> None:
        """The product on a given tile shape; every tile gives the same bits."""
        rows = prepare_rows(x, self.weight, tile.wide)
        launch(self.weight, self.segments, self.meeting, rows, x.shape[0], out, tile)

    def rows(self, token_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Decode weight rows token_ids [T] (clamped to valid ids): [T, K] of `dtype`."""
        weight = self.weight
        out = torch.empty((token_ids.shape[0], weight.width), dtype=dtype, device=token_ids.device)
        if token_ids.shape[0] == 0:
            return out
        block, none = 16, self.meeting.locks
        if weight.format.integer:
            integer_embedding_kernel[(cdiv(token_ids.shape[0], block), weight.steps)](
                token_ids, weight.low, or_else(weight.high, none), or_else(weight.minima, none), weight.words,
                or_else(weight.table, none), out, token_ids.shape[0], weight.rows, weight.tiles, weight.width,
                weight.steps, **_integer_constants(weight.format), BN=block, num_warps=4, **NO_FUSION,
            )  # fmt: skip
            return out
        embedding_kernel[(cdiv(token_ids.shape[0], block), weight.steps)](
            token_ids, or_else(weight.low, none), or_else(weight.high, none), or_else(weight.words, none),
            or_else(weight.table, none), or_else(weight.row_scale, none), or_else(weight.block_scale, none), out,
            token_ids.shape[0], weight.rows, weight.tiles, weight.width, weight.steps,
            **_constants(weight), BN=block, num_warps=2, **NO_FUSION,
        )  # fmt: skip
        return out


class TritonProducts:
    """Several parts that multiply the same rows; see FusedProduct."""

    def __init__(self, parts: Sequence[TritonLinear], bias: torch.Tensor | None) -> None:
        self.parts = tuple(parts)
        self.bias = bias

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write x [T, K] times all parts, plus the bias, into out [T, sum N_i]."""
        if x.shape[0] == 0:
            return
        weights = [part.weight for part in self.parts]
        tiles = [choose_tile(x.shape[0], part.weight.format, part.wide) for part in self.parts]
        start = 0
        for part, tile, rows in zip(self.parts, tiles, prepare_shared(x, weights, tiles), strict=True):
            stop = start + part.weight.rows
            launch(part.weight, part.segments, part.meeting, rows, x.shape[0], out[:, start:stop], tile)
            start = stop
        if self.bias is not None:
            out += self.bias
