"""`bench kernels`: the time of every kernel beside what the machine allows, with every output checked in the same run.

Families: `products` (weight streams, and routed experts on a GPU), `attention`, `latent`, `selection`, `delta-rule`,
`convolution`. A row of the report is one operation of one layer in one step: median and range of its time, the bytes
that it must move, its operations where they bind, and the share of the measured copy bandwidth or matrix rate that is
reached. The same code runs on the processor and on a GPU, where calls are replayed from a CUDA graph. Weights, inputs
and caches are random; enough copies are rotated that none is found in a cache. What a model takes in a step is the sum
over its matrices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from slimserve.errors import RunError, UsageError
from slimserve.hardware import copy_bandwidth, detect, format_bytes, free_device_memory
from slimserve.measure import kernels, kernels_cpu, kernels_sequence
from slimserve.measure.kernels import Figure
from slimserve.measure.kernels_sequence import Case, Geometry, TensorDict, geometry_of
from slimserve.models.contract import Role
from slimserve.plan.description import DRAFTER, Description
from slimserve.quant.formats import find_format

Say = Callable[[str], None]
PRODUCTS = "products"
FAMILIES = (PRODUCTS, *kernels_sequence.FAMILIES)
EXPERT_PAIRS = ("NVFP4+NVFP4", "IQ2_XXS+Q2_K")
TINY_SHAPE = (256, 512)
MOST_COPIES = 32
CPU_CASE_SECONDS = 0.15
"""Of one pass through the copies of a case on the processor: calls that take longer than that have one copy."""
CPU_CASE_BYTES = 1 << 30
DELTA_RULE_VARIANTS = ((16, 2), (16, 4), (32, 8), (64, 8))
"""(values of a program, warps) that --sweep times beside the served form."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """`count` weights [N, K] of one format and role in a model."""

    what: str
    format: str
    shape: tuple[int, int]
    count: int


@dataclass(frozen=True, slots=True)
class KernelShape:
    """What is timed: rows of products and of decode steps, contexts, tokens of a prompt's step (0: none).

    sweep: other tile shapes of the device's products and delta rule too.
    """

    rows: tuple[int, ...] = (1, 8, 64)
    contexts: tuple[int, ...] = (1000, 8000)
    kv_dtype: torch.dtype = torch.bfloat16
    sweep: bool = False
    step_rows: tuple[int, ...] = (1, 8, 64)
    prompt: int = 0
    families: tuple[str, ...] = FAMILIES


@dataclass(frozen=True, slots=True)
class Work:
    """What is timed: matrices, pairs of experts' formats, geometries of sequence operations."""

    name: str
    matrices: tuple[Matrix, ...] = ()
    experts: tuple[str, ...] = ()
    geometries: tuple[Geometry, ...] = ()

    @property
    def families(self) -> set[str]:
        """What there is to time."""
        found = {PRODUCTS} if self.matrices or self.experts else set()
        return found.union(*(geometry.families for geometry in self.geometries))


def defaults(device: torch.device, *, named: bool, tiny: bool) -> KernelShape:
    """Rows, contexts and prompt where none are asked for: what ends within two minutes on two cores of a processor."""
    if tiny:
        return KernelShape(rows=(1, 3), contexts=(90,), step_rows=(1, 3), prompt=20)
    if device.type == "cuda":
        return KernelShape(contexts=(1000, 8000) if named else (2000, 8192, 131072), prompt=512)
    return KernelShape(contexts=(1000, 8000) if named else (1000, 4000), step_rows=(1, 8), prompt=64)


def model_work(name: str, description: Description, kv_dtype: torch.dtype) -> Work:
    """A model's own matrices and sequence operations."""
    return Work(name, tuple(matrices_of(description)), (), (geometry_of("", description, kv_dtype),))


