"""`bench kernels`: the weight stream of every matrix of a model and its attention, beside the copy bandwidth.

A rate counts the bytes of the weight's file form, or of the keys and values that are read. Every timed output is
checked against float64. What a model takes in a step is the sum over its matrices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from slimserve import ops
from slimserve.errors import UsageError
from slimserve.hardware import copy_bandwidth, detect
from slimserve.layers.contract import BLOCK_TOKENS
from slimserve.measure import kernels, kernels_cpu
from slimserve.measure.kernels import Figure
from slimserve.models.contract import CacheKind, Role
from slimserve.plan.description import DRAFTER, Description
from slimserve.quant.formats import find_format

Say = Callable[[str], None]
EXPERT_PAIRS = ("NVFP4+NVFP4", "IQ2_XXS+Q2_K")


@dataclass(frozen=True, slots=True)
class Matrix:
    """`count` weights [N, K] of one format and role in a model."""

    what: str
    format: str
    shape: tuple[int, int]
    count: int


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention of `count` layers; `window` bounds what a query sees."""

    query: int
    key: int
    width: int
    count: int
    window: int | None = None


def matrices_of(description: Description) -> list[Matrix]:
    """The distinct matrices of a model; of experts one of each stack. A tied embedding counts as the head."""
    counts: dict[tuple[str, str, tuple[int, int]], int] = {}
    tied = not any(weight.family == Role.HEAD.value for weight in description.weights)
    for weight in description.weights:
        embedding = weight.family == Role.EMBEDDING.value
        if weight.family == DRAFTER or len(weight.shape) < 2 or (embedding and not tied):
            continue
        what = "head" if embedding else f"one of {weight.experts} experts" if weight.experts else weight.family
        rows, columns = weight.shape[-2:]
        key = (what, weight.format, (rows, columns))
        counts[key] = counts.get(key, 0) + 1
    return [Matrix(what, fmt, shape, count) for (what, fmt, shape), count in counts.items()]


def fixed_matrices(device: torch.device, formats: Sequence[str], shapes: Sequence[str]) -> list[Matrix]:
    """Matrices of no model: formats at shapes of large models on a GPU, at one square shape on the processor.

    Raises UsageError for names that are not known.
    """
    on_cpu = device.type == "cpu"
    for name in formats:
        if find_format(name) is None:
            raise UsageError(f"--formats: {name!r} is not a known storage format")
    for name in shapes:
        if name not in kernels.SHAPES:
            raise UsageError(f"--shapes: {name!r} is not known; there are {', '.join(kernels.SHAPES)}")
    if on_cpu:
        return [Matrix("square", name, kernels_cpu.SQUARE, 0) for name in formats or kernels_cpu.FORMATS]
    named = shapes or [name for name in kernels.SHAPES if name != "expert"]
    return [Matrix(what, name, kernels.SHAPES[what], 0) for name in formats or kernels.FORMATS for what in named]


def heads_of(description: Description, kv_dtype: torch.dtype) -> list[Heads]:
    """The paged attention of a model, by window; empty where all its attention is latent."""
    config, found = description.config, []
    if config is None or not hasattr(config, "num_heads"):
        return []
    for spec in description.caches(kv_dtype):
        if spec.kind in (CacheKind.ATTENTION, CacheKind.WINDOW):
            key, _, width = spec.page[0].shape
            found.append(Heads(config.num_heads, key, width, len(spec.layers), spec.window))
    return found


