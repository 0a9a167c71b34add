"""Quantizing a safetensors model into a new folder that other engines read too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from slimserve.errors import RefusalError, UsageError
from slimserve.quant.decode import dequantize
from slimserve.quant.encode_scaled import INT4_GROUP, NVFP4_GROUP, Fp8Scale, encode_fp8, encode_int4, encode_nvfp4
from slimserve.quant.export import quantization_config, stored_tensors
from slimserve.quant.schemes import SchemeKind
from slimserve.quant.tensor import PackedTensor
from slimserve.weights.imatrix import Importances
from slimserve.weights.quantize_report import Progress, QuantizeReport
from slimserve.weights.quantize_rules import HEADS_HF, KEPT_HF, matches
from slimserve.weights.quantized import LogicalTensors, safetensors_tensors
from slimserve.weights.safetensors import INDEX_NAME, SafetensorsFolder
from slimserve.weights.safetensors_write import StoredPlan, write_safetensors

_SHARD_BYTES = 4 << 30


class FolderType(Enum):
    """Types that a safetensors folder can have; the value is the command line's word."""

    FP8 = "FP8"
    FP8_TENSOR = "FP8_TENSOR"
    FP8_BLOCK = "FP8_BLOCK"
    NVFP4 = "NVFP4"
    NVFP4_MODELOPT = "NVFP4_MODELOPT"
    INT4 = "INT4"
    INT4_GPTQ = "INT4_GPTQ"


_KINDS = {
    FolderType.FP8: SchemeKind.FP8_CHANNEL,
    FolderType.FP8_TENSOR: SchemeKind.FP8_TENSOR,
    FolderType.FP8_BLOCK: SchemeKind.FP8_BLOCK,
    FolderType.NVFP4: SchemeKind.NVFP4_COMPRESSED,
    FolderType.NVFP4_MODELOPT: SchemeKind.NVFP4_MODELOPT,
    FolderType.INT4: SchemeKind.INT4_COMPRESSED,
    FolderType.INT4_GPTQ: SchemeKind.INT4_GPTQ,
}


def folder_type(name: str) -> FolderType:
    try:
        return FolderType(name.upper().replace("-", "_"))
    except ValueError:
        possible = ", ".join(kind.value for kind in FolderType)
        raise UsageError(f"type {name!r} cannot be written to safetensors; possible are {possible}") from None


def _can_hold(kind: FolderType, shape: tuple[int, ...]) -> bool:
    if len(shape) != 2:
        return False
    multiple = {FolderType.NVFP4: NVFP4_GROUP, FolderType.NVFP4_MODELOPT: NVFP4_GROUP}.get(kind, 1)
    if kind in (FolderType.INT4, FolderType.INT4_GPTQ):
        multiple = INT4_GROUP
    return shape[1] % multiple == 0 and (kind is not FolderType.INT4_GPTQ or shape[0] % 8 == 0)


def _encode_for_folder(packed: PackedTensor, kind: FolderType, importance: torch.Tensor | None) -> PackedTensor:
    values = dequantize(packed)
    if kind is FolderType.FP8:
        return encode_fp8(values, Fp8Scale.CHANNEL, packed.name)
    if kind is FolderType.FP8_TENSOR:
        return encode_fp8(values, Fp8Scale.TENSOR, packed.name)
    if kind is FolderType.FP8_BLOCK:
        return encode_fp8(values, Fp8Scale.BLOCK, packed.name)
    if kind in (FolderType.INT4, FolderType.INT4_GPTQ):
        return encode_int4(values, packed.name, importance)
    return encode_nvfp4(values, packed.name, importance)


