"""Speed of the device's matrix products against the measured copy bandwidth, with every timed output checked.

`slimserve bench kernels` runs it (`kernel_bench`, which also times what works on sequence state). Weights are random
bytes in the layout of their format (synthetic), enough copies to exceed the second-level cache several times; calls are
captured in a CUDA graph that walks the copies, so that launch time of the host does not count. A figure is the median
over replays; the rate counts the bytes of the weights' file form.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from slimserve.errors import RefusalError
from slimserve.ops import NumericsConfig, Op
from slimserve.ops.cpu.library import num_threads
from slimserve.ops.registry import architecture, entries
from slimserve.ops.resolver import Case, resolve
from slimserve.quant.decode import dequantize
from slimserve.quant.formats import find_format, is_plain
from slimserve.quant.tensor import BlockFormat, PackedTensor

SHAPES: dict[str, tuple[int, int]] = {
    "27B gate": (17408, 5120),
    "27B down": (5120, 17408),
    "27B qkv": (10240, 5120),
    "27B head": (248320, 5120),
    "4B gate": (9216, 2560),
    "4B down": (2560, 9216),
    "expert": (2048, 4096),
}
"""Weight shapes [N, K] of Qwen3.8-27B, Qwen3.5-4B and one GLM-5.3-Flash expert."""

FORMATS = ("NVFP4", "F8_E4M3", "Q8_0", "Q4_K", "Q6_K", "Q2_K", "IQ2_XXS", "BF16")
ROWS = (1, 4, 16, 64)
ROTATED_BYTES = 400 << 20
REPLAYS = 15
COPY_WARMUPS, COPY_REPEATS = 100, 50
RATE_REPEATS = 9
ALLOWED_ERROR = 4e-3
"""Relative error of products with bfloat16 results; of experts, which round twice, half as much again."""

EXPERTS, SLOTS = 288, 8
CHECKED_COLUMNS = 512
PRODUCT_REFERENCE = f"float64 on decoded weights, first {CHECKED_COLUMNS} outputs"
_HALF_SCALES = {"Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "IQ2_XXS": (0,), "Q4_0": (0,)}


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement: median and spread (highest less lowest) in microseconds, bytes per second and their share of the
    copy bandwidth, relative error of its output against `reference`, which may be `allowed`.

    `num_bytes` must be moved (of products: the weight's), `operations` done by the plain formula. `bound` says which of
    them takes longer at the machine's copy bandwidth or matrix rate, and `share` is that time over the measured one.
    """

    what: str
    format: str
    rows: int
    variant: str
    microseconds: float
    spread: float
    gigabytes_per_second: float
    share_of_copy: float
    error: float
    family: str = "products"
    num_bytes: float = 0.0
    operations: float = 0.0
    reference: str = ""
    allowed: float = 0.0
    bound: str = "bytes"
    share: float = 0.0

    @property
    def agrees(self) -> bool:
        """Whether the output is as close to its reference as it must be; NaN is not."""
        return self.error <= self.allowed

    def judged(self, bandwidth: float, matrix_rate: float) -> Figure:
        """With `bound` and `share`, from bytes and operations per second."""
        moving, computing = self.num_bytes / bandwidth, self.operations / matrix_rate
        bound = "operations" if computing > moving else "bytes"
        return replace(self, bound=bound, share=round(max(moving, computing) / (self.microseconds / 1e6), 4))


