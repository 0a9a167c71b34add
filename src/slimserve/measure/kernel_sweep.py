"""Tile shapes, pipeline depths and cuts of K of the device matrix product, timed side by side.

    python -m slimserve.measure.kernel_sweep [--formats NVFP4,Q4_K] [--shapes "27B gate,27B down"] [--seconds 110]
        [--rows 1,4] [--programs 1200,3300]

Every variant is compiled first, by processes side by side (the compiler keeps its results on disk). Then each is
timed as `measure.kernels` does, and its bits are compared with the narrow tile's: a row's bits may depend on the cut of
K, which is a function of the shape, and on nothing else. A line is a variant; `*` marks the fastest of its rows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from slimserve.measure.kernels import (
    FORMATS,
    ROTATED_BYTES,
    SHAPES,
    copy_bandwidth,
    random_packed,
    relative_error,
    time_graph,
)
from slimserve.ops.numerics import NumericsConfig
from slimserve.ops.triton import launch as launching
from slimserve.ops.triton import linear
from slimserve.ops.triton.formats import TILE_FORMATS
from slimserve.ops.triton.linear import Tile, TritonLinear

TILES: dict[int, tuple[Tile, ...]] = {
    1: (linear.CAPPED, linear.NARROW, Tile(32, 8, registers=128)),
    16: (Tile(16, 16), Tile(16, 16, registers=80), Tile(64, 16, 4, True, 2)),
    32: (linear.WIDE_32, linear.STAGED_32, linear.LEAN_32),
    64: (linear.WIDE_64, linear.SHORT_64, linear.LEAN_64, linear.TALL_64),
    512: (linear.SHORT_64, linear.LEAN_64, linear.TALL_64, Tile(64, 128, 4, True, 2), Tile(128, 128, 8, True, 2)),
}
"""Tiles by the number of input rows that they are timed with."""

INTEGER_TILES: dict[int, tuple[Tile, ...]] = {
    1: (linear.CAPPED, linear.NARROW, Tile(32, 8, registers=128)),
    4: (linear.CAPPED, Tile(32, 8, registers=128)),
    8: (linear.NARROW_TILES[1], linear.INTEGER_16, Tile(32, 16, registers=168), Tile(16, 16, registers=80)),
    16: (linear.INTEGER_32, Tile(64, 32, 4, True, 2), Tile(16, 32)),
    64: (linear.INTEGER_128, Tile(64, 128, 4, True), linear.INTEGER_STAGED_64),
    512: (linear.INTEGER_128, Tile(64, 128, 4, True), Tile(128, 128, 8, True, 2)),
}
"""The same for products in integers, whose columns are two to a row."""


def tiles_of(name: str) -> dict[int, tuple[Tile, ...]]:
    """Tiles for a format, by the number of input rows."""
    return INTEGER_TILES if TILE_FORMATS[name].integer else TILES


PROGRAMS = (2400, 3300, 4400)
"""Cuts of K: `linear.SEGMENT_PROGRAMS`."""

REPLAYS = 7


@dataclass(frozen=True, slots=True)
class Timing:
    """One variant: median microseconds, weight bytes per second as a share of the copy, whether the bits are those of
    the narrow tile over all rows, and that tile's relative error."""

    format: str
    shape: str
    rows: int
    tile: str
    programs: int
    microseconds: float
    share_of_copy: float
    same_bits: bool
    error: float
    failure: str = ""


