"""The table of the device kernels in one run of known length: compile side by side, then time, most important first.

    python -m slimserve.measure.kernel_table [--seconds 420] [--formats NVFP4,Q4_K] [--out FILE]

Every format's kernels are compiled first, by processes side by side (the compiler keeps its results on disk). Then the
weight stream of each format is timed at every shape and number of rows, and routed experts, in the order of `plan`;
nothing new is started after --seconds. Every timed output is checked against float64 on decoded weights, and whether
rows of a small product have the bits of the same rows of a large one. Exit status 1 says that a check failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from slimserve.measure.kernel_sweep import CROWD, copies_of, cuts_of
from slimserve.measure.kernels import (
    FORMATS,
    ROTATED_BYTES,
    ROWS,
    SHAPES,
    Figure,
    copy_bandwidth,
    measure_experts,
    random_packed,
    relative_error,
    time_graph,
)
from slimserve.ops.numerics import NumericsConfig
from slimserve.ops.triton.linear import TritonLinear

FIRST_SHAPES = ("27B gate", "27B down")
EXPERT_PAIRS = ("NVFP4+NVFP4", "IQ2_XXS+Q2_K")
EXPERT_ROWS = (1, 4, 16, 64)
ERROR_BOUND = 4e-3
"""Relative error of a product with bfloat16 results; experts round twice."""

BARS = {"NVFP4": 0.65, "F8_E4M3": 0.65, "Q8_0": 0.65, "Q4_K": 0.65, "Q6_K": 0.65, "Q2_K": 0.5, "IQ2_XXS": 0.4}
"""Share of the copy bandwidth asked for at 1 and 4 rows of matrices of 20 MB and more."""

MOST_AT_64 = 1.6
"""Time at 64 rows over the time at one row."""

Case = tuple[str, str]


def plan(formats: Sequence[str], experts: Sequence[str]) -> list[Case]:
    """(what, format) in the order of measurement: large square shapes of every format, experts, the other shapes."""
    first = [(what, name) for name in formats for what in FIRST_SHAPES]
    rest = [(what, name) for what in SHAPES if what not in (*FIRST_SHAPES, "expert") for name in formats]
    return first + [("experts", pair) for pair in experts] + rest


def compile_one(case: str) -> None:
    """Compile what the table runs of a format, or of a pair of experts' formats, on small weights."""
    device = torch.device("cuda")
    if "+" in case:
        gate, _, down = case.partition("+")
        measure_experts(gate, down, EXPERT_ROWS, 1.0, experts=16)
        return
    # Programs that lie evenly and more of them (`linear.most_registers`), and so many that K is not cut.
    for shape in ((1024, 8192), CROWD, (3 * CROWD[0], 512)):
        served = TritonLinear(random_packed(case, shape, device), device, NumericsConfig())
        # Segments in parallel and one after the other.
        for segments in cuts_of(case) if shape[1] > 512 else [served.segments]:
            served.segments = segments
            for rows in ROWS:
                x = torch.randn(rows, shape[1], device=device).bfloat16()
                served(x, torch.empty(rows, shape[0], dtype=torch.bfloat16, device=device))
    torch.cuda.synchronize()


def compile_all(cases: Sequence[str], deadline: float) -> list[str]:
    """Compile in one process per case, side by side: the cases of which none failed."""
    command = [sys.executable, "-m", "slimserve.measure.kernel_table", "--compile"]
    workers = {case: subprocess.Popen([*command, case]) for case in cases}
    good: list[str] = []
    for case, worker in workers.items():
        try:
            if worker.wait(max(1.0, deadline - time.monotonic())) == 0:
                good.append(case)
            else:
                print(f"{case}: does not compile", flush=True)
        except subprocess.TimeoutExpired:
            worker.kill()
            print(f"{case}: not compiled in time", flush=True)
    return good