def time_graph(calls: Sequence[Callable[[], object]], replays: int = REPLAYS) -> tuple[float, float]:
    """Median and range of seconds per call, from replays of one graph that makes every call once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    for replay in range(replays + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 2:
            times.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times), max(times) - min(times)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read plus written, of a large device-to-device copy.

    Timed outside a graph, whose copies may take another engine, and after a while of copying: an idle device's clocks
    start low.
    """
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device).random_(0, 255)
    target = torch.empty_like(source)
    times: list[float] = []
    for repeat in range(COPY_REPEATS + COPY_WARMUPS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(4):
            target.copy_(source)
        end.record()
        end.synchronize()
        if repeat >= COPY_WARMUPS:
            times.append(begin.elapsed_time(end) / 1e3 / 4)
    return 2 * source.numel() / statistics.median(times)


def matrix_rate(device: torch.device) -> float:
    """Operations per second of a square product of torch: bfloat16 on a GPU, the median; on the processor the faster of
    bfloat16 and float32, the fastest repeat of one thread times the threads that serve (threads of torch that wait for
    each other measure what else runs there). Products of 8-bit integers may exceed it."""
    if device.type == "cpu":
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            times = {dtype: min(_product_seconds(device, 512, dtype)) for dtype in (torch.float32, torch.bfloat16)}
        finally:
            torch.set_num_threads(threads)
        return num_threads() * 2 * 512**3 / min(times.values())
    return 2 * 8192**3 / statistics.median(_product_seconds(device, 8192, torch.bfloat16))


def _product_seconds(device: torch.device, size: int, dtype: torch.dtype) -> list[float]:
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times: list[float] = []
    for repeat in range(RATE_REPEATS + 3):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if repeat >= 3:
            times.append(time.perf_counter() - begun)
    return times


def random_packed(name: str, shape: tuple[int, ...], device: torch.device) -> PackedTensor:
    """Random weights of a format, made on the device; scales are ordinary numbers."""
    fmt = find_format(name)
    if fmt is None:
        raise RefusalError(f"{name} is not a known storage format.")
    if name == "F8_E4M3":
        data = torch.randn(shape, device=device, dtype=torch.bfloat16).to(torch.float8_e4m3fn)
        return PackedTensor(fmt, shape, data, name, {"weight_scale": torch.rand(*shape[:-1], 1, device=device) + 0.5})
    if is_plain(fmt):
        return PackedTensor(fmt, shape, torch.randn(shape, device=device, dtype=torch.bfloat16), name)
    data = torch.randint(0, 256, (*shape[:-1], fmt.row_bytes(shape[-1])), dtype=torch.uint8, device=device)
    _ordinary_scales(data.view(-1, fmt.block_bytes), fmt)
    return PackedTensor(fmt, shape, data, name)


def _ordinary_scales(blocks: torch.Tensor, fmt: BlockFormat) -> None:
    for offset in _HALF_SCALES.get(fmt.name, ()):
        halves = (torch.rand(blocks.shape[0], 1, device=blocks.device) * 0.02 + 0.01).half()
        blocks[:, offset : offset + 2] = halves.view(torch.uint8)
    if fmt.name == "NVFP4":
        blocks[:, 0:4] = blocks[:, 0:4] % 64


def relative_error(got: torch.Tensor, x: torch.Tensor, packed: PackedTensor, rows: int = CHECKED_COLUMNS) -> float:
    """Relative error of a product's first columns against float64 on decoded weights."""
    from slimserve.ops.reference.packed_rows import slice_rows

    decoded = dequantize(slice_rows(packed, 0, min(rows, packed.shape[0]))).to(x.device).double()
    expected = x.double() @ decoded.T
    return float((got[:, : decoded.shape[0]].double() - expected).norm() / expected.norm())


def measure_linear(
    what: str, shape: tuple[int, int], name: str, rows: Sequence[int], bandwidth: float, sweep: bool
) -> list[Figure]:
    """All row counts of one weight of `shape` [N, K] and format."""
    device = torch.device("cuda")
    packed = random_packed(name, shape, device)
    case = Case(Op.LINEAR, device, architecture(device), name, dtype=torch.bfloat16, shape=shape)
    choice = resolve(case, entries("cuda"))
    copies = max(2, -(-ROTATED_BYTES // packed.num_bytes))
    numerics = NumericsConfig(activation_dtype=torch.bfloat16)
    served = [choice.entry.implementation(packed, device, numerics) for _ in range(copies)]
    found: list[Figure] = []
    for count in rows:
        x = torch.randn(count, shape[1], device=device).bfloat16()
        for variant, runs in _variants(served, x, sweep).items():
            out = torch.full((count, shape[0]), torch.nan, dtype=torch.bfloat16, device=device)
            seconds, spread = time_graph([lambda run=run, out=out, x=x: run(x, out) for run in runs])  # type: ignore[misc]
            rate = packed.num_bytes / seconds
            found.append(
                Figure(
                    f"{what} {shape[0]}x{shape[1]}",
                    name,
                    count,
                    variant,
                    round(seconds * 1e6, 2),
                    round(spread * 1e6, 2),
                    round(rate / 1e9, 1),
                    round(rate / bandwidth, 3),
                    relative_error(out, x, packed),
                    num_bytes=packed.num_bytes,
                    operations=2.0 * count * shape[0] * shape[1],
                    reference=PRODUCT_REFERENCE,
                    allowed=ALLOWED_ERROR,
                )
            )
    return found


def _variants(served: Sequence[object], x: torch.Tensor, sweep: bool) -> dict[str, list[Callable[..., None]]]:
    """The product as it is served and, with `sweep`, on every other tile shape."""
    variants: dict[str, list[Callable[..., None]]] = {"served": list(served)}  # type: ignore[arg-type]
    if sweep:
        from slimserve.ops.triton import linear

        for tile in linear.SWEEP:
            fits = x.shape[0] <= 8 * tile.columns <= 16 * max(4, x.shape[0])
            if fits:
                variants[str(tile)] = [
                    lambda x, out, weight=weight, tile=tile: weight.run(x, out, tile)  # type: ignore[attr-defined]
                    for weight in served
                ]
    return variants


def measure_experts(
    gate: str, down: str, rows: Sequence[int], bandwidth: float, experts: int = EXPERTS
) -> list[Figure]:
    """Gate, up and down of GLM-5.3-Flash's routed experts, 8 of 288 (`experts`) drawn at random for every row."""
    device, (inner, width) = torch.device("cuda"), SHAPES["expert"]
    case = Case(Op.EXPERTS, device, architecture(device), f"{gate}+{down}", dtype=torch.bfloat16)
    choice = resolve(case, entries("cuda"))
    packed = [random_packed(gate, (experts, inner, width), device) for _ in range(2)]
    packed_down = random_packed(down, (experts, width, inner), device)
    served = choice.entry.implementation(tuple(packed), packed_down, device, NumericsConfig(torch.bfloat16))
    per_expert = (sum(part.num_bytes for part in packed) + packed_down.num_bytes) / experts
    found: list[Figure] = []
    for count in rows:
        x = (torch.randn(count, width, device=device) * 0.01).bfloat16()
        draws = [torch.rand(count, experts, device=device).topk(SLOTS, dim=1).indices for _ in range(8)]
        weights = torch.rand(count, SLOTS, device=device)
        outs: dict[int, torch.Tensor] = {}

        def run(index: int, x: torch.Tensor = x, draws: list[torch.Tensor] = draws, weights: torch.Tensor = weights,
                outs: dict[int, torch.Tensor] = outs) -> None:  # fmt: skip
            outs[index] = served(x, draws[index], weights, 10.0)

        seconds, spread = time_graph([lambda i=i, run=run: run(i) for i in range(8)])  # type: ignore[misc]
        touched = statistics.mean(len(set(draw.flatten().tolist())) for draw in draws)
        rate = touched * per_expert / seconds
        error = _expert_error(outs[0], x, packed, packed_down, draws[0], weights)
        found.append(
            Figure(
                f"experts 8 of {experts}, {touched:.0f} touched",
                f"{gate}+{down}",
                count,
                "served",
                round(seconds * 1e6, 2),
                round(spread * 1e6, 2),
                round(rate / 1e9, 1),
                round(rate / bandwidth, 3),
                error,
                num_bytes=touched * per_expert,
                operations=6.0 * count * SLOTS * inner * width,
                reference="float64, first row",
                allowed=1.5 * ALLOWED_ERROR,
            )
        )
    return found


def _expert_error(
    got: torch.Tensor,
    x: torch.Tensor,
    gate_up: Sequence[PackedTensor],
    down: PackedTensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> float:
    from slimserve.ops.reference.linear import expert_of

    expected = torch.zeros(down.shape[1], dtype=torch.float64, device=x.device)
    for slot in range(ids.shape[1]):
        expert = int(ids[0, slot])
        gate, up = (dequantize(expert_of(part, expert)).double() @ x[0].double() for part in gate_up)
        gate, up = gate.clamp(max=10.0), up.clamp(-10.0, 10.0)
        hidden = gate * torch.sigmoid(gate) * up
        expected += weights[0, slot].double() * (dequantize(expert_of(down, expert)).double() @ hidden)
    return float((got[0].double() - expected).norm() / expected.norm())
