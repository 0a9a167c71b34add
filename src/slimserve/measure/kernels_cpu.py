"""Speed of the C++ matrix products and of attention on the processor, with every timed output checked.

Weights are random values in their formats; enough copies are rotated that none is found in a cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from slimserve.errors import RefusalError
from slimserve.measure.kernels import PRODUCT_REFERENCE, Figure, relative_error
from slimserve.ops import linear, prepare_linear
from slimserve.quant.formats import find_format
from slimserve.quant.synthetic import RandomBits, random_packed
from slimserve.quant.tensor import PackedTensor

ROTATED_BYTES = 64 << 20
REPEATS = 5
ALLOWED_ERROR = 2e-2
"""Relative error of products whose activations are rounded to 8 bits in blocks of 32."""

FORMATS = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4",
    "IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ2_0", "F16", "BF16", "F32",
)  # fmt: skip
PLAIN = (2048, 4096)
"""The shape [N, K] that formats are compared at where no model is named."""

_SIDE_SCALES = {"F8_E4M3": "channel", "E2M1_G16": "group16", "INT4": "group128"}


def random_weight(name: str, shape: tuple[int, int], seed: int = 0) -> PackedTensor:
    """A random weight [N, K] of a format; RefusalError for a format that is not known or cannot be made."""
    fmt = find_format(name)
    if fmt is None:
        raise RefusalError(f"{name} is not a known storage format")
    bits = RandomBits(seed, name, torch.device("cpu"))
    return random_packed(fmt, shape, shape[1] ** -0.5, bits, scales=_SIDE_SCALES.get(name, ""), name=name)


def median_time(calls: Sequence[Callable[[], object]], passes: int = 1, repeats: int = REPEATS) -> tuple[float, float]:
    """Median and range of seconds per call, each repeat `passes` times through all calls; the first is a warm-up."""
    for call in calls:
        call()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(passes):
            for call in calls:
                call()
        times.append((time.perf_counter() - begin) / (passes * len(calls)))
    return statistics.median(times), max(times) - min(times)


def measure_linear(what: str, shape: tuple[int, int], name: str, rows: Sequence[int], bandwidth: float) -> list[Figure]:
    """All row counts of one weight of `shape` [N, K] and format."""
    first = random_weight(name, shape)
    copies = max(1, -(-ROTATED_BYTES // first.num_bytes))
    # The same values at other addresses, also of formats that are served from the bytes of the file.
    others = (replace(first, data=first.data.clone()) for _ in range(copies - 1))
    served = [prepare_linear([packed]) for packed in (first, *others)]
    found = []
    for count in rows:
        x = torch.randn(count, shape[1])
        calls = [lambda weight=weight, x=x: linear(x, weight) for weight in served]  # type: ignore[misc]
        seconds, spread = median_time(calls, max(1, 16 // (copies * count)))
        rate = first.num_bytes / seconds
        found.append(
            Figure(
                f"{what} {shape[0]}x{shape[1]}",
                name,
                count,
                "served",
                round(seconds * 1e6, 2),
                round(spread * 1e6, 2),
                round(rate / 1e9, 2),
                round(rate / bandwidth, 3),
                relative_error(linear(x, served[0]), x, first),
                num_bytes=first.num_bytes,
                operations=2.0 * count * shape[0] * shape[1],
                reference=PRODUCT_REFERENCE,
                allowed=ALLOWED_ERROR,
            )
        )
    return found