def measure_linear(what: str, name: str, bandwidth: float, deadline: float) -> Iterator[tuple[Figure, bool]]:
    """Figures of one weight, and whether its first rows have the bits of the same rows of the largest product."""
    device, shape = torch.device("cuda"), SHAPES[what]
    packed = random_packed(name, shape, device)
    copies = copies_of(TritonLinear(packed, device, NumericsConfig()), max(2, -(-ROTATED_BYTES // packed.num_bytes)))
    inputs = torch.randn(max(ROWS), shape[1], device=device).bfloat16()
    every = torch.full((len(inputs), shape[0]), torch.nan, dtype=torch.bfloat16, device=device)
    copies[0](inputs, every)
    for rows in (1, max(ROWS), *ROWS[1:-1]):
        if time.monotonic() > deadline:
            return
        out = torch.full((rows, shape[0]), torch.nan, dtype=torch.bfloat16, device=device)
        x = inputs[:rows]
        seconds, spread = time_graph([lambda copy=copy: copy(x, out) for copy in copies])  # type: ignore[misc]  # noqa: B023
        rate = packed.num_bytes / seconds
        figure = Figure(
            f"{what} {shape[0]}x{shape[1]}", name, rows, "served", round(seconds * 1e6, 2), round(spread * 1e6, 2),
            round(rate / 1e9, 1), round(rate / bandwidth, 3), relative_error(out, x, packed),
        )  # fmt: skip
        yield figure, torch.equal(out, every[:rows])


def line(figure: Figure, same: bool) -> str:
    """A figure for people."""
    return (
        f"{figure.format:14s} {figure.what:32s} M={figure.rows:<3d} {figure.microseconds:9.1f} us "
        f"+-{figure.spread:5.1f} {100 * figure.share_of_copy:5.1f} %  err {figure.error:.1e}"
        f"{'' if same else '  OTHER BITS'}"
    )


def summary(figures: Sequence[Figure]) -> list[str]:
    """Per format a line: share of copy at 1 / 4 / 16 / 64 rows and the time at 64 over that at one row, by shape; `!`
    marks what misses a bar."""
    lines: list[str] = []
    for name in dict.fromkeys(figure.format for figure in figures):
        cells: list[str] = []
        mine = [figure for figure in figures if figure.format == name]
        for what in dict.fromkeys(figure.what for figure in mine if "expert" not in figure.what):
            by_rows = {figure.rows: figure for figure in mine if figure.what == what}
            shares = "/".join(f"{100 * by_rows[rows].share_of_copy:.0f}" for rows in ROWS if rows in by_rows)
            one, many = by_rows.get(1), by_rows.get(max(ROWS))
            ratio = many.microseconds / one.microseconds if one and many else 0.0
            size = one.gigabytes_per_second * one.microseconds / 1e3 if one else 0.0  # megabytes
            missed = size >= 20 and any(
                by_rows[rows].share_of_copy < BARS.get(name, 0.0) for rows in (1, 4) if rows in by_rows
            )
            cells.append(f"{what} {shares}{'!' if missed else ''} ({ratio:.1f}x{'!' if ratio > MOST_AT_64 else ''})")
        experts = [figure for figure in mine if "expert" in figure.what]
        cells += [f"experts M={f.rows} {100 * f.share_of_copy:.0f} ({f.microseconds:.0f} us)" for f in experts]
        lines.append(f"{name}: " + " | ".join(cells))
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, time, check and print; writes every figure as JSON where --out is given."""
    parser = argparse.ArgumentParser(prog="slimserve.measure.kernel_table", description=__doc__)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--experts", default=",".join(EXPERT_PAIRS), help="gate+down formats, or empty")
    parser.add_argument("--seconds", type=float, default=420.0, help="start nothing new after so many seconds")
    parser.add_argument("--compile", metavar="CASE", help="only compile this format or pair")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("No CUDA device: the kernel table needs one.", file=sys.stderr)
        return 3
    if options.compile:
        compile_one(options.compile)
        return 0
    begun = time.monotonic()
    deadline = begun + options.seconds
    formats = [name for name in options.formats.split(",") if name]
    experts = [pair for pair in options.experts.split(",") if pair]
    good = compile_all([*formats, *experts], begun + 0.5 * options.seconds)
    bandwidth = copy_bandwidth(torch.device("cuda"))
    print(f"compiled in {time.monotonic() - begun:.0f} s; copy {bandwidth / 1e9:.0f} GB/s", flush=True)
    figures: list[Figure] = []
    failures = [f"{case}: not compiled" for case in (*formats, *experts) if case not in good]
    for what, name in plan([n for n in formats if n in good], [pair for pair in experts if pair in good]):
        if time.monotonic() > deadline:
            break
        try:
            found: Iterable[tuple[Figure, bool]]
            if what == "experts":
                gate, _, down = name.partition("+")
                found = ((figure, True) for figure in measure_experts(gate, down, EXPERT_ROWS, bandwidth))
            else:
                found = measure_linear(what, name, bandwidth, deadline)
            for figure, same in found:
                print(line(figure, same), flush=True)
                figures.append(replace(figure, variant="served" if same else "other bits"))
                if not same or not figure.error < ERROR_BOUND:
                    failures.append(line(figure, same))
        except Exception as failure:  # one broken case must not cost the others their measurement
            failures.append(f"{name} {what}: {str(failure)[:300]}")
        torch.cuda.empty_cache()
        _write(options.out, bandwidth, figures, failures)
    print("\n".join(summary(figures)))
    print(f"{len(figures)} figures in {time.monotonic() - begun:.0f} s, {len(failures)} failures")
    print("\n".join(failures))
    return 1 if failures else 0


def _write(out: Path | None, bandwidth: float, figures: Sequence[Figure], failures: Sequence[str]) -> None:
    if out is None:
        return
    record = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_bytes_per_second": bandwidth,
        "weights": "synthetic",
        "figures": [asdict(figure) for figure in figures],
        "failures": list(failures),
    }
    out.write_text(json.dumps(record, indent=1), encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
