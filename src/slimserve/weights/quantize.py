"""Quantizing a checkpoint: GGUF to GGUF here, safetensors to safetensors in `quantize_folder`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import torch

from slimserve.errors import UsageError
from slimserve.quant.decode import dequantize
from slimserve.quant.encode import encode
from slimserve.quant.encode_scaled import E2M1_MAX, E4M3_MAX
from slimserve.quant.formats import F32, NVFP4, PLAIN_DTYPES
from slimserve.quant.tensor import BlockFormat, PackedTensor
from slimserve.weights.gguf import GgufFile
from slimserve.weights.gguf_write import TensorPlan, write_gguf
from slimserve.weights.imatrix import Importances, read_imatrix
from slimserve.weights.quantize_folder import quantize_folder
from slimserve.weights.quantize_report import Progress, QuantizeReport
from slimserve.weights.quantize_rules import GGML_FILE_TYPES, Family, check_families, gguf_choice, writable_format
from slimserve.weights.quantized import gguf_tensors, scale_name
from slimserve.weights.safetensors import SafetensorsFolder

_PIECE_ELEMENTS = 1 << 24
"""Elements of a weight that stand in float32 at a time."""


def quantize(
    source: Path,
    target: Path,
    type_name: str,
    *,
    imatrix: Path | None = None,
    head: str | None = None,
    keep: Sequence[str] = (),
    families: Sequence[Family] = (),
    progress: Progress | None = None,
) -> QuantizeReport:
    """Write `target`, a checkpoint whose weights are of type `type_name`, from `source`.

    A GGUF file gives a GGUF file, a safetensors folder a folder. Routers, norms, convolutions and other small
    tensors stay as they are, and so do names that fit a pattern of `keep`. In GGUF, embeddings and head become
    `head` (Q6_K or Q8_0 unless given), and `families` give chosen names another type; in safetensors embeddings and
    head stay. Raises UsageError, RefusalError or FormatError.
    """
    if target.exists() and target.resolve() == source.resolve():
        raise UsageError(f"{target} is the source itself; give another place")
    importances = read_imatrix(imatrix) if imatrix is not None else {}
    if source.suffix == ".gguf":
        if target.suffix != ".gguf":
            raise UsageError(f"a GGUF file is quantized to a GGUF file; {target} does not end in .gguf")
        return _gguf(GgufFile.open(source), target, type_name, importances, head, keep, families, progress)
    if target.suffix in (".gguf", ".safetensors"):
        raise UsageError(f"a safetensors model is quantized to a folder; {target} looks like a file")
    if head is not None or families:
        raise UsageError("--head and --as are for GGUF; embeddings and heads of safetensors models stay as they are")
    return quantize_folder(SafetensorsFolder.open(source), target, type_name, importances, keep, progress)


def _pieces(packed: PackedTensor) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(matrix index, first row, float32 rows) of [..., N, K], so that a stack of experts never stands whole."""
    rows, columns = packed.shape[-2], packed.shape[-1]
    num_sets = int(torch.Size(packed.shape[:-2]).numel())
    step = max(1, _PIECE_ELEMENTS // columns)
    whole = dequantize(packed) if packed.scales else packed.data
    source = whole.reshape(num_sets, rows, whole.shape[-1])
    for index in range(num_sets):
        for start in range(0, rows, step):
            piece = source[index, start : start + step]
            if not packed.scales:
                piece = dequantize(PackedTensor(packed.format, (piece.shape[0], columns), piece, packed.name))
            yield index, start, piece


def requantize(
    packed: PackedTensor, fmt: BlockFormat, importance: torch.Tensor | None, factors: torch.Tensor | None = None
) -> torch.Tensor:
    """The data of `packed` [..., N, K] in `fmt`, each matrix divided by its own of `factors` first."""
    rows, columns = packed.shape[-2], packed.shape[-1]
    dtype = PLAIN_DTYPES.get(fmt.name)
    width = columns if dtype is not None else fmt.row_bytes(columns)
    num_sets = int(torch.Size(packed.shape[:-2]).numel())
    out = torch.empty((num_sets, rows, width), dtype=dtype or torch.uint8)
    for index, start, values in _pieces(packed):
        weights = importance if importance is None or importance.dim() == 1 else importance[index]
        scaled = values if factors is None else values / factors[index]
        part = encode(scaled, fmt, importance=weights, name=packed.name)
        out[index, start : start + values.shape[0]] = part.data
    return out.reshape(*packed.shape[:-1], width)


def nvfp4_factors(packed: PackedTensor) -> torch.Tensor:
    """One multiplier per matrix, amax / (448 * 6): gives GGUF NVFP4 the whole range of group scales; [E] or [1]."""
    peaks = torch.zeros(int(torch.Size(packed.shape[:-2]).numel()))
    for index, _, values in _pieces(packed):
        peaks[index] = torch.maximum(peaks[index], values.abs().amax())
    return torch.where(peaks > 0, peaks / (E4M3_MAX * E2M1_MAX), 1.0)


def encoded_plans(packed: PackedTensor, fmt: BlockFormat, importance: torch.Tensor | None) -> list[TensorPlan]:
    """What `packed` becomes in a GGUF file as `fmt`; NVFP4 brings its `<module>.scale` along."""
    if fmt is not NVFP4:
        return [TensorPlan(packed.name, packed.shape, fmt, lambda: requantize(packed, fmt, importance))]
    factors = cache(lambda: nvfp4_factors(packed))
    count = int(torch.Size(packed.shape[:-2]).numel())
    weight = TensorPlan(packed.name, packed.shape, fmt, lambda: requantize(packed, fmt, importance, factors()))
    return [weight, TensorPlan(scale_name(packed.name), (count,), F32, factors)]


def _gguf(
    file: GgufFile,
    target: Path,
    type_name: str,
    importances: Importances,
    head: str | None,
    keep: Sequence[str],
    families: Sequence[Family],
    progress: Progress | None,
) -> QuantizeReport:
    fmt = writable_format(type_name)
    wanted_head = writable_format(head) if head is not None else None
    tensors = gguf_tensors(file)
    check_families(families, tensors.shapes)
    report = QuantizeReport(bytes_in=file.num_bytes)
    plans: list[TensorPlan] = []
    for name, shape in tensors.shapes.items():
        packed = tensors.packed(name)
        chosen = gguf_choice(name, shape, fmt, wanted_head, keep, families)
        if chosen is None or chosen is packed.format:
            plans += _kept_plans(packed, report)
            continue
        made = encoded_plans(packed, chosen, report.importance_of(importances, name))
        report.count(chosen.name, sum(plan.num_bytes for plan in made))
        plans += made
    metadata = {key: value for key, value in file.metadata.items() if not key.startswith("split.")}
    metadata |= {"general.file_type": GGML_FILE_TYPES[fmt.name], "general.quantization_version": 2}
    write_gguf(target, metadata, plans, value_types=file.value_types, progress=_watch(progress, plans, file))
    return report


def _kept_plans(packed: PackedTensor, report: QuantizeReport) -> list[TensorPlan]:
    """A tensor as it is, its separate GGUF scale included; other side scales are folded into BF16."""
    if not packed.scales:
        plans = [TensorPlan.of(packed)]
    elif packed.format.name == "NVFP4":
        scale = packed.scales["global_scale"].reshape(-1)
        plans = [TensorPlan.of(packed), TensorPlan(scale_name(packed.name), tuple(scale.shape), F32, lambda: scale)]
    else:
        bf16 = encode(dequantize(packed), writable_format("BF16"), name=packed.name)
        plans = [TensorPlan.of(bf16)]
    report.count(plans[0].format.name, sum(plan.num_bytes for plan in plans))
    return plans


def _watch(progress: Progress | None, plans: Sequence[TensorPlan], file: GgufFile) -> Callable[[TensorPlan], None]:
    done = 0

    def watch(plan: TensorPlan) -> None:
        nonlocal done
        info = file.tensors.get(plan.name)
        if progress is not None:
            progress(plan.name, done, file.num_bytes)
        done += info.num_bytes if info is not None else 0

    return watch