def fixed_work(
    device: torch.device, formats: Sequence[str], shapes: Sequence[str], experts: Sequence[str] | None, *, tiny: bool
) -> Work:
    """Work of no model: formats at fixed shapes, published geometries on a GPU, small ones on the processor."""
    if tiny:
        on_gpu = device.type == "cuda"
        names = formats or (kernels.FORMATS if on_gpu else kernels_cpu.FORMATS)
        fixed_matrices(device, names, shapes)  # refuses unknown names
        return Work("tiny", tuple(Matrix("tiny", name, TINY_SHAPE, 0) for name in names), (), kernels_sequence.TINY)
    matrices = tuple(fixed_matrices(device, formats, shapes))
    if device.type == "cpu":
        return Work("formats and small geometries", matrices, (), kernels_sequence.SMALL)
    pairs = EXPERT_PAIRS if experts is None else tuple(experts)
    return Work("formats and published geometries", matrices, pairs, kernels_sequence.PUBLISHED)


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
    """Matrices of no model: formats at shapes of large models on a GPU, at one shape on the processor.

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
        return [Matrix("plain", name, kernels_cpu.PLAIN, 0) for name in formats or kernels_cpu.FORMATS]
    named = shapes or [name for name in kernels.SHAPES if name != "expert"]
    return [Matrix(what, name, kernels.SHAPES[what], 0) for name in formats or kernels.FORMATS for what in named]


@dataclass(slots=True)
class Bench:
    """One run: the machine's rates, what is asked for, and what was left out with the reason."""

    device: torch.device
    shape: KernelShape
    bandwidth: float
    matrix_rate: float
    left_out: list[str]

    @property
    def on_cpu(self) -> bool:
        """Whether the processor computes."""
        return self.device.type == "cpu"

    def figures(self, work: Work) -> Iterator[tuple[Figure, int]]:
        """Every figure, and how often a step of the model does the same (0: it is no part of a model)."""
        if PRODUCTS in self.shape.families:
            yield from self._products(work)
        others = [name for name in self.shape.families if name != PRODUCTS]
        for geometry in work.geometries:
            for case in kernels_sequence.cases(
                geometry, others, self.shape.step_rows, self.shape.contexts, self.shape.prompt, self.shape.kv_dtype,
                self.device,
            ):  # fmt: skip
                yield from ((figure, case.count if figure.variant == "served" else 0) for figure in self._case(case))

    def _products(self, work: Work) -> Iterator[tuple[Figure, int]]:
        rows = self.shape.rows
        for matrix in work.matrices:
            given = (matrix.what, matrix.shape, matrix.format, rows, self.bandwidth)
            if self.on_cpu:
                found = kernels_cpu.measure_linear(*given)
            else:
                found = kernels.measure_linear(*given, self.shape.sweep)
                torch.cuda.empty_cache()
            yield from ((figure, matrix.count if figure.variant == "served" else 0) for figure in found)
        for pair in work.experts:
            gate, _, down = pair.partition("+")
            yield from ((figure, 0) for figure in kernels.measure_experts(gate, down or gate, rows, self.bandwidth))
            torch.cuda.empty_cache()

    def _case(self, case: Case) -> Iterator[Figure]:
        """The served form and, in a sweep of the delta rule on a GPU, its variants."""
        limit = min(CPU_CASE_BYTES, detect().memory_free // 4) if self.on_cpu else free_device_memory() // 8
        if case.stored > limit:
            size = f"caches of {format_bytes(case.stored)}, more than the {format_bytes(limit)} that a case may take"
            self.left_out.append(f"{case.what}, rows {case.rows}: {size}")
            return
        yield self._timed(case, "served", max(1, limit // max(1, case.stored)))
        if self.shape.sweep and case.family == "delta-rule" and not self.on_cpu:
            for values, warps in DELTA_RULE_VARIANTS:
                with _delta_rule_variant(values, warps):
                    try:
                        yield self._timed(case, f"{values} values x {warps} warps", MOST_COPIES)
                    except Exception as error:  # a variant that does not compile must not cost the others
                        reason = f"{type(error).__name__}: {str(error)[:100]}"
                        self.left_out.append(f"{case.what}, {values} values x {warps} warps: {reason}")
        if not self.on_cpu:
            torch.cuda.empty_cache()

    def _timed(self, case: Case, variant: str, most_copies: int) -> Figure:
        """Time copies of a case in turns, then check one more call on tensors as they were before."""
        tensors = case.make()
        before = _cloned(tensors) if case.updates else tensors
        rotated = kernels_cpu.ROTATED_BYTES if self.on_cpu else kernels.ROTATED_BYTES
        copies = min(MOST_COPIES, most_copies, max(2, -(-rotated // case.num_bytes)))
        if self.on_cpu:
            case.call(tensors)
            begun = time.perf_counter()
            case.call(tensors)
            copies = max(1, min(copies, int(CPU_CASE_SECONDS / (time.perf_counter() - begun))))
        others = (case.make() if case.redrawn else _cloned(before) for _ in range(copies - 1))
        calls = [partial(case.call, one) for one in (tensors, *others)]
        seconds, spread = kernels_cpu.median_time(calls) if self.on_cpu else kernels.time_graph(calls)
        error = check(case, before)
        rate = case.num_bytes / seconds
        return Figure(
            case.what, case.format, case.rows, variant, round(seconds * 1e6, 2), round(spread * 1e6, 2),
            round(rate / 1e9, 2), round(rate / self.bandwidth, 3), error, case.family, case.num_bytes, case.operations,
            case.reference, case.allowed,
        )  # fmt: skip


def check(case: Case, before: TensorDict) -> float:
    """Relative error of one call on these tensors, which stay as they are."""
    after = _cloned(before) if case.updates else before
    return case.check(before, case.call(after), after)


def _cloned(tensors: TensorDict) -> TensorDict:
    return {name: tensor.clone() for name, tensor in tensors.items()}


@contextmanager
def _delta_rule_variant(values: int, warps: int) -> Iterator[None]:
    from slimserve.ops.triton import delta_rule

    served = delta_rule.VALUE_SLICE, delta_rule.WARPS
    delta_rule.VALUE_SLICE, delta_rule.WARPS = values, warps
    try:
        yield
    finally:
        delta_rule.VALUE_SLICE, delta_rule.WARPS = served


def measure_kernels(
    work: Work, device: torch.device, shape: KernelShape, say: Say = lambda text: None
) -> dict[str, Any]:
    """The report as plain data (see `kernel_lines`); UsageError where the families asked for have nothing to time."""
    if not work.families & set(shape.families):
        raise UsageError(f"{work.name} has nothing of {', '.join(shape.families)} to time")
    bandwidth = kernels.copy_bandwidth(device) if device.type == "cuda" else copy_bandwidth("cpu").median
    rate = kernels.matrix_rate(device)
    machine = detect()
    name = machine.accelerators[device.index or 0].name if device.type == "cuda" else machine.cpu_model
    report: dict[str, Any] = {
        "kind": "kernels",
        "profile": work.name,
        "device": name,
        "device_type": device.type,
        "torch": torch.__version__,
        "copy_bytes_per_second": bandwidth,
        "matrix_operations_per_second": rate,
        "weights": "synthetic weights",
        "inputs": "random inputs and caches",
    }
    say(_title(report))
    bench = Bench(device, shape, bandwidth, rate, [])
    figures: list[dict[str, Any]] = []
    for figure, count in bench.figures(work):
        judged = figure.judged(bandwidth, rate)
        figures.append({**asdict(judged), "agrees": judged.agrees, "count": count})
        say(_line(figures[-1]))
    return {
        **report,
        "figures": figures,
        "left_out": bench.left_out,
        "step_microseconds": _step_sums(figures, shape.rows),
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def refuse_wrong_outputs(report: dict[str, Any]) -> None:
    """Raises RunError where an output is further from its reference than it may be."""
    wrong = [figure for figure in report["figures"] if not figure["agrees"]]
    if wrong:
        first = wrong[0]
        raise RunError(
            f"{len(wrong)} of {len(report['figures'])} outputs are wrong, the first of {first['what']} "
            f"({first['format']}, rows {first['rows']}): relative error {first['error']:.1e}, {first['allowed']:.0e} "
            "is allowed"
        )


def _step_sums(figures: Sequence[dict[str, Any]], rows: Sequence[int]) -> dict[str, float]:
    """Microseconds of all matrix products of a step, by rows; empty where the figures are no model's."""
    own = [f for f in figures if f["count"] and f["family"] == PRODUCTS and not f["what"].startswith("one of")]
    return {str(n): sum(f["microseconds"] * f["count"] for f in own if f["rows"] == n) for n in rows} if own else {}


def _title(report: dict[str, Any]) -> str:
    return (
        f"{report['profile']} on {report['device_type']} ({report['device']}), {report['weights']}, "
        f"{report['inputs']}: copy {report['copy_bytes_per_second'] / 1e9:.1f} GB/s (read + written), matrix product "
        f"{report['matrix_operations_per_second'] / 1e9:.0f} G operations/s"
    )


def _line(figure: dict[str, Any]) -> str:
    times = f"{figure['count']:>3} x" if figure["count"] else "     "
    bound = f"{figure['num_bytes'] / 1e6:>8.2f} MB"
    limit = "copy"
    if figure["bound"] == "operations":
        bound, limit = f"{figure['operations'] / 1e6:>7.1f} Mop", "matrix rate"
    verdict = "" if figure["agrees"] else f" WRONG, {figure['allowed']:.0e} is allowed"
    variant = "" if figure["variant"] == "served" else f"  {figure['variant']}"
    return (
        f"{times} {figure['format']:9} {figure['what']:66} rows {figure['rows']:<3} {figure['microseconds']:>10.1f} us "
        f"+-{figure['spread']:<8.1f} {bound} {figure['gigabytes_per_second']:>7.1f} GB/s {figure['share']:>6.1%} of "
        f"{limit:11} error {figure['error']:.1e}{verdict}{variant}"
    )


def kernel_lines(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    lines = [_title(report), *(_line(figure) for figure in report["figures"])]
    lines += [f"left out: {reason}" for reason in report["left_out"]]
    for rows, taken in report["step_microseconds"].items():
        lines.append(
            f"matrix products of a step, {rows} rows: {taken / 1e3:.2f} ms, {int(rows) / taken * 1e6:.1f} tok/s"
        )
    agreeing = sum(figure["agrees"] for figure in report["figures"])
    lines.append(f"{agreeing} of {len(report['figures'])} outputs agree with float64 references of this run")
    return lines