class ShardWriter:
    """Collects tensors into files of about `shard_bytes`, then names them and writes the index."""

    def __init__(self, folder: Path, shard_bytes: int = _SHARD_BYTES) -> None:
        self.folder = folder
        self.shard_bytes = shard_bytes
        self.pending: list[StoredPlan] = []
        self.files: list[list[str]] = []
        self.total = 0

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take tensors; a full file is written."""
        self.pending += [StoredPlan.of(name, tensor) for name, tensor in tensors.items()]
        if sum(plan.num_bytes for plan in self.pending) >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what is pending."""
        if self.pending:
            self.files.append([plan.name for plan in self.pending])
            self.total += sum(plan.num_bytes for plan in self.pending)
            write_safetensors(self._draft(len(self.files)), self.pending, {"format": "pt"})
            self.pending = []

    def _draft(self, number: int) -> Path:
        return self.folder / f"model-{number:05d}.safetensors.part"

    def finish(self) -> None:
        """Give the files their final names; one file needs no index."""
        self.flush()
        count = len(self.files)
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        names = ["model.safetensors"] if count == 1 else names
        for number, name in enumerate(names, start=1):
            self._draft(number).replace(self.folder / name)
        if count > 1:
            weight_map = {tensor: name for name, tensors in zip(names, self.files, strict=True) for tensor in tensors}
            index = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
            (self.folder / INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True))


def quantize_folder(
    source: SafetensorsFolder,
    target: Path,
    type_name: str,
    importances: Importances,
    keep: Sequence[str],
    progress: Progress | None,
) -> QuantizeReport:
    """Write the folder `target` with the matrices of `source` as `type_name`; see `quantize.quantize`."""
    kind = folder_type(type_name)
    tensors = safetensors_tensors(source)
    if target.exists() and any(target.glob("*.safetensors")):
        raise UsageError(f"{target} already holds safetensors files; give an empty folder")
    matrices = [name for name, shape in tensors.shapes.items() if name.endswith(".weight") and len(shape) == 2]
    kept = (*KEPT_HF, *HEADS_HF, *keep)
    chosen = {name for name in matrices if not matches(name, kept) and _can_hold(kind, tensors.shapes[name])}
    if not chosen:
        raise RefusalError(f"{source.path} has no weight that can become {kind.value}")
    report = QuantizeReport(bytes_in=source.num_bytes)
    try:
        target.mkdir(parents=True, exist_ok=True)
        writer = ShardWriter(target)
        for done, name in enumerate(tensors.shapes):
            if progress is not None:
                progress(name, done, len(tensors.shapes))
            if name in chosen:
                importance = report.importance_of(importances, name)
                packed = _encode_for_folder(tensors.packed(name), kind, importance)
                stored, label = stored_tensors(packed, _KINDS[kind]), kind.value
            else:
                stored, label = _stored_plain(source, tensors, name), "as it was"
            report.count(label, sum(tensor.nbytes for tensor in stored.values()))
            writer.add(stored)
        writer.finish()
        modules = [name.removesuffix(".weight") for name in matrices if name in chosen]
        ignored = [name.removesuffix(".weight") for name in matrices if name not in chosen]
        _write_companions(source, target, quantization_config(_KINDS[kind], modules, ignored))
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from None
    return report


def _stored_plain(source: SafetensorsFolder, tensors: LogicalTensors, name: str) -> dict[str, torch.Tensor]:
    """A tensor that stays: as stored, or in bfloat16 where it was quantized another way."""
    if tensors.schemes is not None and name in tensors.schemes.weights:
        return {name: dequantize(tensors.packed(name), torch.bfloat16)}
    return {name: source.tensor(name)}


def _write_companions(source: SafetensorsFolder, target: Path, quantization: dict[str, Any]) -> None:
    """config.json with its new quantization, and every small file beside the weights."""
    config = {key: value for key, value in source.config.items() if key != "compression_config"}
    config["quantization_config"] = quantization
    (target / "config.json").write_text(json.dumps(config, indent=2))
    for path in source.folder.iterdir():
        small = path.is_file() and path.suffix in (".json", ".jinja", ".txt", ".model", ".md")
        if small and path.name not in ("config.json", "hf_quant_config.json", INDEX_NAME):
            shutil.copyfile(path, target / path.name)