def measure_attention(
    heads: Heads, rows: int, context: int, kv_dtype: torch.dtype, device: torch.device, bandwidth: float
) -> Figure:
    """One decode step of one layer: `rows` rows, each with `context` tokens behind it."""
    on_cpu = device.type == "cpu"
    dtype = torch.float32 if on_cpu else torch.bfloat16
    blocks = -(-context // BLOCK_TOKENS)
    visible = min(context, heads.window or context)
    num_bytes = 2 * rows * visible * heads.key * heads.width * kv_dtype.itemsize
    rotated = kernels_cpu.ROTATED_BYTES if on_cpu else kernels.ROTATED_BYTES
    copies = min(32, max(2, -(-rotated // num_bytes)))
    shape = (rows * blocks + 1, heads.key, BLOCK_TOKENS, heads.width)
    pages = [[torch.randn(shape, device=device).to(kv_dtype) for _ in range(2)] for _ in range(copies)]
    q = torch.randn(rows, heads.query, heads.width, device=device).to(dtype)
    table = 1 + torch.randperm(rows * blocks, device=device).to(torch.int32).view(rows, blocks)
    offsets = torch.arange(rows + 1, dtype=torch.int32, device=device)
    starts = torch.full((rows,), context - 1, dtype=torch.int32, device=device)

    def run(number: int) -> torch.Tensor:
        k, v = pages[number]
        return ops.paged_attention(
            q, k, v, table, offsets, starts, scale=heads.width**-0.5, window=heads.window, max_q_len=1,
            max_context=context,
        )  # fmt: skip

    calls = [lambda number=number: run(number) for number in range(copies)]  # type: ignore[misc]
    seconds, spread = kernels_cpu.median_time(calls) if on_cpu else kernels.time_graph(calls)
    # One row against float64 on the keys that it sees.
    k, v = (part[table[0].long()].transpose(0, 1).flatten(1, 2)[:, context - visible : context].double()
            for part in (pages[0][0], pages[0][1]))  # fmt: skip
    groups = q[0].double().view(heads.key, -1, heads.width)  # [Hkv, Hq / Hkv, D]
    expected = (torch.softmax(groups @ k.transpose(1, 2) * heads.width**-0.5, dim=-1) @ v).flatten(0, 1)
    error = float((run(0)[0].double() - expected).norm() / expected.norm())
    rate = num_bytes / seconds
    seen = f" of {context}" if visible < context else ""
    what = f"attention {heads.query}/{heads.key} heads of {heads.width}, {visible}{seen} tokens"
    return Figure(
        what, str(kv_dtype).removeprefix("torch."), rows, "served", round(seconds * 1e6, 2), round(spread * 1e6, 2),
        round(rate / 1e9, 2), round(rate / bandwidth, 3), error,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class KernelShape:
    """What is timed: rows of a step, contexts of attention. sweep: other tile shapes of the device's products too."""

    rows: tuple[int, ...] = (1, 8, 64)
    contexts: tuple[int, ...] = (1000, 8000)
    kv_dtype: torch.dtype = torch.bfloat16
    sweep: bool = False


def measure_kernels(
    name: str,
    device: torch.device,
    shape: KernelShape,
    matrices: Sequence[Matrix],
    heads: Sequence[Heads],
    experts: Sequence[str] = (),
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """The report as plain data (see `kernel_lines`)."""
    bandwidth = kernels.copy_bandwidth(device) if device.type == "cuda" else copy_bandwidth("cpu").median
    say(f"copy {bandwidth / 1e9:.1f} GB/s (read + written)")
    figures: list[dict[str, Any]] = []
    for figure, count in _figures(device, shape, matrices, heads, experts, bandwidth):
        figures.append({**asdict(figure), "count": count})
        say(_line(figures[-1]))
    machine = detect()
    return {
        "kind": "kernels",
        "profile": name,
        "device": machine.accelerators[0].name if device.type == "cuda" else machine.cpu_model,
        "torch": torch.__version__,
        "copy_bytes_per_second": bandwidth,
        "weights": "synthetic weights",
        "figures": figures,
        "step_microseconds": _step_sums(figures, shape.rows),
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _figures(
    device: torch.device,
    shape: KernelShape,
    matrices: Sequence[Matrix],
    heads: Sequence[Heads],
    experts: Sequence[str],
    bandwidth: float,
) -> Iterator[tuple[Figure, int]]:
    """Every figure, and how often a step of the model does the same (0: it is no part of a model)."""
    for matrix in matrices:
        if device.type == "cuda":
            found = kernels.measure_linear(matrix.what, matrix.shape, matrix.format, shape.rows, bandwidth, shape.sweep)
            torch.cuda.empty_cache()
        else:
            found = kernels_cpu.measure_linear(matrix.what, matrix.shape, matrix.format, shape.rows, bandwidth)
        yield from ((figure, matrix.count if figure.variant == "served" else 0) for figure in found)
    for pair in experts:
        gate, _, down = pair.partition("+")
        yield from ((figure, 0) for figure in kernels.measure_experts(gate, down or gate, shape.rows, bandwidth))
        torch.cuda.empty_cache()
    for kind in heads:
        for context in shape.contexts:
            for rows in shape.rows:
                yield measure_attention(kind, rows, context, shape.kv_dtype, device, bandwidth), kind.count


def _step_sums(figures: Sequence[dict[str, Any]], rows: Sequence[int]) -> dict[str, float]:
    """Microseconds of all matrix products of a step, by rows; empty where the figures are no model's."""
    own = [f for f in figures if f["count"] and not f["what"].startswith(("attention", "one of"))]
    return {str(n): sum(f["microseconds"] * f["count"] for f in own if f["rows"] == n) for n in rows} if own else {}


def _line(figure: dict[str, Any]) -> str:
    times = f"{figure['count']:>3} x" if figure["count"] else "     "
    return (
        f"{times} {figure['format']:9} {figure['what']:44} rows {figure['rows']:<3} {figure['microseconds']:>9.1f} us "
        f"+-{figure['spread']:<8.1f} {figure['gigabytes_per_second']:>7.1f} GB/s {figure['share_of_copy']:>6.1%} of "
        f"copy, error {figure['error']:.1e}  {figure['variant']}"
    )


def kernel_lines(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    lines = [
        f"{report['profile']} on {report['device']}, {report['weights']}: copy "
        f"{report['copy_bytes_per_second'] / 1e9:.1f} GB/s (read + written)",
        *(_line(figure) for figure in report["figures"]),
    ]
    for rows, taken in report["step_microseconds"].items():
        lines.append(
            f"matrix products of a step, {rows} rows: {taken / 1e3:.2f} ms, {int(rows) / taken * 1e6:.1f} tok/s"
        )
    return lines
