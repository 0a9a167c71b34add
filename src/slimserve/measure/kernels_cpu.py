"""Times the C++ matrix products of a model's shapes: `python -m slimserve.measure.kernels_cpu [case ...]`.

Weights are random bytes of the real formats; enough copies are rotated that none is found in a cache. Prints, per
shape and number of rows, the median time, the weight stream in GB/s and the multiply-adds in G/s, and per model the
sum over its layers as tokens per second of the matrix products alone.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass

import torch

from slimserve.ops import linear, prepare_linear
from slimserve.ops.cpu import library
from slimserve.ops.weights import LinearWeight
from slimserve.quant.formats import find_format
from slimserve.quant.tensor import PackedTensor

ROW_COUNTS = (1, 8, 512)
ROTATED_BYTES = 64 << 20
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Shape:
    """`count` weights per step of N outputs (per part) and K inputs; `head`: only one row per sequence."""

    parts: tuple[tuple[str, int], ...]
    columns: int
    count: int
    head: bool = False


CASES: dict[str, tuple[Shape, ...]] = {
    "qwen25-coder-0.5b": (
        Shape((("Q5_0", 896), ("Q5_0", 128), ("Q8_0", 128)), 896, 24),
        Shape((("Q5_0", 896),), 896, 24),
        Shape((("Q5_0", 4864), ("Q5_0", 4864)), 896, 24),
        Shape((("Q6_K", 896),), 4864, 12),
        Shape((("Q4_K", 896),), 4864, 12),
        Shape((("Q8_0", 151936),), 896, 1, head=True),
    ),
    "qwen25-coder-1.5b": (
        Shape((("Q4_K", 1536), ("Q4_K", 256), ("Q6_K", 256)), 1536, 28),
        Shape((("Q4_K", 1536),), 1536, 28),
        Shape((("Q4_K", 8960), ("Q4_K", 8960)), 1536, 28),
        Shape((("Q6_K", 1536),), 8960, 14),
        Shape((("Q4_K", 1536),), 8960, 14),
        Shape((("Q6_K", 151936),), 1536, 1, head=True),
    ),
    "gemma3-270m": (
        Shape((("Q5_0", 1024), ("Q5_0", 256), ("Q8_0", 256)), 640, 18),
        Shape((("Q4_K", 640),), 1024, 18),
        Shape((("Q5_0", 2048), ("Q5_0", 2048)), 640, 18),
        Shape((("Q6_K", 640),), 2048, 9),
        Shape((("Q4_K", 640),), 2048, 9),
        Shape((("Q8_0", 262144),), 640, 1, head=True),
    ),
    "smollm2-135m": (
        Shape((("Q4_1", 576), ("Q4_1", 192), ("Q4_1", 192)), 576, 30),
        Shape((("Q4_1", 576),), 576, 30),
        Shape((("Q4_1", 1536), ("Q4_1", 1536)), 576, 30),
        Shape((("Q4_1", 576),), 1536, 30),
        Shape((("Q8_0", 49152),), 576, 1, head=True),
    ),
    "formats": tuple(
        Shape(((name, 4096),), 4096, 1)
        for name in (
            "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4",
            "NVFP4", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0", "F16",
            "BF16", "F32",
        )
    ),
}  # fmt: skip


def random_weight(shape: Shape) -> LinearWeight:
    """A prepared weight of random bytes: what the bytes say does not change the time."""
    parts = []
    for name, rows in shape.parts:
        fmt = find_format(name)
        if fmt is None:
            raise ValueError(f"unknown format {name}")
        plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(name)
        if plain is not None:
            data = torch.randn(rows, shape.columns).to(plain)
        else:
            data = torch.randint(0, 60, (rows, fmt.row_bytes(shape.columns)), dtype=torch.uint8)
        parts.append(PackedTensor(fmt, (rows, shape.columns), data, name))
    return prepare_linear(parts)


def time_shape(shape: Shape, rows: int) -> tuple[float, float, int]:
    """Median, spread (max - min) in seconds of one call, and the bytes of the weight."""
    weights = [random_weight(shape)]
    while sum(w.num_bytes for w in weights) < ROTATED_BYTES:
        weights.append(random_weight(shape))
    x = torch.randn(rows, shape.columns)
    for weight in weights:
        linear(x, weight)
    passes = max(1, 64 // (len(weights) * rows))
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        for _ in range(passes):
            for weight in weights:
                linear(x, weight)
        times.append((time.perf_counter() - begin) / (passes * len(weights)))
    return statistics.median(times), max(times) - min(times), weights[0].num_bytes


def run_case(name: str) -> None:
    """Time every shape of a case and print a line each, then the sums."""
    total = dict.fromkeys(ROW_COUNTS, 0.0)
    for shape in CASES[name]:
        outputs = sum(rows for _, rows in shape.parts)
        label = "+".join(f"{fmt} {rows}" for fmt, rows in shape.parts) + f" x {shape.columns}"
        for rows in ROW_COUNTS:
            served = min(rows, 8) if shape.head else rows
            median, spread, num_bytes = time_shape(shape, 1 if shape.head and rows == 512 else served)
            total[rows] += median * shape.count
            print(
                f"{name:18} {label:36} rows {rows:3}: {median * 1e6:9.1f} us (+-{spread * 5e5:.0f}), "
                f"{num_bytes / median / 1e9:6.1f} GB/s, {outputs * shape.columns * served / median / 1e9:7.1f} GMAC/s",
                flush=True,
            )
    if name != "formats":
        rates = ", ".join(f"{rows} rows {rows / seconds:.0f} tok/s" for rows, seconds in total.items())
        print(f"{name}: matrix products alone: {rates}", flush=True)


def main() -> None:
    """Command line: names of cases, default all models."""
    print(f"{library.instruction_set()}, {library.available_cores()} threads")
    for name in sys.argv[1:] or [case for case in CASES if case != "formats"]:
        run_case(name)


if __name__ == "__main__":
    main()
