"""Sidecar files: chosen tensor families of a checkpoint in another format, kept in a GGUF file of their own.

A record may name a sidecar beside its model; its tensors then take the place of the model's tensors of the same
names. The sidecar says which checkpoint it was made from, so that it is never laid over another one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from slimserve.errors import FormatError, UsageError
from slimserve.quant.decode import dequantize
from slimserve.quant.encode_scaled import Fp8Scale, encode_fp8
from slimserve.quant.formats import I8
from slimserve.quant.tensor import PackedTensor
from slimserve.weights.gguf import GgufFile
from slimserve.weights.gguf_write import TensorPlan, write_gguf
from slimserve.weights.imatrix import read_imatrix
from slimserve.weights.quantize import encoded_plans
from slimserve.weights.quantize_report import Progress, QuantizeReport
from slimserve.weights.quantize_rules import Family, matches, writable_format
from slimserve.weights.quantized import LogicalTensors, gguf_tensors, safetensors_tensors
from slimserve.weights.safetensors import SafetensorsFolder

ReadPacked = Callable[[str], PackedTensor]

BASE_KEY = "slimserve.sidecar.base"
"""Metadata key of the digest of names and shapes of the checkpoint that a sidecar belongs to."""


def base_digest(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """A digest of the tensor names and shapes of a checkpoint."""
    lines = "\n".join(f"{name} {list(shape)}" for name, shape in sorted(shapes.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def _open(source: Path) -> LogicalTensors:
    if source.suffix == ".gguf":
        return gguf_tensors(GgufFile.open(source))
    return safetensors_tensors(SafetensorsFolder.open(source))


def _fp8_plans(packed: PackedTensor) -> list[TensorPlan]:
    """FP8 in GGUF: E4M3 payloads as I8, and `<name>_scale_inv` per 128 x 128 block."""
    encoded = encode_fp8(dequantize(packed), Fp8Scale.BLOCK, packed.name)
    data, scale = encoded.data.view(torch.int8), encoded.scales["weight_scale"]
    scale_name = f"{packed.name}_scale_inv"
    return [
        TensorPlan(packed.name, packed.shape, I8, lambda: data),
        TensorPlan(scale_name, tuple(scale.shape), writable_format("F32"), lambda: scale),
    ]


def make_sidecar(
    source: Path,
    target: Path,
    families: Sequence[Family],
    *,
    imatrix: Path | None = None,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Re-quantize the families of `source` (GGUF or safetensors) into the GGUF file `target`.

    Types are those of GGUF, and FP8 (128 x 128 blocks). The first family whose pattern fits a tensor decides.
    Raises UsageError for a family that fits no tensor of two or more dimensions.
    """
    if target.suffix != ".gguf":
        raise UsageError(f"a sidecar is a GGUF file; {target} does not end in .gguf")
    formats = {family: None if family.type_name.upper() == "FP8" else writable_format(family.type_name)
               for family in families}  # fmt: skip
    importances = read_imatrix(imatrix) if imatrix is not None else {}
    tensors = _open(source)
    report, plans, used = QuantizeReport(), [], set()
    for name, shape in tensors.shapes.items():
        family = next((item for item in families if matches(name, [item.pattern])), None)
        if family is None or len(shape) < 2:
            continue
        used.add(family)
        packed, fmt = tensors.packed(name), formats[family]
        report.bytes_in += packed.num_bytes
        importance = report.importance_of(importances, name)
        if fmt is None:
            made = _fp8_plans(packed)
        else:
            if shape[-1] % fmt.block_size:
                raise UsageError(f"tensor {name!r}: rows of {shape[-1]} are no whole {fmt.name} blocks")
            made = encoded_plans(packed, fmt, importance)
        plans += made
        report.count(family.type_name.upper(), sum(plan.num_bytes for plan in made))
    idle = [family.pattern for family in families if family not in used]
    if idle:
        raise UsageError(f"no matrix of {source} fits {idle[0]!r}; see the names with `slimserve show`")
    metadata = {"general.architecture": "sidecar", "general.type": "sidecar", BASE_KEY: base_digest(tensors.shapes)}
    sizes = [plan.num_bytes for plan in plans]
    done = 0

    def watch(plan: TensorPlan) -> None:
        nonlocal done
        if progress is not None:
            progress(plan.name, done, sum(sizes))
        done += plan.num_bytes

    write_gguf(target, metadata, plans, progress=watch)
    return report


def with_sidecar(shapes: Mapping[str, tuple[int, ...]], packed: ReadPacked, path: Path) -> ReadPacked:
    """Reads tensors of a checkpoint with those of the sidecar at `path` in place of the same names.

    `shapes` and `packed` are the checkpoint's. Raises FormatError when the file is no sidecar, belongs to another
    checkpoint, or holds a foreign tensor.
    """
    file = GgufFile.open(path)
    stated = file.metadata.get(BASE_KEY)
    if stated is None:
        raise FormatError(f"{path} is not a sidecar file: it lacks the key {BASE_KEY!r}")
    if stated != base_digest(shapes):
        raise FormatError(f"{path} was made from another checkpoint; its names and shapes differ")
    swapped = gguf_tensors(file)
    for name, shape in swapped.shapes.items():
        if shapes.get(name) != shape:
            raise FormatError(f"{path}: tensor {name!r} {list(shape)} is not one of the checkpoint")

    def read(name: str) -> PackedTensor:
        return swapped.packed(name) if name in swapped.shapes else packed(name)

    return read