def cuts_of(name: str, shapes: Iterable[str] = SHAPES, programs: Sequence[int] = ()) -> list[int]:
    """Segments of K of a format at these shapes and cuts (by default what is served): each number has a kernel of its
    own (`linear.taken_at_once`)."""
    step = TILE_FORMATS[name].step
    found = {
        cut_for(SHAPES[what][0], -(-SHAPES[what][1] // step), step, number)
        for what in shapes
        for number in programs or [linear.SEGMENT_PROGRAMS]
    }
    return sorted(found - {1})


CROWD = (17408, 5120)
"""A weight that has more programs, however it is cut, than lie evenly on a device (`linear.most_registers`)."""


def compile_crowded(name: str, rows: int, cuts: Sequence[int]) -> None:
    """Compile the narrowest form as it is launched with many programs."""
    device = torch.device("cuda")
    served = TritonLinear(random_packed(name, CROWD, device), device, NumericsConfig())
    x = torch.randn(rows, CROWD[1], device=device).bfloat16()
    for segments in cuts:
        served.segments = segments
        served.run(x, torch.empty(rows, CROWD[0], device=device), linear.CAPPED)


def compile_tiles(name: str, rows: int, cuts: Sequence[int]) -> None:
    """Compile what the sweep runs of one format and number of rows, on small weights."""
    device = torch.device("cuda")
    if linear.CAPPED in tiles_of(name)[rows]:
        compile_crowded(name, rows, cuts)
    served = TritonLinear(random_packed(name, (1024, 8192), device), device, NumericsConfig())
    x = torch.randn(rows, 8192, device=device).bfloat16()
    launching.OVERLAP = True
    tiles = tiles_of(name)
    for segments in cuts:
        served.segments = segments
        for tile in tiles[rows]:
            try:
                served.run(x, torch.empty(rows, 1024, device=device), tile)
            except Exception as error:  # a tile that does not compile is reported where it is timed
                print(f"{name} {tile}: {str(error)[:200]}", file=sys.stderr)
        launching.OVERLAP = False
        served.run(x, torch.empty(rows, 1024, device=device), tiles[rows][0])
        launching.OVERLAP = True
    if rows == min(tiles):
        # What the expected bits come from where so many narrow tiles need no segments in parallel.
        served.segments = 1
        served.run(x, torch.empty(rows, 1024, device=device), linear.NARROW)
    torch.cuda.synchronize()


def compile_all(
    formats: Sequence[str], chosen: Sequence[int], shapes: Sequence[str], programs: Sequence[int], deadline: float
) -> list[str]:
    """Compile in one process per format and number of rows, side by side: the formats of which none failed."""
    command = [sys.executable, "-m", "slimserve.measure.kernel_sweep", "--shapes", ",".join(shapes)]
    command += ["--programs", ",".join(map(str, programs)), "--compile"]
    workers = {
        (name, rows): subprocess.Popen([*command, f"{name}:{rows}"])
        for name in formats
        for rows in reversed(tiles_of(name))
        if rows in chosen
    }
    failed: set[str] = set()
    for (name, rows), worker in workers.items():
        try:
            if worker.wait(max(1.0, deadline - time.monotonic())):
                failed.add(name)
                print(f"{name}: tiles for {rows} rows end with {worker.returncode}", flush=True)
        except subprocess.TimeoutExpired:
            worker.kill()
            print(f"{name}: tiles for {rows} rows were not compiled in time", flush=True)
    return [name for name in formats if name not in failed]


def copies_of(served: TritonLinear, count: int) -> list[TritonLinear]:
    """The same weight at `count` places in memory."""
    copies = [served]
    for _ in range(count - 1):
        clone = object.__new__(TritonLinear)
        weight = served.weight
        planes = (weight.low, weight.high, weight.minima, weight.words)
        low, high, minima, words = (None if t is None else t.clone() for t in planes)
        clone.weight = replace(weight, low=low, high=high, minima=minima, words=words)
        clone.segments, clone.meeting, clone.num_bytes = served.segments, served.meeting, served.num_bytes
        clone.wide = served.wide
        copies.append(clone)
    return copies


def cut_for(rows: int, steps: int, step: int, programs: int) -> int:
    """The cut of K that aims at a number of programs."""
    kept = linear.SEGMENT_PROGRAMS
    linear.SEGMENT_PROGRAMS = programs
    try:
        return linear.cut_segments(rows, steps, step)
    finally:
        linear.SEGMENT_PROGRAMS = kept


def sweep_shape(
    what: str, name: str, bandwidth: float, chosen: Sequence[int], cuts: Sequence[int], deadline: float
) -> Iterator[Timing]:
    """Every variant of one weight for the chosen numbers of rows and cuts of K, until the deadline."""
    device, shape = torch.device("cuda"), SHAPES[what]
    packed = random_packed(name, shape, device)
    copies = copies_of(TritonLinear(packed, device, NumericsConfig()), max(2, -(-ROTATED_BYTES // packed.num_bytes)))
    tiles = {rows: found for rows, found in tiles_of(name).items() if rows in chosen}
    if not tiles:
        return
    inputs = torch.randn(max(tiles), shape[1], device=device).bfloat16()
    for programs in cuts:
        weight = copies[0].weight
        segments = cut_for(weight.rows, weight.steps, weight.format.step, programs)
        for copy in copies:
            copy.segments = segments
        expected = torch.empty(len(inputs), shape[0], device=device)
        copies[0].run(inputs, expected, linear.NARROW)
        error = relative_error(expected, inputs, packed)
        for rows in tiles:
            for tile, overlap in (*((tile, True) for tile in tiles[rows]), (tiles[rows][0], False)):
                if time.monotonic() > deadline:
                    return
                label = short(tile) + ("" if overlap else " alone")
                try:
                    launching.OVERLAP = overlap
                    timing = _timed(packed.num_bytes / bandwidth, copies, inputs[:rows], tile, expected[:rows])
                    yield Timing(name, what, rows, label, programs, *timing, error)
                except Exception as failure:  # one broken variant must not cost the others their measurement
                    yield Timing(name, what, rows, label, programs, 0.0, 0.0, False, error, str(failure)[:200])
                finally:
                    launching.OVERLAP = True


def _timed(
    ideal_seconds: float, copies: Sequence[TritonLinear], x: torch.Tensor, tile: Tile, expected: torch.Tensor
) -> tuple[float, float, bool]:
    """Microseconds, share of the copy's speed, and whether the bits are the expected ones."""
    out = torch.full_like(expected, torch.nan)
    seconds, _ = time_graph([lambda copy=copy: copy.run(x, out, tile) for copy in copies], REPLAYS)  # type: ignore[misc]
    return round(seconds * 1e6, 2), round(ideal_seconds / seconds, 4), torch.equal(out, expected)


def short(tile: Tile) -> str:
    """A tile in few characters: weight rows x input rows, w(ide), warps, stages."""
    return f"{tile.rows}x{tile.columns}{'w' if tile.wide else ''} w{tile.warps} p{tile.stages} r{tile.registers}"


def show(found: Sequence[Timing], programs: Sequence[int]) -> None:
    """A compact table: per format, shape and rows the variants, times for each cut of K side by side."""
    for key in dict.fromkeys((t.format, t.shape, t.rows) for t in found):
        mine = [t for t in found if (t.format, t.shape, t.rows) == key]
        best = min((t.microseconds for t in mine if t.microseconds), default=0.0)
        cuts = "/".join(str(p) for p in programs)
        print(f"{key[0]} {key[1]} M={key[2]} (us, % of copy; cuts {cuts}; error {mine[0].error:.1e})")
        for tile in dict.fromkeys(t.tile for t in mine):
            cells = []
            for t in (t for t in mine if t.tile == tile):
                mark = ("*" if t.microseconds == best else "") + ("" if t.same_bits else "!")
                cells.append(
                    f"{t.microseconds:6.1f} {100 * t.share_of_copy:4.1f}{mark}" if not t.failure else t.failure
                )
            print(f"  {tile:16s} " + " | ".join(cells))
    sys.stdout.flush()


def summarize(found: Sequence[Timing], cuts: Sequence[int]) -> None:
    """The fastest variant of every format, shape and number of rows, for each cut."""
    print("fastest (tile us %), for cuts " + "/".join(str(programs) for programs in cuts))
    for key in dict.fromkeys((t.format, t.shape, t.rows) for t in found):
        cells = []
        for programs in cuts:
            mine = [t for t in found if (t.format, t.shape, t.rows, t.programs) == (*key, programs) and t.microseconds]
            if mine:
                best = min(mine, key=lambda t: t.microseconds)
                cells.append(f"{best.tile} {best.microseconds:.1f} {100 * best.share_of_copy:.0f}%")
        print(f"{key[0]} {key[1]} M={key[2]}: " + " | ".join(cells))


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, time and print; writes every timing as JSON where --out is given."""
    parser = argparse.ArgumentParser(prog="slimserve.measure.kernel_sweep", description=__doc__)
    parser.add_argument("--formats", default=",".join(name for name in FORMATS if name != "BF16"))
    parser.add_argument("--shapes", default="27B gate,27B down")
    numbers: Callable[[str], list[int]] = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    every = sorted({*TILES, *INTEGER_TILES})
    parser.add_argument("--rows", type=numbers, default=every, help="numbers of input rows")
    parser.add_argument("--programs", type=numbers, default=list(PROGRAMS), help="cuts of K")
    parser.add_argument("--seconds", type=float, default=100.0, help="start nothing new after so many seconds")
    parser.add_argument("--compile", metavar="FORMAT:ROWS", help="only compile these tiles")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if not set(options.rows) <= set(every):
        parser.error(f"--rows: there are tiles for {', '.join(map(str, every))} rows")
    shapes = options.shapes.split(",")
    if not set(shapes) <= set(SHAPES):
        parser.error(f"--shapes: there are {', '.join(SHAPES)}")
    if not torch.cuda.is_available():
        print("No CUDA device: the sweep needs one.", file=sys.stderr)
        return 3
    if options.compile:
        name, rows = options.compile.split(":")
        compile_tiles(name, int(rows), cuts_of(name, shapes, options.programs))
        return 0
    begun = time.monotonic()
    formats = [name for name in options.formats.split(",") if name]
    formats = compile_all(formats, options.rows, shapes, options.programs, begun + 0.6 * options.seconds)
    bandwidth = copy_bandwidth(torch.device("cuda"))
    print(f"compiled in {time.monotonic() - begun:.0f} s; copy {bandwidth / 1e9:.0f} GB/s", flush=True)
    found: list[Timing] = []
    for what in shapes:
        for name in formats:
            one = list(sweep_shape(what, name, bandwidth, options.rows, options.programs, begun + options.seconds))
            show(one, options.programs)
            found += one
            torch.cuda.empty_cache()
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(timing) for timing in found], indent=0), encoding="utf-8")
    summarize(found, options.programs)
    different = [t for t in found if not t.same_bits and not t.failure]
    print(f"{len(found)} variants, {len(different)} with other bits, {time.monotonic() - begun:.0f} s")
    return 1 if different else 0


if __name__ == "__main__":
    raise SystemExit(main())
