"""What a weight takes on a device after its load-time relayout, and its product for a while, without making either."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

import torch

from slimserve.quant.formats import PLAIN_DTYPES, find_format
from slimserve.quant.tensor import PackedTensor

if TYPE_CHECKING:
    from slimserve.ops.triton.relayout import TileWeight

_ROWS = 16
_PERIOD = 4
"""Steps of K after which every layout repeats: some words hold fields of that many."""


def held_bytes(format_name: str, shape: tuple[int, ...], stored: int) -> int:
    """Bytes of a matrix [..., N, K] as the CUDA kernels hold it; `stored` where they hold it as it is.

    Found by laying out a few rows of zeros: what a row takes is a function of format and K alone.
    """
    if len(shape) < 2 or importlib.util.find_spec("triton") is None:
        return stored
    found = _bytes_of_row(format_name)
    if found is None:
        return stored
    step, short, per_period = found
    periods, rest = divmod(-(-shape[-1] // step), _PERIOD)
    return prod(shape[:-1]) * (short[rest] + per_period * periods)


def held_parts(format_name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Bytes of the large tensors in which the CUDA kernels hold a matrix [..., N, K]; empty where it stays as it is."""
    if len(shape) < 2 or importlib.util.find_spec("triton") is None:
        return ()
    parts = []
    for part in ("low", "high", "minima", "words"):
        found = _part_of_row(format_name, part)
        if found is None:
            return ()
        step, short, per_period = found
        periods, rest = divmod(-(-shape[-1] // step), _PERIOD)
        parts.append(prod(shape[:-1]) * (short[rest] + per_period * periods))
    return tuple(size for size in parts if size)


def spare_bytes(working: int) -> int:
    """How much larger than the peak of working memory the block is made that steps on a CUDA device are cut from."""
    return working // 16 + (32 << 20)


PROCESSORS = 132
"""Multiprocessors of the device to plan for, where it is not here to be asked: an H200's."""


@lru_cache(maxsize=4096)
def product_scratch(format_name: str, shape: tuple[int, ...], rows: int, *, grouped: bool = False) -> int:
    """Bytes that a product of `rows` input rows with a weight [..., N, K] takes on a CUDA device beside its result.

    Few tiles run their segments of K in parallel and store a float32 sum for each; the wide form reads input rows that
    are laid out for it (see `ops.triton.linear`). `grouped`: experts, whose tiles are those of rows sorted by expert.
    """
    if len(shape) < 2 or rows < 1 or importlib.util.find_spec("triton") is None:
        return 0
    from slimserve.ops.triton import linear
    from slimserve.ops.triton.formats import TILE_FORMATS

    fmt = find_format(format_name)
    if fmt is None or fmt.name not in TILE_FORMATS:
        return 0
    layout = TILE_FORMATS[fmt.name]
    step = layout.step
    steps = -(-shape[-1] // step)
    segments = linear.cut_segments(shape[-2], steps, step, prod(shape[:-2]))
    tile = linear.choose_tile(min(rows, 32) if grouped else rows, layout)
    columns = tile.columns // layout.columns
    tiles = -(-rows // columns) * -(-shape[-2] // tile.rows)
    split = segments > 1 and tiles < linear.split_limit(PROCESSORS, tile)
    sums = tiles * segments * tile.rows * columns * 4 if split else 0
    laid_out = 2 * step if tile.wide or layout.integer else 0
    if layout.integer:
        laid_out += 4 + (2 * 2 * 32 if layout.minima else 0)
    return sums + rows * steps * laid_out


def scratch_rows(format_name: str, shape: tuple[int, ...]) -> set[int]:
    """Numbers of input rows at which a product with a weight [..., N, K] may store most sums: for each wide tile the
    most at which it still stores any."""
    if len(shape) < 2 or importlib.util.find_spec("triton") is None:
        return set()
    from slimserve.ops.triton import linear
    from slimserve.ops.triton.formats import TILE_FORMATS

    fmt = find_format(format_name)
    if fmt is None or fmt.name not in TILE_FORMATS:
        return set()
    found = set()
    for tile in (tile for tile in linear.TILES if tile.wide):
        tiles = (linear.split_limit(PROCESSORS, tile) - 1) // -(-shape[-2] // tile.rows)
        found.add(tiles * (tile.columns // TILE_FORMATS[fmt.name].columns))
    return found - {0}


def attention_scratch(
    heads: tuple[int, int, int], context: int, *, rows: int = 1, q_len: int = 1, processors: int = PROCESSORS
) -> int:
    """Bytes that attention of `rows` rows of q_len tokens takes on a CUDA device beside its result.

    Few tiles run the segments of a context in parallel and store each one's result (see `ops.triton.attention`).
    `heads`: query heads, key heads, and elements of a head. `context`: tokens of the longest row.
    """
    if importlib.util.find_spec("triton") is None:
        return 0
    from slimserve.ops.triton import attention
    from slimserve.ops.triton.launch import cdiv, next_power

    q_heads, kv_heads, dim = heads
    segments = cdiv(context, attention.PAGE_TOKENS * attention.SEGMENT_PAGES)
    tiles = cdiv(q_len * (q_heads // kv_heads), attention.TILE_ROWS)
    size = 4 * segments * rows * q_len * q_heads * (max(16, next_power(dim)) + 2)
    split = segments > 1 and tiles * kv_heads * rows < 4 * processors and size <= attention.WORKSPACE_BYTES
    return size if split else 0


def widest_attention(heads: tuple[int, int, int], context: int, tokens: int) -> tuple[int, int]:
    """(bound on attention_scratch of one row of up to `tokens` tokens, most tokens whose segments run in parallel).

    The bound grows with the context; the sizes themselves jump by a token's share below the kernel's limit.
    """
    if importlib.util.find_spec("triton") is None:
        return 0, 0
    from slimserve.ops.triton import attention

    q_heads, kv_heads, _ = heads
    one = attention_scratch(heads, context)
    tiles = (4 * PROCESSORS - 1) // kv_heads
    length = min(tokens, context, tiles * attention.TILE_ROWS // (q_heads // kv_heads)) if one else 0
    return min(length * one, attention.WORKSPACE_BYTES), length


@lru_cache
def _bytes_of_row(format_name: str) -> tuple[int, tuple[int, ...], int] | None:
    """(elements of a step, bytes of rows of 0 .. 3 steps, bytes of every further four); None where stored as it is."""
    return _row_sizes(format_name, lambda weight: weight.num_bytes)


@lru_cache
def _part_of_row(format_name: str, part: str) -> tuple[int, tuple[int, ...], int] | None:
    """The same of one tensor of the layout."""

    def size(weight: TileWeight) -> int:
        held: torch.Tensor | None = getattr(weight, part)
        return 0 if held is None else held.numel() * held.element_size()

    return _row_sizes(format_name, size)


def _row_sizes(format_name: str, size_of: Callable[[TileWeight], int]) -> tuple[int, tuple[int, ...], int] | None:
    from slimserve.ops.triton.formats import TILE_FORMATS

    fmt = find_format(format_name)
    if fmt is None or fmt.name not in TILE_FORMATS or fmt.name in ("F32", "F16", "BF16"):
        return None
    step = TILE_FORMATS[fmt.name].step

    def held(rows: int, width: int) -> int:
        return size_of(_laid_out(fmt.name, rows, width))

    # Differences of sizes leave out what a weight takes once (a table of grid points).
    sizes = [(held(2 * _ROWS, n * step) - held(_ROWS, n * step)) // _ROWS for n in range(1, 2 * _PERIOD + 1)]
    per_period = sizes[2 * _PERIOD - 1] - sizes[_PERIOD - 1]
    return step, (sizes[_PERIOD - 1] - per_period, *sizes[: _PERIOD - 1]), per_period


@lru_cache
def _laid_out(format_name: str, rows: int, width: int) -> TileWeight:
    """A weight of zeros."""
    from slimserve.ops.triton.relayout import relayout

    fmt = find_format(format_name)
    assert fmt is not None
    columns = width if fmt.name in PLAIN_DTYPES else fmt.row_bytes(width)
    data = torch.zeros((rows, columns), dtype=PLAIN_DTYPES.get(fmt.name, torch.uint8))
    scales: dict[str, torch.Tensor] = {}
    if fmt.name == "E2M1_G16":
        scales["weight_scale"] = torch.zeros((rows, width // 16), dtype=torch.float8_e4m3fn)
    elif fmt.name == "INT4":
        scales["weight_scale"] = torch.zeros((rows, width // 128), dtype=torch.bfloat16)
    elif fmt.name == "F8_E4M3":
        scales["weight_scale"] = torch.zeros((rows, 1))
    packed = PackedTensor(fmt, (rows, width), data, "", scales)
    return relayout(packed, torch.device("cpu"))
